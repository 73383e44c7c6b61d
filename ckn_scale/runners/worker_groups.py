"""Workers that live long and answer calls together, for work whose rounds are short: a step of SGD, say.

A group calls one function in every worker, each with a part of its own; who dies in the middle is replaced
and asked again. The function keeps nothing between calls that it could not make again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, Protocol, TypeVar

from ckn_scale.config import Resources
from ckn_scale.errors import RunFailed
from ckn_scale.processes import ChildDied, ChildOverdue, KillableChild

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
    """Spawned processes."""

    def __init__(self, function: Callable[..., Answer], resources: Resources) -> None:
        self._resources = resources
        self._children = [KillableChild(function) for _ in range(max(resources.workers, 1))]

    @property
    def size(self) -> int:
        return len(self._children)

    def __enter__(self) -> ProcessGroup[Answer]:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()

    def call_all(self, shared: tuple[Any, ...], parts: Sequence[Any]) -> list[Answer]:
        calls = list(zip(self._children, parts, strict=False))
        for child, part in calls:
            child.send(*shared, part)
        return [self._receive(child, (*shared, part)) for child, part in calls]

    def _receive(self, child: KillableChild[Answer], arguments: tuple[Any, ...]) -> Answer:
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
