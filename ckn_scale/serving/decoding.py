"""Files of strangers are decoded in child processes: a hostile one is killed, and others go on beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

from ckn_scale.core.images import decoding_bytes
from ckn_scale.errors import ImageRejected
from ckn_scale.processes import KillableChild, prepare_killably

Result = TypeVar("Result")
HEAVY_BYTES = 160 << 20  # of memory to decode: a photograph of a telephone takes less


class Decoders:
    """Some children for what is decoded in no time, and one for what is heavy, where only its like waits."""

    def __init__(self, num_processes: int, deadline_s: float) -> None:
        self._quick = _Children(num_processes, deadline_s)
        self._heavy = _Children(1, deadline_s)
        self._quick.start()

    async def call(self, data: bytes, work: Callable[..., Result], *arguments: Any) -> Result | ImageRejected:
        """What `work(*arguments)`, which decodes `data`, returns in a child, ended when it is late."""
        is_heavy = await asyncio.to_thread(decoding_bytes, data) > HEAVY_BYTES
        return await (self._heavy if is_heavy else self._quick).call(work, *arguments)

    def close(self) -> None:
        self._quick.close()
        self._heavy.close()


class _Children:
    def __init__(self, count: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(count, "decode")
        self._idle: SimpleQueue[KillableChild[Any]] = SimpleQueue()
        self._count = count
        for _ in range(count):
            self._idle.put(KillableChild(_call))

    def start(self) -> None:
        """In the background, before the first calls; one that does not start is started by its first."""
        for _ in range(self._count):
            self._threads.submit(self._start_one)

    async def call(self, work: Callable[..., Result], *arguments: Any) -> Result | ImageRejected:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._call_one, work, *arguments)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().kill()

    def _start_one(self) -> None:
        child = self._idle.get()
        try:
            child.start()
        finally:
            self._idle.put(child)

    def _call_one(self, work: Callable[..., Result], *arguments: Any) -> Result | ImageRejected:
        child = self._idle.get()
        try:
            return prepare_killably(child, work, *arguments, deadline_s=self._deadline_s)
        finally:
            self._idle.put(child)


def _call(work: Callable[..., Result], *arguments: Any) -> Result:
    return work(*arguments)
