"""The driver loop: hand shards to a executor, retry what fails, say at the end what is undone.

A executor is who does the work: this process, a pool of processes, Ray actors. It starts tasks and
reports outcomes; which shard comes next, how often and how is decided here, once for all executors.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Protocol

from ckn_scale.config import Resources
from ckn_scale.errors import CorruptData, RunFailed, RunMismatch

log = logging.getLogger(__name__)

MAX_MOVES = 20  # after which a shard is suspected to take its hosts down itself


@dataclass(frozen=True)
class ShardTask:
    """One shard for one worker: names only, never data."""

    step: str
    shard_id: int
    params: Mapping[str, str] = field(default_factory=dict)
    tries: int = 0
    moves: int = 0  # how often its host went away, which is not held against it
    isolate: bool = False
    redo: str | None = None  # why a shard that is committed is done once more
    check: bool = False  # read what is committed, and make it again where it is damaged


@dataclass(frozen=True)
class Outcome:
    """How a task ended.

    `done` with a report, `failed` with an error, `lost` with its worker, `overdue` and killed, or
    `node_lost`: its host went away, which says nothing about the shard.
    """

    task: ShardTask
    kind: Literal["done", "failed", "lost", "overdue", "node_lost"]
    report: Mapping[str, Any] = field(default_factory=dict)
    error: BaseException | None = None


@dataclass(frozen=True)
class Progress:
    step: str
    done: int  # shards, those that earlier calls did included
    total: int
    images: int  # the same in images, those of shards under way included; 0 of 0 where a step has none
    total_images: int
    seconds: float  # of this call


ProgressHook = Callable[[Progress], None]


class Executor(Protocol):
    """Workers that are alive. `free` says how many tasks may be started now."""

    @property
    def free(self) -> int: ...

    @property
    def images_under_way(self) -> int:
        """Images that are done of shards that are not; 0 where workers do not tell."""
        ...

    def start(self, task: ShardTask) -> None: ...

    def wait(self, timeout_s: float) -> list[Outcome]: ...

    def __enter__(self) -> Executor: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass
class StepReport:
    """What a call of `run_shards` did."""

    step: str
    total: int
    skipped: int = 0
    done: int = 0
    images: int = 0
    retries: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    damage: str | None = None  # what a shard found damaged, if that is why it failed
    mismatch: str | None = None  # why a worker may not work on this run


def run_shards(
    executor: Executor,
    tasks: Sequence[ShardTask],
    *,
    label: str,
    total: int,
    resources: Resources,
    on_progress: ProgressHook,
    write_event: Callable[..., None],
    sizes: Mapping[int, int] | None = None,
    images_before: int = 0,
) -> StepReport:
    """Do every task; one bad shard does not stop the others, but the end says so.

    What the user has to fix (a full disk, a wrong key) would fail them all: no more are begun then.
    `sizes` has the images of each shard, for progress.
    """
    report = StepReport(label, total, skipped=total - len(tasks))
    waiting, running, begun = deque(tasks), 0, time.monotonic()
    sizes, images = sizes or {}, images_before
    total_images = images_before + sum(sizes.values())
    while waiting or running:
        while waiting and executor.free > 0:
            executor.start(waiting.popleft())
            running += 1
        for outcome in executor.wait(timeout_s=1.0):
            running -= 1
            images += sizes.get(outcome.task.shard_id, 0) if outcome.kind == "done" else 0
            again = _record_outcome(outcome, report, resources, write_event)
            if again is not None:
                waiting.append(again)
            if _is_for_the_user(outcome.error):
                waiting.clear()
        done = report.skipped + report.done
        seen = images + executor.images_under_way
        on_progress(Progress(label, done, total, seen, total_images, time.monotonic() - begun))
    return report


def _record_outcome(
    outcome: Outcome, report: StepReport, resources: Resources, write_event: Callable[..., None]
) -> ShardTask | None:
    """Count an outcome; the task to try again, if any."""
    task = outcome.task
    if outcome.kind == "done":
        report.done += 1
        report.images += int(outcome.report.get("images", 0))
        return None
    reason = f"{type(outcome.error).__name__}: {outcome.error}" if outcome.error else outcome.kind
    write_event(outcome.kind, step=task.step, shard=task.shard_id, tries=task.tries + 1, reason=reason)
    if outcome.kind == "node_lost" and task.moves < MAX_MOVES:
        report.retries += 1
        return replace(task, moves=task.moves + 1)
    if task.tries + 1 >= resources.max_attempts or _is_for_the_user(outcome.error):
        log.error("%s shard %d is given up: %s", task.step, task.shard_id, reason)
        report.failed[task.shard_id] = reason
        report.damage = str(outcome.error) if isinstance(outcome.error, CorruptData) else report.damage
        report.mismatch = str(outcome.error) if isinstance(outcome.error, RunMismatch) else report.mismatch
        return None
    log.warning("%s shard %d is tried again: %s", task.step, task.shard_id, reason)
    report.retries += 1
    # A worker that died or hung may have met a poison image: next time each image is on its own.
    return replace(task, tries=task.tries + 1, isolate=task.isolate or outcome.kind != "failed")


def _is_for_the_user(error: BaseException | None) -> bool:
    return getattr(error, "exit_code", 1) == 2


def require_done(report: StepReport) -> None:
    """RunFailed when shards stay undone; CorruptData or RunMismatch when that is why."""
    if report.damage is not None:
        raise CorruptData(f"{report.step}: {report.damage}")
    if report.mismatch is not None:
        raise RunMismatch(report.mismatch)
    if report.failed:
        shard, reason = next(iter(sorted(report.failed.items())))
        raise RunFailed(
            f"{report.step}: {len(report.failed)} of {report.total} shards failed, "
            f"the first is {shard}: {reason}"
        )
