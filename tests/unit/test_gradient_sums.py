"""Sums over the pieces of a batch: the same bits whoever adds up which of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ckn_scale.core.gradient_sums import PartialSum, finish_sum, merge_sums


def draw_pieces(count):
    """Numbers of so many sizes that another order of sums shows."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((count, 50)) * 10.0 ** rng.integers(-4, 5, (count, 1))
    return [PartialSum(number, 1, [row.astype(np.float32)]) for number, row in enumerate(values)]


@pytest.mark.parametrize("count", [1, 2, 6, 8, 11])
def test_finish_sum_has_the_same_bits_for_any_cut(count):
    pieces = draw_pieces(count)
    (whole,) = finish_sum(pieces)
    np.testing.assert_allclose(whole, sum(one.arrays[0].astype(float) for one in pieces), rtol=1e-3, atol=1)
    for cuts in itertools.combinations(range(1, count), min(2, count - 1)):
        bounds = [0, *cuts, count]
        parts = [merge_sums(pieces[start:stop]) for start, stop in itertools.pairwise(bounds)]
        (found,) = finish_sum(one for part in parts for one in part)
        assert found.tobytes() == whole.tobytes()


def test_merge_sums_adds_whole_subtrees_only():
    merged = merge_sums(PartialSum(number, 1, [np.array([2.0**number])]) for number in range(3, 8))
    assert [(one.start, one.size, one.arrays[0].item()) for one in merged] == [(3, 1, 8), (4, 4, 240)]
