"""Scores of rankings, as the data sets' own tools compute them. Arrays in, numbers out.

Average precision is the area under the precision-recall curve by trapezoids, the habit of INRIA and
Oxford; interpolated or step-wise variants give other numbers and are not used in any table.
"""

from __future__ import annotations

import numpy as np


def average_precision(relevant: np.ndarray, num_positives: int | None = None) -> float:
    """Of a ranking: `relevant` (N,) bool, best first, without junk and without the query itself.

    `num_positives` counts those that the ranking missed, too; by default it missed none. A ranking
    that finds more than that (two regions of one point, say) scores 1 at most.
    """
    hits = np.asarray(relevant, bool)
    total = int(hits.sum()) if num_positives is None else num_positives
    if total == 0:
        return 0.0
    found = np.cumsum(hits)
    ranks = np.arange(1, len(hits) + 1)
    precision = found / ranks
    before = np.concatenate([[1.0], precision[:-1]])
    return min(1.0, float(np.sum((precision + before)[hits]) / (2 * total)))


def count_in_top(ranking: np.ndarray, members: set[int], depth: int = 4) -> int:
    """How many of the first `depth` are members of the query's group: UKBench's 4 × recall@4."""
    return sum(int(one) in members for one in ranking[:depth])


def false_positive_rate(distances: np.ndarray, matches: np.ndarray, recall: float = 0.95) -> float:
    """The share of non-matching pairs below the distance at which `recall` of the matching are found."""
    matches = np.asarray(matches, bool)
    num_matches, num_others = int(matches.sum()), int((~matches).sum())
    if num_matches == 0 or num_others == 0:
        raise ValueError(f"both kinds of pairs are needed, got {num_matches} matching, {num_others} others")
    ordered = matches[np.argsort(distances, kind="stable")]
    needed = int(np.ceil(recall * num_matches))
    position = int(np.searchsorted(np.cumsum(ordered), needed))
    return float((~ordered[: position + 1]).sum() / num_others)


def average_precision_by_steps(relevant: np.ndarray) -> float:
    """The mean of the precisions at the hits: what information retrieval calls average precision."""
    hits = np.asarray(relevant, bool)
    if not hits.any():
        return 0.0
    return float(np.mean((np.cumsum(hits) / np.arange(1, len(hits) + 1))[hits]))
