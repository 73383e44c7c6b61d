"""Merge the best of several lists into the best of all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NO_ID = -1  # fills a list that has fewer than k entries; never wins


def merge_topk(
    values: Sequence[np.ndarray], ids: Sequence[np.ndarray], k: int, *, larger_is_better: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The k best of lists of (Q, k_i) values and ids → (Q, k) values and ids; equal values by ascending id.

    Missing entries have id NO_ID; the answer is filled with NO_ID and the worst possible value.
    """
    if k < 1:
        raise ValueError(f"k must be ≥ 1, got {k}")
    _check_lists(values, ids)
    worst = np.float32(-np.inf if larger_is_better else np.inf)
    all_ids = np.concatenate(ids, axis=1).astype(np.int64)
    all_values = np.where(all_ids == NO_ID, worst, np.concatenate(values, axis=1)).astype(np.float32)
    costs = -all_values if larger_is_better else all_values
    # The middle key keeps fillers behind real entries whose value is infinite too.
    order = np.lexsort((all_ids, all_ids == NO_ID, costs), axis=-1)[:, :k]
    best_values = np.take_along_axis(all_values, order, axis=1)
    best_ids = np.take_along_axis(all_ids, order, axis=1)
    return _fill_columns(best_values, k, worst), _fill_columns(best_ids, k, NO_ID)


def _check_lists(values: Sequence[np.ndarray], ids: Sequence[np.ndarray]) -> None:
    if len(values) != len(ids) or not values:
        raise ValueError(f"merge needs as many value lists as id lists, got {len(values)} and {len(ids)}")
    for value, index in zip(values, ids, strict=True):
        if value.ndim != 2 or value.shape != index.shape or value.shape[0] != values[0].shape[0]:
            raise ValueError(f"lists must be (Q, k) alike, got values {value.shape} and ids {index.shape}")
        if np.isnan(value).any():
            raise ValueError("values must be numbers, got NaN")


def _fill_columns(array: np.ndarray, k: int, filler: float) -> np.ndarray:
    missing = k - array.shape[1]
    if missing <= 0:
        return array
    return np.pad(array, ((0, 0), (0, missing)), constant_values=filler)
