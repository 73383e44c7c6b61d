"""The images of a shard, in order: their bytes read ahead, then decoded, detected and cut ahead.

Reading and preparing fail for reasons of their own and have deadlines of their own. A store that hangs
says nothing about an image: past `read_deadline_s` the shard fails and is tried again. Preparing is a
function of the bytes: past its deadline, or when it crashes, the image is a row (`timeout`, `crashed`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeAlias, TypeVar

from ckn_scale.core.images import decoding_bytes
from ckn_scale.errors import ImageRejected, TransientStoreError
from ckn_scale.failpoints import hit_image_failpoint
from ckn_scale.processes import KillableChild, prepare_killably
from ckn_scale.step import WorkerSettings
from ckn_scale.storage.http_images import HttpImages, HttpPolicy
from ckn_scale.storage.image_sources import read_image
from ckn_scale.storage.plans import PlannedImage

log = logging.getLogger(__name__)

READERS_PER_THREAD = 4  # reading waits, preparing computes
READ_SHARE = 4  # the part of `image_memory_bytes` that files read ahead may take
HTTP_SHARE = 0.4  # of `read_deadline_s`: a slow web host costs its row before it fails the shard
Item = TypeVar("Item")
Result = TypeVar("Result")
Prepared = TypeVar("Prepared")
# One image after a stage of its preparation: its bytes, say, or what was made of them; or why there is none.
ImageOutcome: TypeAlias = tuple[PlannedImage, Prepared | ImageRejected]


def prepare_images(
    images: Sequence[PlannedImage],
    prepare: Callable[[bytes], Prepared],
    worker: WorkerSettings,
    deadline_s: float,
) -> Iterator[ImageOutcome[Prepared]]:
    """Every image once, in the given order, with what `prepare` (picklable) makes of its bytes.

    Threads prepare ahead until an image hangs, crashes or finds no memory; from there on, and from the
    start with `isolate`, each image is on its own in a child that can be killed. An image that cannot be
    used comes with its ImageRejected; TransientStoreError is of the shard: its store hangs.
    """
    alone = threading.Event()
    if worker.isolate:
        alone.set()
    prepare_uri = partial(_prepare_uri, prepare)

    def prepare_ahead(read: ImageOutcome[bytes]) -> Prepared | ImageRejected | None:
        image, data = read
        if alone.is_set() or isinstance(data, ImageRejected):
            return None
        try:
            return prepare_uri(image.uri, data)
        except ImageRejected as rejected:
            return rejected

    ahead = _work_ahead(
        read_images(images, worker),
        prepare_ahead,
        cost=_memory_needed,
        width=worker.read_ahead,
        budget_bytes=worker.image_memory_bytes - worker.image_memory_bytes // READ_SHARE,
    )
    with KillableChild(prepare_uri) as child:
        for (image, data), future in ahead:
            if isinstance(data, ImageRejected):
                yield image, data
            else:
                outcome = None if alone.is_set() else _result_within(future, image, deadline_s)
                if outcome is None:
                    alone.set()
                    outcome = prepare_killably(child, image.uri, data, deadline_s=deadline_s)
                yield image, outcome
            worker.on_image()


def read_images(images: Iterable[PlannedImage], worker: WorkerSettings) -> Iterator[ImageOutcome[bytes]]:
    """The bytes of every image, in order, read by threads; TransientStoreError when the store hangs."""
    http_deadline_s = min(HttpPolicy().deadline_s, HTTP_SHARE * worker.read_deadline_s)
    with HttpImages(HttpPolicy(deadline_s=http_deadline_s)) as http:
        reads = _work_ahead(
            images,
            lambda image: _read_or_reject(image, http),
            cost=lambda image: max(image.size_bytes, 0),
            width=READERS_PER_THREAD * worker.read_ahead,
            budget_bytes=worker.image_memory_bytes // READ_SHARE,
        )
        for image, future in reads:
            try:
                yield image, future.result(timeout=worker.read_deadline_s)
            except FutureTimeout:
                raise TransientStoreError(
                    f"{image.uri} was not read within {worker.read_deadline_s:g} s: its store hangs"
                ) from None


def read_planned(image: PlannedImage, http: HttpImages | None = None) -> bytes:
    """The bytes the plan listed; ImageRejected when they are gone or have changed."""
    data = read_image(image.uri, etag=image.etag, http=http)
    if image.size_bytes not in (-1, len(data)):
        raise ImageRejected("changed", f"planned with {image.size_bytes} bytes, now {len(data)}")
    return data


def _read_or_reject(image: PlannedImage, http: HttpImages) -> bytes | ImageRejected:
    try:
        return read_planned(image, http)
    except ImageRejected as rejected:
        return rejected


def _prepare_uri(prepare: Callable[[bytes], Prepared], uri: str, data: bytes) -> Prepared:
    hit_image_failpoint(uri)
    return prepare(data)


def _result_within(future: Future[Result], image: PlannedImage, deadline_s: float) -> Result | None:
    """None when there is none in time, or an error: no store is asked here, so the bytes are to blame."""
    try:
        return future.result(timeout=deadline_s)
    except FutureTimeout:
        trouble = f"is not prepared after {deadline_s:g} s"
    except Exception as error:
        trouble = f"failed with {type(error).__name__}: {error}"
    log.warning("%s %s: the rest of the shard goes on in killable subprocesses", image.uri, trouble)
    return None


def _memory_needed(read: ImageOutcome[bytes]) -> int:
    _, data = read
    return 0 if isinstance(data, ImageRejected) else len(data) + decoding_bytes(data)


def _work_ahead(
    items: Iterable[Item],
    work: Callable[[Item], Result],
    *,
    cost: Callable[[Item], int],
    width: int,
    budget_bytes: int,
) -> Iterator[tuple[Item, Future[Result]]]:
    """Each item with its future result, in order; `width` threads work ahead within the budget.

    An item that costs more than the budget is worked on alone.
    """
    waiting: deque[tuple[Item, int, Future[Result]]] = deque()
    threads, rest, spent = _DaemonThreads[Result](width), iter(items), 0
    try:
        pulled = next(rest, None)
        while pulled is not None or waiting:
            while pulled is not None and len(waiting) < width:
                needed = cost(pulled)
                if waiting and spent + needed > budget_bytes:
                    break
                spent += needed
                waiting.append((pulled, needed, threads.submit(partial(work, pulled))))
                pulled = next(rest, None)
            item, needed, future = waiting.popleft()
            yield item, future
            spent -= needed
    finally:
        for _, _, future in waiting:
            future.cancel()
        threads.close()


class _DaemonThreads(Generic[Result]):
    """Threads that do not keep the process from ending: one may hang in a decoder or in a store."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._jobs: SimpleQueue[tuple[Callable[[], Result], Future[Result]] | None] = SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._work, daemon=True, name="ahead").start()

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        self._jobs.put((call, future))
        return future

    def close(self) -> None:
        for _ in range(self.count):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, future = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
