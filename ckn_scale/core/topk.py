"""The best k rows for a query, of one index or several: found fast, scored again, ties by position.

A matrix product rounds each sum in its own way, so equal images would get unequal scores, and other ones in
another shard or batch. Where a fast search rounds, it makes a shortlist only: every pair on it is scored by a
sum of its own. So the score of a pair depends on its image and its query alone, and the answer does not
depend on how the rows are cut into indexes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ckn_scale.core.faiss_library import import_faiss

NO_ID = -1  # fills a list that has fewer than k entries; never wins
SHORTLIST_MARGIN = 16  # extra candidates, so that most queries need no second look
SCORED_BYTES = 2**21  # rows are scored in blocks that stay in the processor's cache


class RowMask:
    """Some rows of an index, in the form that FAISS's searches take."""

    def __init__(self, mask: np.ndarray) -> None:
        if mask.ndim != 1 or mask.dtype != np.bool_:
            raise ValueError(f"a mask of rows must be (rows,) bool, got {mask.dtype} {mask.shape}")
        faiss = import_faiss()
        self.mask = mask
        self.count = int(np.count_nonzero(mask))
        self._bits = np.packbits(mask, bitorder="little")  # FAISS keeps its address only
        self.selector = faiss.IDSelectorBitmap(len(mask), faiss.swig_ptr(self._bits))
        self.parameters = faiss.SearchParameters(sel=self.selector)


def as_row_mask(allowed: np.ndarray | RowMask | None, rows: int) -> RowMask | None:
    """None where all rows are allowed; ValueError for a mask of another length."""
    if allowed is None:
        return None
    mask = allowed if isinstance(allowed, RowMask) else RowMask(allowed)
    if len(mask.mask) != rows:
        raise ValueError(f"a mask for {rows} rows, got one of {len(mask.mask)}")
    return None if mask.count == rows else mask


class HasVectors(Protocol):
    def vectors_at(self, positions: np.ndarray) -> np.ndarray:
        """(N,) → (N, D): what a query is multiplied with."""


