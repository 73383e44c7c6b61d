from __future__ import annotations

import threading

import pytest

from ckn_scale.serving.batching import Batcher


@pytest.fixture
def gate():
    return threading.Event()


@pytest.fixture
def batcher(gate):
    """One thread that keeps what it is called with, and begins when the gate opens."""

    def work(key, items):
        gate.wait(30)
        if "bad" in items:
            raise ValueError("bad")
        calls.append((key, list(items)))
        return [f"{key}{item}" for item in items]

    calls = []
    one = Batcher(work, num_threads=1, max_items=3, name="test")
    one.calls = calls
    yield one
    gate.set()
    one.close()


def hold(batcher, gate):
    """The thread is busy with the first item, so that what comes next waits."""
    first = batcher.submit("a", 0)
    while not first.running():
        threading.Event().wait(0.001)
    return first


def test_what_waits_with_one_key_is_done_together_in_order(batcher, gate):
    first = hold(batcher, gate)
    rest = [batcher.submit(key, item) for key, item in (("a", 1), ("b", 2), ("a", 3), ("a", 4), ("a", 5))]
    gate.set()
    assert [one.result(30) for one in (first, *rest)] == ["a0", "a1", "b2", "a3", "a4", "a5"]
    assert batcher.calls == [("a", [0]), ("a", [1, 3, 4]), ("b", [2]), ("a", [5])]


def test_who_went_away_is_left_out_and_an_error_is_that_of_its_batch_alone(batcher, gate):
    hold(batcher, gate)
    gone, bad = batcher.submit("a", 1), batcher.submit("b", "bad")
    after = batcher.submit("c", 2)
    assert gone.cancel()
    gate.set()
    with pytest.raises(ValueError, match="bad"):
        bad.result(30)
    assert after.result(30) == "c2"
    assert ("a", [1]) not in batcher.calls


def test_what_waits_when_it_is_closed_is_cancelled(batcher, gate):
    first = hold(batcher, gate)
    waiting = batcher.submit("a", 1)
    batcher.close()
    gate.set()
    assert first.result(30) == "a0"
    assert waiting.cancelled()
