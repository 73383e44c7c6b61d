"""Workers that live long and answer calls together, for work whose rounds are short: a step of SGD, say.

A group calls one function in every worker, each with a part of its own; who dies in the middle is replaced
and asked again. The function keeps nothing between calls that it could not make again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ckn_scale.config import Resources
from ckn_scale.errors import RunFailed
from ckn_scale.processes import ChildDied, ChildOverdue, KillableChild
from ckn_scale.runners.shared_buffers import Message, SharedBuffers

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class WorkerGroup(Protocol[Answer]):
    """Workers that all have the same function."""

    @property
    def size(self) -> int: ...

    def call_all(self, shared: tuple[Any, ...], parts: Sequence[Any]) -> list[Answer]:
        """`function(*shared, part)` for at most `size` parts, each by another worker; answers in order."""
        ...


@contextmanager
def open_group(
    function: Callable[..., Answer], resources: Resources, *, device: str, threads: int
) -> Iterator[WorkerGroup[Answer]]:
    """Processes of this machine, or Ray's actors; `function` has to be picklable."""
    with ExitStack() as stack:
        if resources.ray is None:
            yield stack.enter_context(ProcessGroup(function, resources))
        else:
            from ckn_scale.runners.ray_groups import ActorGroup

            yield stack.enter_context(ActorGroup(function, resources, device=device, threads=threads))


class ProcessGroup(Generic[Answer]):
    """Spawned processes; what all of them get is written once, for all to read."""

    def __init__(self, function: Callable[..., Answer], resources: Resources) -> None:
        self._resources, self._shared = resources, SharedBuffers()
        self._answers = [SharedBuffers() for _ in range(max(resources.workers, 1))]
        self._children = [
            KillableChild(_SharingFunction(function, self._shared, answers)) for answers in self._answers
        ]

    @property
    def size(self) -> int:
        return len(self._children)

    def __enter__(self) -> ProcessGroup[Answer]:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()
        for buffers in (self._shared, *self._answers):
            buffers.close()

    def call_all(self, shared: tuple[Any, ...], parts: Sequence[Any]) -> list[Answer]:
        message, calls = self._shared.write(shared), list(zip(self._children, parts, strict=False))
        for child, part in calls:
            child.send(message, part)
        try:
            answers = [self._receive(child, message, part) for child, part in calls]
        except BaseException:
            for child, _ in calls:  # whose answers nobody waits for
                child.kill()
            raise
        return [buffers.read(one) for buffers, one in zip(self._answers, answers, strict=False)]

    def _receive(self, child: KillableChild[Message], *arguments: Any) -> Message:
        """The answer of a call that was sent, which is repeated as often as a shard would be."""
        for attempt in range(1, self._resources.max_attempts + 1):
            pid = child.pid
            try:
                return child.receive(self._resources.shard_deadline_s)
            except (ChildDied, ChildOverdue) as error:
                log.warning("worker %s was lost, its part is done again: %s", pid, error)
                if attempt == self._resources.max_attempts:
                    raise RunFailed(f"{attempt} workers were lost one after the other: {error}") from None
                child.send(*arguments)
        raise AssertionError("unreachable")


@dataclass(frozen=True)
class _SharingFunction:
    """Reads what is shared and writes its answer where the other side maps them."""

    function: Callable[..., Any]
    shared: SharedBuffers
    answers: SharedBuffers

    def __call__(self, message: Message, part: Any) -> Message:
        return self.answers.write(self.function(*self.shared.read(message), part))