class SearchableRows(HasVectors, Protocol):
    """Rows with a fast search, whose similarities may be off by a known bound."""

    @property
    def rows(self) -> int: ...

    @property
    def rounds(self) -> bool:
        """Whether similarities of the fast search are off, so that `vectors_at` has to score again."""

    def nearest(
        self, queries: np.ndarray, count: int, allowed: RowMask | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(Q, D) → about the `count` best: similarity (Q, count) descending, positions (Q, count)."""

    def above(
        self, query: np.ndarray, level: float, allowed: RowMask | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(D,) → similarity and positions of all rows whose fast similarity is at least `level`."""

    def error_bound(self, queries: np.ndarray) -> np.ndarray:
        """(Q, D) → (Q,): how far a fast similarity may be from `score_pairs`."""


@dataclass(frozen=True)
class _Part:
    """Allowed rows of one index; in a join, its positions come after `start` others."""

    rows: SearchableRows
    allowed: RowMask | None
    start: int

    @property
    def count(self) -> int:
        return self.rows.rows if self.allowed is None else self.allowed.count


class JoinedRows:
    """Allowed rows of several indexes of one kind; positions go on from one to the next."""

    def __init__(self, indexes: Sequence[tuple[SearchableRows, RowMask | None]]) -> None:
        starts = np.cumsum([0, *(rows.rows for rows, _ in indexes)]).tolist()
        parts = [_Part(rows, mask, start) for (rows, mask), start in zip(indexes, starts, strict=False)]
        self._parts = [part for part in parts if part.count]
        self.count = sum(part.count for part in self._parts)

    @property
    def rounds(self) -> bool:
        return self._parts[0].rows.rounds

    def error_bound(self, queries: np.ndarray) -> np.ndarray:
        return self._parts[0].rows.error_bound(queries)

    def nearest(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Similarity and positions (Q, W) of the k best and some more, in no order; then (Q,) what any
        other row has at most."""
        margin = -(-SHORTLIST_MARGIN // len(self._parts))
        values, places, unseen = [], [], np.full(len(queries), -np.inf, np.float32)
        for part in self._parts:
            found, positions = part.rows.nearest(queries, min(k + margin, part.count), part.allowed)
            values.append(found)
            places.append(positions + part.start)
            if k + margin < part.count:
                unseen = np.maximum(unseen, found[:, -1])
        similarity, positions = np.concatenate(values, axis=1), np.concatenate(places, axis=1)
        width = k + SHORTLIST_MARGIN
        if similarity.shape[1] <= width:
            return similarity, positions, unseen
        order = np.argpartition(-similarity, width, axis=1)[:, : width + 1]
        similarity, positions = (np.take_along_axis(one, order, axis=1) for one in (similarity, positions))
        return similarity[:, :width], positions[:, :width], np.maximum(unseen, similarity[:, width])

    def above(self, query: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
        """(D,) → similarity and positions of all rows whose fast similarity is at least `level`."""
        found = [part.rows.above(query, level, part.allowed) for part in self._parts]
        places = [positions + part.start for part, (_, positions) in zip(self._parts, found, strict=True)]
        return np.concatenate([similarity for similarity, _ in found]), np.concatenate(places)

    def vectors_at(self, positions: np.ndarray) -> np.ndarray:
        """(N,) → (N, D)."""
        if len(self._parts) == 1:
            return self._parts[0].rows.vectors_at(positions - self._parts[0].start)
        owners = np.searchsorted([part.start for part in self._parts], positions, side="right") - 1
        order = np.argsort(owners, kind="stable")
        bounds = np.searchsorted(owners[order], np.arange(len(self._parts) + 1)).tolist()
        held = [
            part.rows.vectors_at(positions[order[first:end]] - part.start)
            for part, first, end in zip(self._parts, bounds, bounds[1:], strict=False)
            if first < end
        ]
        vectors = np.empty((len(positions), held[0].shape[1]), np.float32)
        vectors[order] = np.concatenate(held)
        return vectors


def find_topk(
    indexes: Sequence[tuple[SearchableRows, RowMask | None]], queries: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """(Q, D) prepared queries → similarity (Q, k') float32 and positions (Q, k'), k' = min(k, rows allowed).

    Best first, ties by position; positions count on from one index to the next. The answer depends on
    nothing but the query and the rows: not on other queries, nor on how the rows are cut into indexes.
    """
    if k < 1:
        raise ValueError(f"k must be ≥ 1, got {k}")
    rows = JoinedRows(indexes)
    k = min(k, rows.count)
    if k == 0 or len(queries) == 0:
        return np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
    fast, shortlist, unseen = rows.nearest(queries, k)
    # At least k rows score above the k-th less the error, and whatever scores that is no further below.
    kth = -np.partition(-fast, k - 1, axis=1)[:, k - 1]
    level = kth - 2 * rows.error_bound(queries)
    similarity, positions = _rank(rows, queries, fast, shortlist, k)
    # Many near-equal rows: all that may matter are scored, in one more pass, however many they are.
    for row in np.flatnonzero(unseen >= level):
        every = rows.above(queries[row], float(level[row]))
        similarity[row : row + 1], positions[row : row + 1] = _rank(
            rows, queries[row : row + 1], every[0][None], every[1][None], k
        )
    return similarity, positions


def _rank(
    rows: JoinedRows, queries: np.ndarray, fast: np.ndarray, shortlist: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    scores = score_pairs(rows, queries, shortlist) if rows.rounds else fast
    order = np.lexsort((shortlist, -scores), axis=-1)[:, :k]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(shortlist, order, axis=1)


def score_pairs(rows: HasVectors, queries: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """(Q, D) queries, (Q, W) positions → (Q, W) float32: each pair summed alone in double precision."""
    width, dim = positions.shape[1], queries.shape[1]
    pairs, owners = positions.ravel(), np.repeat(np.arange(len(queries)), width)
    doubles, scores = queries.astype(np.float64), np.empty(len(pairs), np.float32)
    step = max(1, SCORED_BYTES // (8 * dim))
    for start in range(0, len(pairs), step):
        block = slice(start, start + step)
        products = rows.vectors_at(pairs[block]).astype(np.float64)
        products *= doubles[owners[block]]
        scores[block] = products.sum(axis=1)
    return scores.reshape(positions.shape)


def merge_topk(
    values: Sequence[np.ndarray], ids: Sequence[np.ndarray], k: int, *, larger_is_better: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The k best of lists of (Q, k_i) values and ids → (Q, k') values and ids; equal values by ascending id.

    k' = min(k, sum of k_i). Missing entries have id NO_ID, and the worst possible value in the answer.
    """
    if k < 1:
        raise ValueError(f"k must be ≥ 1, got {k}")
    if len(values) != len(ids) or not values:
        raise ValueError(f"merge needs as many value lists as id lists, got {len(values)} and {len(ids)}")
    for value, index in zip(values, ids, strict=True):
        if value.ndim != 2 or value.shape != index.shape or value.shape[0] != values[0].shape[0]:
            raise ValueError(
                f"lists must be (Q, k) of one shape, got values {value.shape} and ids {index.shape}"
            )
        if np.isnan(value).any():
            raise ValueError("values must be numbers, got NaN")
    worst = np.float32(-np.inf if larger_is_better else np.inf)
    all_ids = np.concatenate(ids, axis=1).astype(np.int64)
    all_values = np.where(all_ids == NO_ID, worst, np.concatenate(values, axis=1)).astype(np.float32)
    costs = -all_values if larger_is_better else all_values
    # The middle key keeps fillers behind real entries whose value is infinite too.
    order = np.lexsort((all_ids, all_ids == NO_ID, costs), axis=-1)[:, :k]
    return np.take_along_axis(all_values, order, axis=1), np.take_along_axis(all_ids, order, axis=1)
