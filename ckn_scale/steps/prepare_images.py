"""Prepare the images of a shard, in order, with threads that read and decode ahead."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from itertools import islice
from queue import SimpleQueue
from typing import TypeAlias

from ckn_scale.core.encoder import Front, PreparedImage
from ckn_scale.errors import ImageRejected
from ckn_scale.steps.base import WorkerSettings
from ckn_scale.steps.isolation import IsolatedPreparer
from ckn_scale.steps.plan import PlannedImage
from ckn_scale.steps.prepare_image import prepare_image

log = logging.getLogger(__name__)

Prepared: TypeAlias = "PreparedImage | ImageRejected"
Outcome: TypeAlias = "tuple[PlannedImage, Prepared]"
_Job: TypeAlias = "tuple[PlannedImage, Future[Prepared]]"


def prepare_images(
    images: Sequence[PlannedImage], front: Front, worker: WorkerSettings, deadline_s: float
) -> Iterator[Outcome]:
    """Every image once, in the given order. One that hangs costs its row, not the shard."""
    if worker.isolate:
        yield from _prepare_isolated(images, front, deadline_s)
        return
    ahead = _prepare_ahead(images, front, worker.read_ahead, deadline_s)
    for done, outcome in enumerate(ahead):
        if outcome is None:
            log.warning("an image is overdue: the rest of the shard goes on in killable subprocesses")
            yield from _prepare_isolated(images[done:], front, deadline_s)
            return
        yield outcome


def _prepare_ahead(
    images: Sequence[PlannedImage], front: Front, read_ahead: int, deadline_s: float
) -> Iterator[Outcome | None]:
    """Yields None, and ends, when the next image misses the deadline."""
    jobs: SimpleQueue[_Job | None] = SimpleQueue()
    # Daemons, because a thread that hangs in a decoder must not keep the process from ending.
    for _ in range(read_ahead):
        threading.Thread(target=_prepare_jobs, args=(jobs, front), daemon=True, name="prepare").start()
    waiting: deque[_Job] = deque()
    rest = iter(images)
    try:
        while True:
            for image in islice(rest, read_ahead - len(waiting)):
                waiting.append((image, Future()))
                jobs.put(waiting[-1])
            if not waiting:
                return
            image, future = waiting.popleft()
            try:
                yield image, future.result(timeout=deadline_s)
            except FutureTimeout:
                yield None
                return
    finally:
        for _, future in waiting:
            future.cancel()
        for _ in range(read_ahead):
            jobs.put(None)


def _prepare_jobs(jobs: SimpleQueue[_Job | None], front: Front) -> None:
    while (job := jobs.get()) is not None:
        image, future = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(prepare_image(image, front))
        except BaseException as error:
            future.set_exception(error)


def _prepare_isolated(images: Sequence[PlannedImage], front: Front, deadline_s: float) -> Iterator[Outcome]:
    with IsolatedPreparer(front, deadline_s) as preparer:
        for image in images:
            yield image, preparer.prepare(image)
