"""Large arrays from process to process by memory that both map: a pipe would carry them in small pieces."""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import tempfile
from multiprocessing import reduction
from typing import Any, NamedTuple

_ALIGNMENT = 64  # bytes


class Message(NamedTuple):
    """A pickled value without its large arrays, and where these lie."""

    pickled: bytes
    ends: list[int]
    sizes: list[int]


class SharedBuffers:
    """One process writes values, others read them; a value is good until the next one is written.

    The file has no name, so nothing is left of it when the last process that knows it is gone.
    """

    def __init__(self) -> None:
        self._fd = _open_unnamed()
        self._map: mmap.mmap | None = None

    def __getstate__(self) -> Any:
        return reduction.DupFd(self._fd)  # type: ignore[attr-defined, unused-ignore]

    def __setstate__(self, duplicate: Any) -> None:
        self._fd, self._map = duplicate.detach(), None

    def write(self, value: Any) -> Message:
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        views = [one.raw() for one in buffers]
        sizes = [one.nbytes for one in views]
        ends = list(itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        if ends and os.fstat(self._fd).st_size < ends[-1]:
            os.ftruncate(self._fd, ends[-1])
        mapped = self._map_up_to(ends[-1] if ends else 0)
        for start, view in zip([0, *ends], views, strict=False):
            mapped[start : start + view.nbytes] = view
        return Message(pickled, ends, sizes)

    def read(self, message: Message) -> Any:
        mapped = self._map_up_to(message.ends[-1] if message.ends else 0)
        places = zip([0, *message.ends], message.sizes, strict=False)
        return pickle.loads(message.pickled, buffers=[mapped[start : start + size] for start, size in places])

    def close(self) -> None:
        os.close(self._fd)

    def _map_up_to(self, size: int) -> memoryview:
        if size > (0 if self._map is None else len(self._map)):
            self._map = mmap.mmap(self._fd, 0)
        return memoryview(self._map if self._map is not None else b"")


def _open_unnamed() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ckn-scale")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
