"""The driver: runs a step by handing its shards to an executor, retries what fails, says what is undone.

An executor is who does the work: this process, a pool of processes, Ray actors. It starts tasks and
reports outcomes; which shard comes next, how often and how is decided here, once for all executors.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Literal, Protocol, TypeVar

from ckn_scale.config import Resources
from ckn_scale.errors import CorruptData, InputError, RunFailed, RunMismatch
from ckn_scale.runners.worker import Handshake, ShardReport, offer_handshake
from ckn_scale.step import ShardTask, Step, check_fingerprint
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.shards import Commit, find_size_mismatches

log = logging.getLogger(__name__)
StepT = TypeVar("StepT", bound=Step)
MAX_MOVES = 20  # after which a shard is suspected to take its hosts down itself


@dataclass(frozen=True)
class Progress:
    """How far a step is."""

    step: str
    done: int  # shards, those that earlier calls did included
    total: int
    images: int  # the same in images, those of shards under way included; 0 of 0 where a step has none
    total_images: int
    seconds: float  # of this call


ProgressHook = Callable[[Progress], None]


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


@dataclass(frozen=True)
class TaskOutcome:
    """How a task ended.

    `done` with a report, `failed` with an error, `lost` with its worker, `overdue` and killed, or
    `node_lost`: its host went away, which says nothing about the shard.
    """

    task: ShardTask
    kind: Literal["done", "failed", "lost", "overdue", "node_lost"]
    report: ShardReport | None = None  # of one that is done
    error: BaseException | None = None


OnImage = Callable[[], None]


class Executor(Protocol):
    """Workers that are alive. `free` says how many tasks may be started now."""

    @property
    def free(self) -> int: ...

    @property
    def images_under_way(self) -> int:
        """Images that are done of shards that are not, as far as workers have reported."""
        ...

    def start(self, task: ShardTask) -> None: ...

    def wait(self, timeout_s: float, on_image: OnImage = lambda: None) -> list[TaskOutcome]:
        """What ended. An executor that cannot return before that calls `on_image` for every image done."""
        ...

    def __enter__(self) -> Executor: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@contextmanager
def open_driver(run: RunFolder, resources: Resources, on_progress: ProgressHook) -> Iterator[Driver]:
    """A driver with the workers that `resources` asks for, each having shown that it sees run and images."""
    with (
        offer_handshake(run) as handshake,
        _choose_executor(resources)(run.url, resources, handshake) as executor,
    ):
        yield Driver(run, executor, resources, on_progress)


def _choose_executor(resources: Resources) -> Callable[[str, Resources, Handshake], Executor]:
    if resources.ray is not None:
        from ckn_scale.runners.ray_actors import RayExecutor

        return RayExecutor
    from ckn_scale.runners.local import InlineExecutor, PoolExecutor

    return InlineExecutor if resources.workers == 0 else PoolExecutor


class Driver:
    """One run folder, one executor: does steps and remembers what they came to.

    What is committed is looked at by the sizes of its files; with `check_all` every byte is read. What
    is damaged is rebuilt, as the next generation.
    """

    def __init__(
        self,
        run: RunFolder,
        executor: Executor,
        resources: Resources,
        on_progress: ProgressHook,
    ) -> None:
        self.run, self.executor, self.resources, self.on_progress = run, executor, resources, on_progress
        self.check_all = False
        self.reports: list[StepReport] = []

    def run_step(self, step: StepT) -> StepT:
        """Do what is not done yet of a step; RunFailed when some of it stays undone."""
        fingerprint = step.fingerprint  # an input that is missing is refused here, not in every worker
        shard_ids = step.shard_ids()
        commits = step.log.committed()
        committed = {one: commits[one] for one in shard_ids if one in commits}
        for commit in committed.values():
            check_fingerprint(step, commit)
        log.info(
            "%s: %d of %d shards are done (%s)", step.label, len(committed), len(shard_ids), fingerprint[:12]
        )
        suspects = self._find_suspects(committed)
        tasks = [
            ShardTask(step, one, check=one in suspects)
            for one in shard_ids
            if one not in committed or one in suspects
        ]
        self._run_tasks(step, tasks, len(shard_ids))
        return step

    def _find_suspects(self, committed: Mapping[int, Commit]) -> set[int]:
        if self.check_all:
            return set(committed)
        mismatches = find_size_mismatches(self.run.store, committed.values())
        if mismatches:
            log.warning("shards %s have files that are gone or cut: they are rebuilt", mismatches[:10])
        return set(mismatches)

    def rerun_shards(self, step: Step, shard_ids: Sequence[int], reason: str) -> None:
        """The next generation of committed shards."""
        tasks = [ShardTask(step, one, redo=reason) for one in shard_ids]
        self._run_tasks(step, tasks, len(step.shard_ids()))

    def _run_tasks(self, step: Step, tasks: Sequence[ShardTask], total: int) -> None:
        self.run.events.write("step_begins", step=step.label, shards=total, undone=len(tasks))
        sizes = {task.shard_id: step.num_images(task.shard_id) for task in tasks}
        total_images = sum(map(step.num_images, step.shard_ids()))
        before = total_images - sum(sizes.values())
        self.on_progress(Progress(step.label, total - len(tasks), total, before, total_images, 0.0))
        report = run_shards(
            self.executor,
            tasks,
            label=step.label,
            total=total,
            resources=self.resources,
            on_progress=self.on_progress,
            write_event=self.run.events.write,
            sizes=sizes,
            images_before=before,
        )
        self.reports.append(report)
        self.run.events.write("step_ends", step=step.label, done=report.done, failed=len(report.failed))
        self.run.events.flush()
        require_done(report)


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

    def report_progress() -> None:
        done, seen = report.skipped + report.done, images + executor.images_under_way
        on_progress(Progress(label, done, total, seen, total_images, time.monotonic() - begun))

    while waiting or running:
        while waiting and executor.free > 0:
            executor.start(waiting.popleft())
            running += 1
        for outcome in executor.wait(timeout_s=1.0, on_image=report_progress):
            running -= 1
            images += sizes.get(outcome.task.shard_id, 0) if outcome.kind == "done" else 0
            again = _record_outcome(outcome, report, resources, write_event)
            if again is not None:
                waiting.append(again)
            if isinstance(outcome.error, InputError):
                waiting.clear()
        report_progress()
    return report


def _record_outcome(
    outcome: TaskOutcome, report: StepReport, resources: Resources, write_event: Callable[..., None]
) -> ShardTask | None:
    """Count an outcome; the task to try again, if any."""
    task = outcome.task
    if outcome.kind == "done":
        report.done += 1
        report.images += outcome.report.images if outcome.report else 0
        return None
    reason = f"{type(outcome.error).__name__}: {outcome.error}" if outcome.error else outcome.kind
    write_event(outcome.kind, step=task.step.name, shard=task.shard_id, tries=task.tries + 1, reason=reason)
    if outcome.kind == "node_lost" and task.moves < MAX_MOVES:
        report.retries += 1
        return replace(task, moves=task.moves + 1)
    if task.tries + 1 >= resources.max_attempts or isinstance(outcome.error, InputError):
        log.error("%s shard %d is given up: %s", task.step.name, task.shard_id, reason)
        report.failed[task.shard_id] = reason
        report.damage = str(outcome.error) if isinstance(outcome.error, CorruptData) else report.damage
        report.mismatch = str(outcome.error) if isinstance(outcome.error, RunMismatch) else report.mismatch
        return None
    log.warning("%s shard %d is tried again: %s", task.step.name, task.shard_id, reason)
    report.retries += 1
    # A worker that died or hung may have met a poison image: next time each image is on its own.
    return replace(task, tries=task.tries + 1, isolate=task.isolate or outcome.kind != "failed")


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
