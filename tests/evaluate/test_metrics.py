"""Scores of rankings: values worked out by hand, and the two official tools against each other."""

from __future__ import annotations

import numpy as np
import pytest

from ckn_scale.evaluate.metrics import (
    average_precision,
    average_precision_by_steps,
    count_in_top,
    false_positive_rate,
)


def holidays_tool(ranks, num_positives):
    """From the ranks (0 is best) of the positives, as INRIA's script does it."""
    area = 0.0
    for found, rank in enumerate(sorted(ranks)):
        before = 1.0 if rank == 0 else found / rank
        area += (before + (found + 1) / (rank + 1)) / 2
    return area / num_positives


def oxford_tool(ranking, positives, junk):
    """The loop of the Oxford buildings' compute_ap, kept as close to its description as possible."""
    recall_before, precision_before, area, found, rank = 0.0, 1.0, 0.0, 0, 0
    for item in ranking:
        if item in junk:
            continue
        found += item in positives
        recall, precision = found / len(positives), found / (rank + 1)
        area += (recall - recall_before) * (precision_before + precision) / 2
        recall_before, precision_before = recall, precision
        rank += 1
    return area


@pytest.mark.parametrize(
    ("hits", "expected"),
    [
        ([1, 1, 1], 1.0),
        ([0, 1], (0 + 1 / 2) / 2),
        ([1, 0, 1], (1 + (1 / 2 + 2 / 3) / 2) / 2),
        ([0, 0, 0, 1], (0 + 1 / 4) / 2),
        ([0, 0], 0.0),
    ],
)
def test_average_precision_by_hand(hits, expected):
    assert average_precision(np.array(hits)) == pytest.approx(expected)


def test_average_precision_counts_what_the_ranking_missed():
    assert average_precision(np.array([1, 0]), num_positives=2) == pytest.approx(0.5)


def test_average_precision_is_at_most_one():
    assert average_precision(np.ones(5), num_positives=3) == 1.0


def test_average_precision_of_nothing_is_zero():
    assert average_precision(np.zeros(0)) == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_both_official_tools_agree(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(5, 60))
    ranking = rng.permutation(count)
    positives = set(rng.choice(count, int(rng.integers(1, 5)), replace=False).tolist())
    junk = set(rng.choice(count, 3).tolist()) - positives
    kept = [item for item in ranking.tolist() if item not in junk]
    hits = np.isin(kept, list(positives))
    expected = oxford_tool(ranking.tolist(), positives, junk)
    assert average_precision(hits) == pytest.approx(expected)
    assert holidays_tool(np.flatnonzero(hits).tolist(), len(positives)) == pytest.approx(expected)


def test_perfect_ranking_scores_one_by_every_flavour():
    hits = np.array([1, 1, 0, 0])
    assert average_precision(hits) == average_precision_by_steps(hits) == 1.0
    assert holidays_tool([0, 1], 2) == 1.0


def test_average_precision_by_steps_by_hand():
    assert average_precision_by_steps(np.array([0, 1, 1])) == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert average_precision_by_steps(np.zeros(3)) == 0.0


def test_count_in_top_is_four_for_a_perfect_group():
    assert count_in_top(np.array([7, 5, 4, 6, 1]), {4, 5, 6, 7}) == 4
    assert count_in_top(np.array([7, 0, 1, 2, 4, 5, 6]), {4, 5, 6, 7}) == 1


def test_false_positive_rate_by_hand():
    matches = np.array([True] * 20 + [False] * 10)
    distances = np.concatenate([np.arange(20), np.linspace(18.5, 40, 10)])
    # The 19th match lies at 18; no other pair is nearer. The 20th would cost one.
    assert false_positive_rate(distances, matches) == 0.0
    assert false_positive_rate(distances, matches, recall=1.0) == pytest.approx(0.1)


def test_false_positive_rate_counts_against_negatives_not_retrieved():
    matches = np.array([False, True])
    assert false_positive_rate(np.array([0.0, 1.0]), matches) == 1.0


def test_false_positive_rate_needs_both_kinds():
    with pytest.raises(ValueError, match="0 matching"):
        false_positive_rate(np.arange(3.0), np.zeros(3, bool))
