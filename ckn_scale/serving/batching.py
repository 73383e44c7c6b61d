"""Work that waits is done together: what a thread finds waiting for it becomes one call."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key")
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(eq=False)
class _Waiting(Generic[Key, Item, Result]):
    key: Key
    item: Item
    result: Future[Result] = field(default_factory=Future)


class Batcher(Generic[Key, Item, Result]):
    """Threads call `work(key, items)` on up to `max_items` that wait with one key, in their order.

    A key is what it is, not what it equals.
    """

    def __init__(
        self,
        work: Callable[[Key, Sequence[Item]], Sequence[Result]],
        *,
        num_threads: int,
        max_items: int,
        name: str,
    ) -> None:
        self._work = work
        self._max_items = max_items
        self._waiting: deque[_Waiting[Key, Item, Result]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        for _ in range(num_threads):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, key: Key, item: Item) -> Future[Result]:
        """One that is cancelled before its turn is not done."""
        one: _Waiting[Key, Item, Result] = _Waiting(key, item)
        with self._changed:
            self._waiting.append(one)
            self._changed.notify()
        return one.result

    def close(self) -> None:
        """What waits is cancelled; threads end after what they do."""
        with self._changed:
            self._ended = True
            for one in self._waiting:
                one.result.cancel()
            self._changed.notify_all()

    def _run(self) -> None:
        while batch := self._take():
            try:
                results = self._work(batch[0].key, [one.item for one in batch])
                for one, result in zip(batch, results, strict=True):
                    one.result.set_result(result)
            except BaseException as error:
                for one in batch:
                    if not one.result.done():
                        one.result.set_exception(error)

    def _take(self) -> list[_Waiting[Key, Item, Result]]:
        """The next of one key, in order; none when the batcher has ended."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._ended or self._waiting)
                if self._ended:
                    return []
                key = self._waiting[0].key
                batch = [one for one in self._waiting if one.key is key][: self._max_items]
                for one in batch:
                    self._waiting.remove(one)
                batch = [one for one in batch if one.result.set_running_or_notify_cancel()]
                if batch:
                    return batch
