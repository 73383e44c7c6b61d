from __future__ import annotations

import re

import numpy as np
import pytest

from ckn_scale.core.vector_index import NO_ID, merge_topk


def row(*values):
    return np.array([values], dtype=np.float32)


def ids(*values):
    return np.array([values], dtype=np.int64)


def test_merge_topk_takes_the_best_of_all_lists():
    values, found = merge_topk(
        [row(0.9, 0.1), row(0.5, 0.4)], [ids(7, 3), ids(1, 2)], 3, larger_is_better=True
    )
    assert found.tolist() == [[7, 1, 2]]
    assert values.tolist() == [[np.float32(0.9), np.float32(0.5), np.float32(0.4)]]
    assert values.dtype == np.float32
    assert found.dtype == np.int64


def test_merge_topk_follows_the_stated_direction():
    lists = [row(0.9, 0.1), row(0.5, 0.4)], [ids(7, 3), ids(1, 2)]
    assert merge_topk(*lists, 2, larger_is_better=False)[1].tolist() == [[3, 2]]


def test_merge_topk_breaks_ties_by_id():
    lists = [row(0.5, 0.5), row(0.5, 0.5)], [ids(9, 4), ids(2, 30)]
    for larger in (True, False):
        assert merge_topk(*lists, 3, larger_is_better=larger)[1].tolist() == [[2, 4, 9]]


def test_merge_topk_does_not_depend_on_the_order_of_the_lists():
    rng = np.random.default_rng(0)
    values = [rng.integers(0, 5, (4, 6)).astype(np.float32) for _ in range(3)]
    found = [rng.permutation(100)[:24].reshape(4, 6) + 100 * part for part in range(3)]
    once = merge_topk(values, found, 5, larger_is_better=True)
    again = merge_topk(values[::-1], found[::-1], 5, larger_is_better=True)
    np.testing.assert_array_equal(once[0], again[0])
    np.testing.assert_array_equal(once[1], again[1])


def test_merge_topk_puts_missing_entries_last():
    values, found = merge_topk([row(99.0, 0.3)], [ids(NO_ID, 5)], 3, larger_is_better=True)
    assert found.tolist() == [[5, NO_ID]]
    assert values.tolist() == [[np.float32(0.3), -np.inf]]


def test_merge_topk_cuts_k_to_what_there_is():
    values, found = merge_topk([row(0.3), row(0.4, 0.2)], [ids(5), ids(6, 7)], 10**12, larger_is_better=True)
    assert found.tolist() == [[6, 5, 7]]
    assert values.shape == (1, 3)


def test_merge_topk_keeps_a_real_entry_before_a_filler_of_the_same_value():
    found = merge_topk([row(-np.inf, -np.inf)], [ids(NO_ID, 8)], 1, larger_is_better=True)[1]
    assert found.tolist() == [[8]]


def test_merge_topk_of_no_queries_is_empty():
    empty = np.empty((0, 3), dtype=np.float32)
    values, found = merge_topk([empty], [empty.astype(np.int64)], 2, larger_is_better=True)
    assert values.shape == found.shape == (0, 2)


@pytest.mark.parametrize(
    ("values", "found", "k", "message"),
    [
        ([row(1)], [ids(1)], 0, "k must be ≥ 1, got 0"),
        ([], [], 1, "got 0 and 0"),
        ([row(1)], [ids(1), ids(2)], 1, "got 1 and 2"),
        ([row(1, 2)], [ids(1)], 1, "(1, 2)"),
        ([row(np.nan)], [ids(1)], 1, "NaN"),
    ],
)
def test_merge_topk_refuses_bad_input(values, found, k, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        merge_topk(values, found, k, larger_is_better=True)
