"""Database-side augmentation: an indexed vector joined with its nearest neighbours in the index.

What several images of one thing have in common gains, what only one of them shows loses. A vector becomes the
normalised sum of itself and its neighbours, each weighted by its similarity. The outcome depends on the
vector and on what it is compared with, not on how that is cut into indexes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ckn_scale.core.topk import NO_ID, RowMask, merge_topk
from ckn_scale.core.vector_codes import VectorCodec
from ckn_scale.core.vector_index import StoredIndex, build_index

BLOCK_BYTES = 256 * 2**20  # of float32 vectors and their neighbours, which lie in memory together
# Of the similarity: the weight of a neighbour. Flattened vectors of related images have some 0.1,
# and stored signs turn only where the weights of those against them exceed 1.
POWER = 0.5


@dataclass(frozen=True)
class Part:
    """An index whose rows may be neighbours, but for those that `allowed` leaves out."""

    index: StoredIndex
    allowed: RowMask | None


OpenPart: TypeAlias = Callable[[], Part]  # parts are opened one after the other


def augment_index(
    index: StoredIndex, parts: Sequence[OpenPart], count: int, codec: VectorCodec
) -> StoredIndex:
    """The same rows, each joined with its `count` nearest others among the rows of all parts."""
    step = max(1, BLOCK_BYTES // (4 * index.dim * (count + 2)))
    codes = [np.empty((0, codec.code_bytes), np.uint8)]
    for start in range(0, index.rows, step):
        rows = np.arange(start, min(start + step, index.rows))
        vectors = _normalise(index.vectors_at(rows)).astype(np.float32)
        similarity, ids = find_neighbours(vectors, index.ids[rows], parts, count)
        codes.append(codec.encode(add_neighbours(vectors, _gather(ids, parts, index.dim), similarity)))
    return build_index(codec, np.concatenate(codes), index.ids)


def find_neighbours(
    vectors: np.ndarray, own_ids: np.ndarray, parts: Sequence[OpenPart], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """(N, D) vectors with (N,) ids → similarity and ids (N, n), n ≤ `count`, best first, ties by id.

    A vector is not its own neighbour. NO_ID stands where there are fewer.
    """
    best = np.empty((len(vectors), 0), np.float32), np.empty((len(vectors), 0), np.int64)
    for part in parts:
        opened = part()
        similarity, ids = opened.index.search(vectors, count + 1, allowed=opened.allowed)
        others = np.where(ids == own_ids[:, None], NO_ID, ids)
        best = merge_topk([best[0], similarity], [best[1], others], count, larger_is_better=True)
    return best


def add_neighbours(vectors: np.ndarray, neighbours: np.ndarray, similarity: np.ndarray) -> np.ndarray:
    """(N, D) vectors, (N, n, D) neighbours and (N, n) similarities → (N, D) float32, of unit length.

    A neighbour's weight is its similarity to the power of POWER, and none when that is not positive; the
    vector's own is 1.
    """
    total = _normalise(vectors)
    weights = np.maximum(similarity.astype(np.float64), 0) ** POWER
    for rank in range(weights.shape[1]):  # in order: a sum rounds by it
        total += weights[:, rank, None] * _normalise(neighbours[:, rank])
    return _normalise(total).astype(np.float32)


def _gather(ids: np.ndarray, parts: Sequence[OpenPart], dim: int) -> np.ndarray:
    """(N, n) ids → (N, n, D) vectors that stand for them; zeros for NO_ID."""
    vectors = np.zeros((*ids.shape, dim), np.float32)
    for part in parts:
        index = part().index
        held = np.isin(ids, index.ids)
        if held.any():
            vectors[held] = index.vectors_at(np.searchsorted(index.ids, ids[held]))
    return vectors


def _normalise(vectors: np.ndarray) -> np.ndarray:
    doubles = vectors.astype(np.float64)
    norms = np.sqrt(np.sum(doubles * doubles, axis=1))
    unit: np.ndarray = doubles / np.maximum(norms, 1e-12)[:, None]
    return unit
