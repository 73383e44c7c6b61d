"""How long one more search would wait, by a clock of the test."""

from __future__ import annotations

import contextlib

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
def test_who_would_wait_too_long_is_told_when_to_come_back(threads, replicas):
    clock = Clock()
    queue = make_queue(clock, max_wait_s=2.0, encoder_threads=threads, encoder_replicas=replicas)
    pass_through(queue, clock, searches=16, interval_s=0.5)  # two a second, however many threads that takes
    with contextlib.ExitStack() as under_way:
        for _ in range(4 + threads * replicas):  # of which four wait
            under_way.enter_context(queue.take())
        assert queue.estimate_wait_s() == pytest.approx(2.5)
        with pytest.raises(ApiError) as refused:
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
    assert refused.value.headers["retry-after"] == "11", "13 s after what is under way, less the 2 s allowed"


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
        assert queue.estimate_wait_s() == pytest.approx(1.0)
    for _ in range(40):
        pass_through(queue, clock, searches=1, interval_s=0.1)
    with queue.take():
        assert queue.estimate_wait_s() == pytest.approx(0.1)
