"""Executors on this machine: the calling process itself, or a pool of spawned processes."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Literal

from ckn_scale.config import Resources
from ckn_scale.errors import CknScaleError, InputError, RunFailed
from ckn_scale.interrupts import signals_blocked
from ckn_scale.processes import SPAWN, exit_with_parent
from ckn_scale.runners.driver import OnImage, TaskOutcome
from ckn_scale.runners.worker import Handshake, Worker
from ckn_scale.step import ShardTask

log = logging.getLogger(__name__)

START_ALLOWANCE_S = 180.0
IMAGE_DONE = "image done"  # what a worker sends within a shard
MAX_FAILED_STARTS = 5  # one after the other, before the run says that it cannot work here


class InlineExecutor:
    """This process does the shards, one after the other."""

    free = 1
    images_under_way = 0

    def __init__(self, run_url: str, resources: Resources, handshake: Handshake) -> None:
        self._worker = Worker(run_url, resources, handshake, on_image=self._count_image)
        self._task: ShardTask | None = None
        self._on_image: OnImage = lambda: None

    def __enter__(self) -> InlineExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def start(self, task: ShardTask) -> None:
        self._task, self.free = task, 0

    def wait(self, timeout_s: float, on_image: OnImage = lambda: None) -> list[TaskOutcome]:
        task, self._task, self.free, self._on_image = self._task, None, 1, on_image
        try:
            return [_perform(self._worker, task)] if task is not None else []
        except _CallbackFailed as failed:
            raise failed.error from None
        finally:
            self.images_under_way = 0

    def _count_image(self) -> None:
        self.images_under_way += 1
        try:
            self._on_image()
        except Exception as error:
            raise _CallbackFailed(error) from None


class _CallbackFailed(BaseException):
    """An error of the caller's, on its way through a shard that has no part in it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


@dataclass
class PoolProcess:
    """One process of the pool and what it is doing."""

    process: BaseProcess
    pipe: Connection
    since: float  # when it was spawned, or got its task
    ready: bool = False
    task: ShardTask | None = None
    images: int = 0  # of its task, done so far


class PoolExecutor:
    """Spawned processes; one that dies or overruns its deadline is replaced, its shard tried again."""

    def __init__(self, run_url: str, resources: Resources, handshake: Handshake) -> None:
        self._run_url, self._resources, self._handshake = run_url, resources, handshake
        self._children: list[PoolProcess] = []
        self._failed_starts = 0  # since the last one that succeeded

    def __enter__(self) -> PoolExecutor:
        try:
            self._children = [self._spawn() for _ in range(self._resources.workers)]
            while not all(child.ready for child in self._children):
                self.wait(timeout_s=1.0)
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_all()

    @property
    def free(self) -> int:
        return sum(_is_idle(child) for child in self._children)

    @property
    def images_under_way(self) -> int:
        return sum(child.images for child in self._children)

    def start(self, task: ShardTask) -> None:
        child = next(child for child in self._children if _is_idle(child))
        child.task, child.since = task, time.monotonic()
        try:
            child.pipe.send(task)
        except OSError:
            log.warning("worker %s was gone before it got a shard", child.process.pid)

    def wait(self, timeout_s: float, on_image: OnImage = lambda: None) -> list[TaskOutcome]:
        """Idle children are listened to as well: one that dies between shards is replaced at once."""
        readable = wait([child.pipe for child in self._children], timeout=timeout_s)
        outcomes: list[TaskOutcome] = []
        for child in list(self._children):
            allowance_s = self._resources.shard_deadline_s if child.ready else START_ALLOWANCE_S
            if child.pipe in readable:
                outcomes += self._receive(child)
            elif not _is_idle(child) and time.monotonic() - child.since > allowance_s:
                outcomes += self._replace(child, "overdue")
        return outcomes

    def _receive(self, child: PoolProcess) -> list[TaskOutcome]:
        try:
            message = child.pipe.recv()
        except (EOFError, OSError):
            return self._replace(child, "lost")
        if not child.ready:
            return self._on_ready(child, message)
        if message == IMAGE_DONE:
            child.images += 1
            return []
        child.task, child.images = None, 0
        return [message]

    def _on_ready(self, child: PoolProcess, message: str | CknScaleError) -> list[TaskOutcome]:
        if isinstance(message, InputError):  # what no other process would do better
            raise message
        if isinstance(message, CknScaleError):
            log.warning("worker %s could not start: %s", child.process.pid, message)
            return self._replace(child, "lost")
        child.ready, self._failed_starts = True, 0
        return []

    def _replace(self, child: PoolProcess, kind: Literal["lost", "overdue"]) -> list[TaskOutcome]:
        _end(child)
        sentence = f"worker {child.process.pid} was {kind}, it ended with code {child.process.exitcode}"
        self._failed_starts += not child.ready
        if self._failed_starts > MAX_FAILED_STARTS:
            raise RunFailed(f"worker processes do not start: {sentence}")
        self._children[self._children.index(child)] = self._spawn()
        return [] if child.task is None else [TaskOutcome(child.task, kind, error=CknScaleError(sentence))]

    def _spawn(self) -> PoolProcess:
        mine, theirs = SPAWN.Pipe()
        arguments = (theirs, self._run_url, self._resources, self._handshake)
        process = SPAWN.Process(target=_serve_shards, args=arguments, name="ckn-worker")
        with signals_blocked():
            process.start()
        theirs.close()
        return PoolProcess(process, mine, time.monotonic())

    def _end_all(self) -> None:
        for child in self._children:
            _end(child)
        self._children = []


def _is_idle(child: PoolProcess) -> bool:
    return child.ready and child.task is None


def _end(child: PoolProcess) -> None:
    child.process.kill()  # nothing is lost: what is not recorded does not count
    child.process.join()
    child.pipe.close()


def _serve_shards(pipe: Connection, run_url: str, resources: Resources, handshake: Handshake) -> None:
    exit_with_parent()
    try:
        worker = Worker(run_url, resources, handshake, on_image=lambda: pipe.send(IMAGE_DONE))
        pipe.send("ready")
    except CknScaleError as error:
        pipe.send(error)
        return
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        pipe.send(_perform(worker, task))


def _perform(worker: Worker, task: ShardTask) -> TaskOutcome:
    try:
        report = worker.process(task)
        return TaskOutcome(task, "done", report)
    except CknScaleError as error:
        return TaskOutcome(task, "failed", error=error)
    except Exception as error:
        log.exception("%s shard %d failed", task.step.name, task.shard_id)
        return TaskOutcome(task, "failed", error=CknScaleError(f"{type(error).__name__}: {error}"))
