"""The searches under way, bounded by their number and by the time in which one more would be answered.

    places before it, and its own × the time from one end to the next + how late others were by that reckoning

The first is known, the second measured while there are enough searches to keep all threads busy (while
there are fewer, by the time of each), the third the upper end of what the last forecasts were wrong by: a
search's own phases, others that overtake it, a slow moment.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckn_scale.serving.limits import ApiError
from ckn_scale.serving.settings import ServeSettings

SEARCHES_REMEMBERED = 64
SEARCHES_NEEDED = 8  # before anyone is refused because of their times
SEARCHES_PER_LATE = 32  # one of so many may be later than was expected
LATE_REMEMBERED_S = 60.0  # a slow moment is over


@dataclass
class Turn:
    """One request's time in the queue."""

    is_typical: bool = True  # false: it waited for what others will not wait for, such as a group that hangs


class SearchQueue:
    """Who is let in, who is asked to come back, and when."""

    def __init__(self, settings: ServeSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_searches = settings.max_in_flight
        self._max_wait_s = settings.max_wait_s
        self._num_encoders = settings.encoder_replicas / settings.ingress_replicas
        self._num_threads = self._num_encoders * settings.encoder_threads
        self._clock = clock
        self._under_way = 0
        self._company_s = 0.0  # searches under way, summed over time until _changed_at
        self._changed_at = clock()
        self._last_end_s = -math.inf
        self._intervals_s: deque[float] = deque(maxlen=SEARCHES_REMEMBERED)
        self._late: deque[tuple[float, float]] = deque(maxlen=SEARCHES_REMEMBERED)  # when, by how much

    @property
    def under_way(self) -> int:
        return self._under_way

    @property
    def interval_s(self) -> float:
        """From one search's end to the next one's, when there are enough of them; 0 until it is known."""
        if len(self._intervals_s) < SEARCHES_NEEDED:
            return 0.0
        *others, _ = sorted(self._intervals_s)  # the longest is no longer than the next: it may be a hiccup
        return statistics.fmean([*others, others[-1]])

    @property
    def late_s(self) -> float:
        """How much later than by the interval alone nearly all are answered."""
        since_s = self._clock() - LATE_REMEMBERED_S
        late_s = sorted(late_s for ended_s, late_s in self._late if ended_s > since_s)
        return max([0.0, *late_s[: len(late_s) - math.ceil(len(late_s) / SEARCHES_PER_LATE)]])

    def estimate_wait_s(self, searches: int = 1) -> float:
        """In what time the last of so many more would be answered; 0 until enough were measured."""
        return self.interval_s * (self._under_way + searches) + self.late_s

    def check_free(self, searches: int = 1) -> None:
        """ApiError 429, with the seconds after which there should be room, when there is none now."""
        if not self._under_way:
            return  # whatever was slow before, and however many come at once
        wait_s, places = self.estimate_wait_s(searches), self._under_way + searches
        if places > self._num_threads and wait_s > self._max_wait_s:
            message = f"searches are waiting, and one more would be answered in {wait_s:.1f} s"
            raise _come_back(message, wait_s - self._max_wait_s)
        if places > self._max_searches:
            message = f"{self._under_way} searches are under way, which is the limit"
            raise _come_back(message, (places - self._max_searches) * self.interval_s)

    @contextlib.contextmanager
    def take(self, searches: int = 1) -> Iterator[Turn]:
        """A turn for so many searches; one that fails says nothing of the time that they take."""
        self.check_free(searches)
        self._change(searches)
        expected_s = self.interval_s * self._under_way
        turn, began_s, company_s, ended_well = Turn(), self._changed_at, self._company_s, False
        try:
            yield turn
            ended_well = True
        finally:
            self._change(-searches)
            if ended_well and turn.is_typical:
                if expected_s:
                    self._late.append((self._changed_at, self._changed_at - began_s - expected_s))
                self._note_interval(began_s, self._company_s - company_s, searches)
            self._last_end_s = self._changed_at

    def _note_interval(self, began_s: float, company_s: float, searches: int) -> None:
        spent_s = self._changed_at - began_s
        if company_s < self._num_threads * spent_s:
            # An encoder gives a search that is alone all its threads: nothing is left for another.
            interval_s = spent_s / max(company_s / spent_s, self._num_encoders)
        else:
            interval_s = (self._changed_at - max(began_s, self._last_end_s)) / searches
        self._intervals_s.append(interval_s)

    def _change(self, searches: int) -> None:
        now = self._clock()
        self._company_s += self._under_way * (now - self._changed_at)
        self._changed_at = now
        self._under_way += searches


def _come_back(message: str, after_s: float) -> ApiError:
    seconds = max(1, math.ceil(after_s))
    error = ApiError(429, "too_busy", f"{message}: try again in {seconds} s", retry_after_s=seconds)
    return error.with_headers({"retry-after": str(seconds)})
