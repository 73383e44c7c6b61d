"""Which of many images are near-copies: pairs of stored vectors that are alike, and the groups they make.

Vectors are compared with each other as they are stored: signs by the bits in which they differ, others by
their cosine. A pair has one score, whichever of the two is asked, in whatever block and shard.

    SignRows, VectorRows   rows of an index, to be compared with others
    find_levels            rows, some of the collection at large  →  above which a score makes a copy
    find_pairs             two sets of rows, their levels         →  pairs above the level of an image
    keep_nearest           pairs                                  →  those among the nearest of an image
    find_components        pairs                                  →  the group of each image
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from ckn_scale.core.faiss_library import import_faiss
from ckn_scale.core.vector_index import SignIndex, StoredIndex

BLOCK_ROWS = 512  # compared at once with as many, or with all
COPY_DEVIATIONS = 6.0  # in the demo all copies but one are above 7, unrelated photographs below 5
VERIFIED_DEVIATIONS = 4.0  # above the median, of pairs that geometry looks at; COPY_DEVIATIONS without points
NEIGHBOURS = 32  # of an image that are looked at: larger groups hang together by these
MIN_INLIERS = 12  # apart from each other, of two images that show the same
# 75 pairs of planted copies of Holidays (recompressed, halved, cropped, relit) have .166 or more, half of the
# pairs of one scene less than .04; images of different things that stand out by their vectors have .005.
MIN_SHARE = 0.15
SAME_SCORE = 0.999  # from here on two images have the same vector, but for rounding
_ROUNDING = 1e-3  # by which a product in float32 may be off
_FACTOR_BYTES = 8  # after the bits of a code


class StoredRows(Protocol):
    """Rows with ids that are compared with rows of the same kind; `data` is what is compared, a row each."""

    ids: np.ndarray  # (N,) int64

    @property
    def data(self) -> np.ndarray: ...

    def compare(self, others: Any) -> np.ndarray:
        """(N, M) float64 scores with all of the others, those of a row in any order."""

    def pairs_above(self, others: Any, level: float) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Rows of both and scores of all pairs that score more than `level`, block by block."""


