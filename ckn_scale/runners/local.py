"""Crews on this machine: the calling process itself, or a pool of spawned processes."""

from __future__ import annotations

import logging
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

from ckn_scale.config import Resources
from ckn_scale.errors import CknScaleError, InputError
from ckn_scale.runners.base import Outcome, ShardTask
from ckn_scale.runners.sight import Sight
from ckn_scale.runners.worker import Worker
from ckn_scale.steps.isolation import exit_with_parent

log = logging.getLogger(__name__)

START_ALLOWANCE_S = 180.0


class InlineCrew:
    """This process does the shards, one after the other."""

    free = 1

    def __init__(self, run_url: str, resources: Resources, sight: Sight) -> None:
        self._worker = Worker(run_url, resources.read_ahead, sight)
        self._task: ShardTask | None = None

    def __enter__(self) -> InlineCrew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def start(self, task: ShardTask) -> None:
        self._task, self.free = task, 0

    def wait(self, timeout_s: float) -> list[Outcome]:
        task, self._task, self.free = self._task, None, 1
        return [_perform(self._worker, task)] if task is not None else []


@dataclass
class _Hand:
    """One process of the pool and what it is doing."""

    process: BaseProcess
    pipe: Connection
    task: ShardTask | None = None
    started: float = 0.0


class PoolCrew:
    """Spawned processes; one that dies or overruns its deadline is replaced, its shard tried again."""

    def __init__(self, run_url: str, resources: Resources, sight: Sight) -> None:
        self._run_url, self._resources, self._sight = run_url, resources, sight
        self._context = multiprocessing.get_context("spawn")
        self._hands: list[_Hand] = []

    def __enter__(self) -> PoolCrew:
        self._hands = [self._spawn() for _ in range(self._resources.workers)]
        try:
            for hand in self._hands:
                self._await_ready(hand)
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
        return sum(hand.task is None for hand in self._hands)

    def start(self, task: ShardTask) -> None:
        hand = next(hand for hand in self._hands if hand.task is None)
        hand.task, hand.started = task, time.monotonic()
        try:
            hand.pipe.send(task)
        except OSError:
            log.warning("worker %s was gone before it got a shard", hand.process.pid)

    def wait(self, timeout_s: float) -> list[Outcome]:
        busy = [hand for hand in self._hands if hand.task is not None]
        ready = wait([hand.pipe for hand in busy], timeout=timeout_s)
        outcomes = [self._collect(hand) for hand in busy if hand.pipe in ready]
        overdue = [hand for hand in busy if hand.task is not None and self._is_overdue(hand)]
        return outcomes + [self._replace(hand, "overdue") for hand in overdue]

    def _collect(self, hand: _Hand) -> Outcome:
        try:
            outcome = hand.pipe.recv()
        except (EOFError, OSError):
            return self._replace(hand, "lost")
        hand.task = None
        return outcome

    def _is_overdue(self, hand: _Hand) -> bool:
        return time.monotonic() - hand.started > self._resources.shard_deadline_s

    def _replace(self, hand: _Hand, kind: Any) -> Outcome:
        assert hand.task is not None
        task = hand.task
        _end(hand)
        fresh = self._spawn()
        self._hands[self._hands.index(hand)] = fresh
        self._await_ready(fresh)
        return Outcome(task, kind, error=CknScaleError(f"worker {hand.process.pid} was {kind}"))

    def _spawn(self) -> _Hand:
        mine, theirs = self._context.Pipe()
        arguments = (theirs, self._run_url, self._resources.read_ahead, self._sight)
        process = self._context.Process(target=_serve_shards, args=arguments, name="ckn-worker")
        process.start()
        theirs.close()
        return _Hand(process, mine)

    def _await_ready(self, hand: _Hand) -> None:
        try:
            greeting = hand.pipe.recv() if hand.pipe.poll(START_ALLOWANCE_S) else "no answer"
        except EOFError:
            hand.process.join()
            greeting = f"it ended with code {hand.process.exitcode}"
        if isinstance(greeting, CknScaleError):
            raise greeting
        if greeting != "ready":
            raise InputError(f"a worker process did not start: {greeting}")

    def _end_all(self) -> None:
        for hand in self._hands:
            _end(hand)
        self._hands = []


def _end(hand: _Hand) -> None:
    hand.process.kill()  # nothing is lost: what is not recorded does not count
    hand.process.join()
    hand.pipe.close()


def _serve_shards(pipe: Connection, run_url: str, read_ahead: int, sight: Sight) -> None:
    exit_with_parent()
    try:
        worker = Worker(run_url, read_ahead, sight)
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


def _perform(worker: Worker, task: ShardTask) -> Outcome:
    try:
        report = worker.process(task)
        return Outcome(task, "done", report)
    except CknScaleError as error:
        return Outcome(task, "failed", error=error)
    except Exception as error:
        log.exception("%s shard %d failed", task.step, task.shard_id)
        return Outcome(task, "failed", error=CknScaleError(f"{type(error).__name__}: {error}"))
