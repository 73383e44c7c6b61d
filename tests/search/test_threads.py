"""A library leaves the threads of the process that uses it alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import cv2
import faiss
import numpy as np
import pytest
import torch

from ckn_scale.core.numerics import compute_threads
from ckn_scale.search.engine import open_index


def threads_now() -> tuple[int, int, int]:
    return torch.get_num_threads(), cv2.getNumThreads(), faiss.omp_get_max_threads()


@pytest.fixture
def three_threads():
    """A process that has chosen its threads."""
    before = threads_now()
    torch.set_num_threads(3)
    cv2.setNumThreads(3)
    faiss.omp_set_num_threads(3)
    yield
    torch.set_num_threads(before[0])
    cv2.setNumThreads(before[1])
    faiss.omp_set_num_threads(before[2])


def test_compute_threads_end_with_their_scope(three_threads):
    with compute_threads(2):
        assert threads_now() == (2, 2, 2)
    assert threads_now() == (3, 3, 3)
    with pytest.raises(ZeroDivisionError), compute_threads(2):
        1 / 0  # noqa: B018
    assert threads_now() == (3, 3, 3)


def test_one_thread_is_inside_at_a_time_so_that_the_process_ends_as_it_was(three_threads):
    entered = threading.Event()

    def compute() -> tuple[int, int, int]:
        with compute_threads(2):
            entered.set()
            return threads_now()

    with ThreadPoolExecutor(1) as pool:
        with compute_threads(1):
            other = pool.submit(compute)
            assert not entered.wait(0.2), "it would take 1 for what the process had"
        assert other.result(30) == (2, 2, 2)
    assert threads_now() == (3, 3, 3)


def test_an_index_computes_with_the_threads_of_its_run_and_gives_them_back(three_threads, photos, reference):
    index, seen = open_index(reference), []
    assert threads_now() == (3, 3, 3)
    describe = index._encoder.channels[0].descriptor.describe_with
    object.__setattr__(
        index._encoder.channels[0].descriptor,
        "describe_with",
        lambda *arguments: seen.append(threads_now()) or describe(*arguments),
    )
    vector = index.encode(photos / "coffee.jpg")
    assert seen == [(1, 1, 1)]
    assert index.search_vector(vector, 1)[0].uri.endswith("/coffee.jpg")
    assert threads_now() == (3, 3, 3)
    torch.set_num_threads(1)
    np.testing.assert_array_equal(open_index(reference).encode(photos / "coffee.jpg"), vector)


def test_an_index_computes_with_the_threads_it_was_given(three_threads, photos, reference):
    index = open_index(reference, threads=2)
    together = index.encode([photos / "coffee.jpg", photos / "rocket.jpg"])
    np.testing.assert_array_equal(together[1], index.encode(photos / "rocket.jpg"))
    assert threads_now() == (3, 3, 3)
    with pytest.raises(ValueError, match="threads must be ≥ 1, got 0"):
        open_index(reference, threads=0)
