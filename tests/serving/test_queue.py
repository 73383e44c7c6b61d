"""In what time one more search would be answered, by a clock of the test."""

from __future__ import annotations

import contextlib
import heapq
import random

import pytest

from ckn_scale.serving.limits import ApiError
from ckn_scale.serving.queue import SearchQueue
from ckn_scale.serving.settings import ServeSettings


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_queue(clock, **settings):
    return SearchQueue(ServeSettings(run_url="run", **settings), clock)


def pass_through(queue, clock, searches, interval_s):
    """So many at once, of which one ends after every interval."""
    turns = [queue.take() for _ in range(searches)]
    for turn in turns:
        turn.__enter__()
    for turn in turns:
        clock.now_s += interval_s
        turn.__exit__(None, None, None)


def test_nothing_is_known_at_first_so_only_the_number_counts():
    queue = make_queue(Clock(), max_in_flight=2)
    with queue.take(), queue.take():
        assert queue.estimate_wait_s() == 0
        with pytest.raises(ApiError, match="2 searches are under way, which is the limit"):
            queue.check_free()
    queue.check_free()
    assert queue.under_way == 0


@pytest.mark.parametrize(("threads", "replicas"), [(1, 1), (2, 1), (1, 4)])
def test_who_would_be_answered_too_late_is_told_when_to_come_back(threads, replicas):
    clock = Clock()
    queue = make_queue(clock, max_wait_s=2.1, encoder_threads=threads, encoder_replicas=replicas)
    pass_through(queue, clock, searches=16, interval_s=0.4)  # however many threads that takes
    with contextlib.ExitStack() as under_way:
        for _ in range(5):
            under_way.enter_context(queue.take())
        assert queue.estimate_wait_s() == pytest.approx(2.4)
        with pytest.raises(ApiError, match=r"would be answered in 2\.4 s") as refused:
            queue.check_free()
    assert refused.value.status == 429
    assert refused.value.headers["retry-after"] == "1"
    assert refused.value.body["retry_after_s"] == 1


def test_many_searches_of_one_request_wait_for_each_other():
    clock = Clock()
    queue = make_queue(clock, max_wait_s=2.0)
    for _ in range(8):
        pass_through(queue, clock, searches=1, interval_s=1.0)
    queue.check_free(100)  # nothing else is under way: it may take as long as it takes
    with queue.take(), pytest.raises(ApiError) as refused:
        queue.check_free(13)
    assert refused.value.headers["retry-after"] == "12", "14 s with what is under way, less the 2 s allowed"


def test_a_search_that_finds_a_free_thread_is_let_in_however_slow_searches_are():
    clock = Clock()
    queue = make_queue(clock, max_wait_s=2.0, encoder_threads=2)
    for _ in range(8):
        pass_through(queue, clock, searches=1, interval_s=5.0)
    with queue.take():
        queue.check_free()
        with pytest.raises(ApiError):
            queue.check_free(2)


def test_who_was_late_is_counted_for_a_minute():
    clock = Clock()
    queue = make_queue(clock)
    for _ in range(8):
        pass_through(queue, clock, searches=1, interval_s=0.1)
    for _ in range(3):  # answered while others come and go
        with queue.take():
            for _ in range(20):
                pass_through(queue, clock, searches=1, interval_s=0.1)
    assert queue.late_s > 1.5
    clock.now_s += 61
    assert queue.late_s == 0


class Overload:
    """Clients that ask again at once, or when told to, of two threads; the queue knows only the clock.

    A search is computed for 0.2 to 0.6 s, and answered up to 0.8 s after that: others overtake it.
    """

    def __init__(self, queue, clock, clients):
        self.queue, self.clock, self.random = queue, clock, random.Random(7)
        self.free_at_s = [0.0, 0.0]
        self.events = [(0.01 * number, number, None) for number in range(clients)]
        self.answered_in_s, self.refused = [], 0

    def run(self, until_s):
        while self.events[0][0] < until_s:
            at_s, client, turn = heapq.heappop(self.events)
            self.clock.now_s = at_s
            if turn is None:
                self.ask(client)
            else:
                turn[0].__exit__(None, None, None)
                self.answered_in_s.append(at_s - turn[1])
                heapq.heappush(self.events, (at_s + 0.01, client, None))

    def ask(self, client):
        now_s, turn = self.clock.now_s, self.queue.take()
        try:
            turn.__enter__()
        except ApiError as refused:
            self.refused += 1
            again_s = now_s + refused.body["retry_after_s"]
            heapq.heappush(self.events, (again_s, client, None))
            return
        begins_s = max(now_s, heapq.heappop(self.free_at_s))
        computed_s = begins_s + self.random.uniform(0.2, 0.6)
        heapq.heappush(self.free_at_s, computed_s)
        ends_s = computed_s + self.random.uniform(0, 0.8)
        heapq.heappush(self.events, (ends_s, client, (turn, now_s)))


def test_under_overload_who_is_let_in_is_answered_in_time_and_no_thread_rests():
    clock = Clock()
    queue = make_queue(clock, max_wait_s=4.0, encoder_threads=2)
    Overload(queue, clock, clients=1).run(until_s=10)  # as a quiet server is found
    overload = Overload(queue, clock, clients=32)
    overload.free_at_s = [clock.now_s] * 2
    overload.events = [(clock.now_s + at_s, client, None) for at_s, client, _ in overload.events]
    overload.run(until_s=120)
    took_s = sorted(overload.answered_in_s)
    assert overload.refused > 50
    assert took_s[int(0.9 * len(took_s))] <= 4.0
    assert took_s[int(0.99 * len(took_s))] <= 4.8, "chance has its share"
    assert took_s[len(took_s) // 2] > 2.5, "no more are refused than need be"
    assert len(took_s) / 110 > 0.95 * 2 / 0.4, "the threads were busy all the time"


def test_a_slow_spell_is_forgotten_and_what_fails_or_hung_does_not_count():
    clock = Clock()
    queue = make_queue(clock)
    pass_through(queue, clock, searches=1, interval_s=30.0)  # the first one ever
    for _ in range(7):
        assert queue.interval_s == 0, "not enough to judge by"
        pass_through(queue, clock, searches=1, interval_s=1.0)
    with contextlib.suppress(ValueError), queue.take():
        clock.now_s += 30
        raise ValueError
    with queue.take() as turn:
        clock.now_s += 5
        turn.is_typical = False
    with queue.take():
        assert queue.estimate_wait_s() == pytest.approx(2.0)
    for _ in range(80):
        pass_through(queue, clock, searches=1, interval_s=0.1)
    with queue.take():
        assert queue.estimate_wait_s() == pytest.approx(0.2)