class SignRows:
    """Codes of signs; a score is 1 − 2 · the share of bits that differ."""

    def __init__(self, ids: np.ndarray, bits: np.ndarray) -> None:
        self.ids, self.data = ids, np.ascontiguousarray(bits)  # (N, B) uint8

    @cached_property
    def _index(self) -> Any:
        index = import_faiss().IndexBinaryFlat(8 * self.data.shape[1])
        index.add(self.data)
        return index

    def compare(self, others: SignRows) -> np.ndarray:
        differing, _ = others._index.search(self.data, len(others.ids))
        return self._score(differing)

    def pairs_above(
        self, others: SignRows, level: float
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        reach = int(np.floor((1 - level) * 4 * self.data.shape[1])) + 1
        for start in range(0, len(self.ids), BLOCK_ROWS):
            block = self.data[start : start + BLOCK_ROWS]
            limits, differing, second = others._index.range_search(block, reach)
            first = start + np.repeat(np.arange(len(block)), np.diff(limits.astype(np.int64)))
            yield first, second, self._score(differing)

    def _score(self, differing: np.ndarray) -> np.ndarray:
        scores: np.ndarray = 1 - differing.astype(np.float64) / (4 * self.data.shape[1])
        return scores


class VectorRows:
    """Vectors; a score is their cosine, a sum in double precision."""

    def __init__(self, ids: np.ndarray, index: StoredIndex | None, rows: np.ndarray) -> None:
        self.ids = ids
        self._index = index
        self._rows = rows  # positions in the index; without one the (N, D) vectors themselves

    def read(self, chosen: np.ndarray | slice) -> np.ndarray:
        """(n, D) float32."""
        vectors: np.ndarray = self._rows[chosen]
        return vectors if self._index is None else self._index.vectors_at(vectors)

    @property
    def data(self) -> np.ndarray:
        return self.read(slice(None))

    def compare(self, others: VectorRows) -> np.ndarray:
        right = _normalise(others.data)
        blocks = [_normalise(self.read(block)) @ right.T for block in self._blocks()]
        return np.concatenate([np.empty((0, len(others.ids))), *blocks])

    def pairs_above(
        self, others: VectorRows, level: float
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        for left in self._blocks():
            mine = _normalise(self.read(left))
            for right in others._blocks():
                theirs = _normalise(others.read(right))
                rough = mine.astype(np.float32) @ theirs.astype(np.float32).T
                first, second = np.nonzero(rough > level - _ROUNDING)
                for start in range(0, len(first), BLOCK_ROWS):
                    i, j = first[start : start + BLOCK_ROWS], second[start : start + BLOCK_ROWS]
                    # Row by row: a matrix product rounds by its shape.
                    yield i + left.start, j + right.start, np.sum(mine[i] * theirs[j], axis=1)

    def _blocks(self) -> Iterator[slice]:
        for start in range(0, len(self.ids), BLOCK_ROWS):
            yield slice(start, min(start + BLOCK_ROWS, len(self.ids)))


def _normalise(vectors: np.ndarray) -> np.ndarray:
    doubles = vectors.astype(np.float64)
    norms = np.sqrt(np.einsum("nd,nd->n", doubles, doubles))
    unit: np.ndarray = doubles / np.maximum(norms, 1e-12)[:, None]
    return unit


def take_rows(index: StoredIndex, positions: np.ndarray) -> SignRows | VectorRows:
    """Some rows of an index."""
    if isinstance(index, SignIndex):
        return SignRows(index.ids[positions], index.codes[positions, :-_FACTOR_BYTES])
    return VectorRows(index.ids[positions], index, positions)


def restore_rows(ids: np.ndarray, data: np.ndarray) -> SignRows | VectorRows:
    """What `take_rows` gave, from its `data`."""
    return SignRows(ids, data) if data.dtype == np.uint8 else VectorRows(ids, None, data)


def find_levels(rows: StoredRows, references: StoredRows, deviations: float) -> np.ndarray:
    """(N,) float64: the score above which another image is a copy, at most SAME_SCORE.

    That is so many robust deviations above the median of an image's scores with the `references`, a picture
    of the collection at large; an image is not compared with itself.
    """
    scores = np.sort(rows.compare(references), axis=1)
    levels = np.full(len(scores), SAME_SCORE)
    known = np.isin(rows.ids, references.ids)
    for own in (False, True):
        chosen = np.flatnonzero(known == own)
        others = scores[chosen, : scores.shape[1] - own]  # its own is the largest
        if others.size:
            centre = np.median(others, axis=1)
            spread = 1.4826 * np.median(np.abs(others - centre[:, None]), axis=1)
            levels[chosen] = np.minimum(centre + deviations * spread, SAME_SCORE)
    return levels


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs of images; `first` has the smaller id of each."""

    first: np.ndarray  # (P,) int64
    second: np.ndarray  # (P,) int64
    scores: np.ndarray  # (P,) float64

    def __len__(self) -> int:
        return len(self.first)

    def take(self, rows: np.ndarray) -> ScoredPairs:
        return ScoredPairs(self.first[rows], self.second[rows], self.scores[rows])


def find_pairs(
    one: StoredRows, one_levels: np.ndarray, other: StoredRows, other_levels: np.ndarray, k: int
) -> ScoredPairs:
    """Pairs of two sets of rows, or of one with itself, whose score is above the level of one of the two.

    Of each image the `k` best, the other's id deciding between equals; by ids. SAME_SCORE is always enough.
    """
    found = ScoredPairs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    if len(one.ids) == 0 or len(other.ids) == 0:
        return found
    lowest = min(one_levels.min(), other_levels.min())
    for first, second, scores in one.pairs_above(other, lowest):
        levels = np.minimum(one_levels[first], other_levels[second])
        a, b = one.ids[first], other.ids[second]
        chosen = ((scores > levels) | (scores >= SAME_SCORE)) & (a != b)
        if one is other:
            chosen &= a < b
        a, b, scores = a[chosen], b[chosen], scores[chosen]
        parts = (np.minimum(a, b), np.maximum(a, b), scores)
        joined = (np.concatenate(pair) for pair in zip(vars(found).values(), parts, strict=True))
        found = keep_nearest(ScoredPairs(*joined), k)
    return found


def keep_nearest(pairs: ScoredPairs, k: int) -> ScoredPairs:
    """The pairs that are among the `k` best of one of their images, by ids."""
    return pairs.take(choose_nearest(pairs, k))


def choose_nearest(pairs: ScoredPairs, k: int) -> np.ndarray:
    """The same as positions among the pairs."""
    owners = np.concatenate([pairs.first, pairs.second])
    others = np.concatenate([pairs.second, pairs.first])
    order = np.lexsort((others, -np.tile(pairs.scores, 2), owners))
    starts = np.flatnonzero(np.diff(owners[order], prepend=-1))
    counts = np.diff(starts, append=len(order))
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order)) - np.repeat(starts, counts)
    chosen = np.flatnonzero((ranks < k).reshape(2, -1).any(axis=0))
    ordered: np.ndarray = chosen[np.lexsort((pairs.second[chosen], pairs.first[chosen]))]
    return ordered


def find_components(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The images (N,) of pairs, ascending, and the group (N,) of each: the smallest id that pairs lead to."""
    ids, places = np.unique(np.concatenate([first, second]), return_inverse=True)
    ends = places.reshape(2, -1)
    groups = np.arange(len(ids))
    while True:
        before = groups.copy()
        lowest = groups[ends].min(axis=0)
        for one in ends:
            np.minimum.at(groups, before[one], lowest)
        groups = groups[groups]
        if np.array_equal(groups, before):
            return ids, ids[groups]
