"""Prepare the images of a shard, in order, with threads that read and decode ahead."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

from ckn_scale.core.encoder import Front, PreparedImage
from ckn_scale.errors import ImageRejected
from ckn_scale.steps.base import WorkerSettings
from ckn_scale.steps.isolation import IsolatedPreparer
from ckn_scale.steps.plan import PlannedImage
from ckn_scale.steps.prepare_image import prepare_image

log = logging.getLogger(__name__)

Outcome = tuple[PlannedImage, PreparedImage | ImageRejected]


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
    pool = ThreadPoolExecutor(read_ahead, thread_name_prefix="prepare")
    waiting: deque[tuple[PlannedImage, Future[PreparedImage | ImageRejected]]] = deque()
    rest = iter(images)
    try:
        while True:
            while len(waiting) < read_ahead and (image := next(rest, None)) is not None:
                waiting.append((image, pool.submit(prepare_image, image, front)))
            if not waiting:
                return
            image, future = waiting.popleft()
            try:
                yield image, future.result(timeout=deadline_s)
            except FutureTimeout:
                yield None
                return
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _prepare_isolated(images: Sequence[PlannedImage], front: Front, deadline_s: float) -> Iterator[Outcome]:
    with IsolatedPreparer(front, deadline_s) as preparer:
        for image in images:
            yield image, preparer.prepare(image)
