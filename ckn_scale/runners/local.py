"""Crews on this machine: the calling process itself, or a pool of spawned processes."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Literal

from ckn_scale.config import Resources
from ckn_scale.errors import CknScaleError, InputError, WorkFailed
from ckn_scale.interrupts import signals_blocked
from ckn_scale.processes import exit_with_parent
from ckn_scale.runners.driver import Outcome, ShardTask
from ckn_scale.runners.worker import Sight
from ckn_scale.runners.worker import Worker
from ckn_scale.processes import SPAWN

log = logging.getLogger(__name__)

START_ALLOWANCE_S = 180.0
IMAGE_DONE = "image done"  # what a worker says within a shard
MAX_FAILED_STARTS = 5  # one after the other, before the run says that it cannot work here


class InlineCrew:
    """This process does the shards, one after the other."""

    free = 1
    images_under_way = 0  # nobody could look at it while the shard is done

    def __init__(self, run_url: str, resources: Resources, sight: Sight) -> None:
        self._worker = Worker(run_url, resources, sight)
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
    since: float  # when it was spawned, or got its task
    ready: bool = False
    task: ShardTask | None = None
    images: int = 0  # of its task, done so far


class PoolCrew:
    """Spawned processes; one that dies or overruns its deadline is replaced, its shard tried again."""

    def __init__(self, run_url: str, resources: Resources, sight: Sight) -> None:
        self._run_url, self._resources, self._sight = run_url, resources, sight
        self._hands: list[_Hand] = []
        self._failed_starts = 0  # since the last one that succeeded

    def __enter__(self) -> PoolCrew:
        try:
            self._hands = [self._spawn() for _ in range(self._resources.workers)]
            while not all(hand.ready for hand in self._hands):
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
        return sum(_is_idle(hand) for hand in self._hands)

    @property
    def images_under_way(self) -> int:
        return sum(hand.images for hand in self._hands)

    def start(self, task: ShardTask) -> None:
        hand = next(hand for hand in self._hands if _is_idle(hand))
        hand.task, hand.since = task, time.monotonic()
        try:
            hand.pipe.send(task)
        except OSError:
            log.warning("worker %s was gone before it got a shard", hand.process.pid)

    def wait(self, timeout_s: float) -> list[Outcome]:
        """Idle hands are listened to as well: one that dies between shards is replaced at once."""
        spoken = wait([hand.pipe for hand in self._hands], timeout=timeout_s)
        outcomes: list[Outcome] = []
        for hand in list(self._hands):
            if hand.pipe in spoken:
                outcomes += self._listen(hand)
            elif not _is_idle(hand) and time.monotonic() - hand.since > self._allowance_s(hand):
                outcomes += self._replace(hand, "overdue")
        return outcomes

    def _allowance_s(self, hand: _Hand) -> float:
        return self._resources.shard_deadline_s if hand.ready else START_ALLOWANCE_S

    def _listen(self, hand: _Hand) -> list[Outcome]:
        try:
            said = hand.pipe.recv()
        except (EOFError, OSError):
            return self._replace(hand, "lost")
        if not hand.ready:
            return self._welcome(hand, said)
        if said == IMAGE_DONE:
            hand.images += 1
            return []
        hand.task, hand.images = None, 0
        return [said]

    def _welcome(self, hand: _Hand, said: str | CknScaleError) -> list[Outcome]:
        if isinstance(said, InputError):  # what no other process would do better
            raise said
        if isinstance(said, CknScaleError):
            log.warning("worker %s could not start: %s", hand.process.pid, said)
            return self._replace(hand, "lost")
        hand.ready, self._failed_starts = True, 0
        return []

    def _replace(self, hand: _Hand, kind: Literal["lost", "overdue"]) -> list[Outcome]:
        _end(hand)
        sentence = f"worker {hand.process.pid} was {kind}, it ended with code {hand.process.exitcode}"
        self._failed_starts += not hand.ready
        if self._failed_starts > MAX_FAILED_STARTS:
            raise WorkFailed(f"worker processes do not start: {sentence}")
        self._hands[self._hands.index(hand)] = self._spawn()
        return [] if hand.task is None else [Outcome(hand.task, kind, error=CknScaleError(sentence))]

    def _spawn(self) -> _Hand:
        mine, theirs = SPAWN.Pipe()
        arguments = (theirs, self._run_url, self._resources, self._sight)
        process = SPAWN.Process(target=_serve_shards, args=arguments, name="ckn-worker")
        with signals_blocked():
            process.start()
        theirs.close()
        return _Hand(process, mine, time.monotonic())

    def _end_all(self) -> None:
        for hand in self._hands:
            _end(hand)
        self._hands = []


def _is_idle(hand: _Hand) -> bool:
    return hand.ready and hand.task is None


def _end(hand: _Hand) -> None:
    hand.process.kill()  # nothing is lost: what is not recorded does not count
    hand.process.join()
    hand.pipe.close()


def _serve_shards(pipe: Connection, run_url: str, resources: Resources, sight: Sight) -> None:
    exit_with_parent()
    try:
        worker = Worker(run_url, resources, sight, on_image=lambda: pipe.send(IMAGE_DONE))
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
