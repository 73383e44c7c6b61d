"""FAISS over arrays: build an index of vectors with global ids, and search it.

The scores are the same however the vectors are cut into indexes: FAISS makes a shortlist, and the
shortlist is scored again from its vectors, one fixed sum per pair. (FAISS sums in blocks whose
rounding depends on a row's position, so equal images would get unequal scores.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ckn_scale.core.topk import NO_ID
from ckn_scale.errors import MissingDependency

if TYPE_CHECKING:
    import faiss

SHORTLIST_MARGIN = 16  # extra candidates, so that rounding near the k-th place cannot drop one
ROUNDING = 1e-5  # bounds what FAISS's float32 sums of unit vectors are off by


def import_faiss() -> Any:
    """The faiss module, or one sentence saying what to install."""
    try:
        import faiss
    except ImportError as error:
        message = "faiss is missing: pip install 'ckn-scale[cpu]' (or [gpu] on a machine with GPUs)"
        raise MissingDependency(message) from error
    return faiss


class VectorIndex:
    """Vectors with ascending int64 ids, compared by inner product (larger is more alike).

    Wraps a `faiss.IndexIDMap`; other kinds (IVF, quantised) differ in the index it holds.
    """

    def __init__(self, index: faiss.IndexIDMap) -> None:
        faiss = import_faiss()
        if not isinstance(index, faiss.IndexIDMap):
            raise ValueError(f"expected a faiss IndexIDMap, got {type(index).__name__}")
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise ValueError(f"expected metric inner product, got faiss metric {index.metric_type}")
        self._index = index
        self._vectors = faiss.downcast_index(index.index)
        self.ids: np.ndarray = faiss.vector_to_array(index.id_map)
        _check_ids(self.ids)

    @property
    def rows(self) -> int:
        return int(self._index.ntotal)

    @property
    def dim(self) -> int:
        return int(self._index.d)

    def search(self, queries: np.ndarray, k: int, *, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """(Q, D) queries → similarity (Q, k) float32, ids (Q, k) int64; equal similarities by ascending id.

        Places beyond the number of rows have id NO_ID and similarity -inf.
        """
        queries = _as_matrix(queries, self.dim)
        if k < 1:
            raise ValueError(f"k must be ≥ 1, got {k}")
        import_faiss().omp_set_num_threads(threads)  # OpenMP keeps this number per calling thread
        similarity = np.full((len(queries), k), -np.inf, dtype=np.float32)
        ids = np.full((len(queries), k), NO_ID, dtype=np.int64)
        for row, query in enumerate(queries):
            positions = self._shortlist(query, k)
            scores = _score_pairs(self._vectors.reconstruct_batch(positions), query)
            best = np.lexsort((self.ids[positions], -scores))[:k]
            similarity[row, : len(best)] = scores[best]
            ids[row, : len(best)] = self.ids[positions[best]]
        return similarity, ids

    def _shortlist(self, query: np.ndarray, k: int) -> np.ndarray:
        """Positions that surely hold the best k: wide enough that everything tied with the k-th is in."""
        wanted = k + SHORTLIST_MARGIN
        while True:
            wanted = min(wanted, self.rows)
            if wanted == 0:
                return np.empty(0, dtype=np.int64)
            similarity, positions = self._vectors.search(query[None], wanted)
            slack = ROUNDING * max(1.0, float(np.abs(similarity[0, 0])))
            if wanted == self.rows or similarity[0, -1] < similarity[0, k - 1] - slack:
                return positions[0]
            wanted *= 2

    def vector(self, position: int) -> np.ndarray:
        """The (D,) float32 vector of the row whose id is `ids[position]`."""
        return self._vectors.reconstruct(position)

    def to_bytes(self) -> bytes:
        """The index in FAISS's own file format; equal vectors and ids give equal bytes."""
        return import_faiss().serialize_index(self._index).tobytes()


def build_exact(vectors: np.ndarray, ids: np.ndarray) -> VectorIndex:
    """Exact search over (N, D) vectors with (N,) strictly ascending int64 ids."""
    faiss = import_faiss()
    if vectors.ndim != 2 or vectors.shape[1] < 1:
        raise ValueError(f"vectors must be (N, D), got {vectors.shape}")
    ids = np.ascontiguousarray(ids, dtype=np.int64)
    if ids.shape != (len(vectors),):
        raise ValueError(f"{len(vectors)} vectors need as many ids, got {ids.shape}")
    _check_ids(ids)
    index = faiss.IndexIDMap(faiss.IndexFlatIP(vectors.shape[1]))
    index.add_with_ids(_as_matrix(vectors, vectors.shape[1]), ids)
    return VectorIndex(index)


def _check_ids(ids: np.ndarray) -> None:
    if len(ids) and ids[0] < 0:
        raise ValueError(f"ids must be ≥ 0, got {ids[0]}")
    if (np.diff(ids) <= 0).any():
        position = int(np.argmax(np.diff(ids) <= 0))
        raise ValueError(f"ids must ascend, got {ids[position]} before {ids[position + 1]}")


def _as_matrix(vectors: np.ndarray, dim: int) -> np.ndarray:
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise ValueError(f"vectors must be (N, {dim}), got {vectors.shape}")
    matrix = np.ascontiguousarray(vectors, dtype=np.float32)
    if not np.isfinite(matrix).all():
        raise ValueError("vectors must be finite, got NaN or infinity")
    return matrix


def _score_pairs(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Inner products of (N, D) rows with one (D,) query, each summed alone in double precision."""
    products = vectors.astype(np.float64) * query.astype(np.float64)
    return products.sum(axis=1).astype(np.float32)
