"""FAISS over arrays: build an index of vectors with global ids, and search it.

FAISS makes the shortlist, `topk.find_topk` the answer: the scores are the same however the vectors are
cut into indexes and the queries into batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ckn_scale.core.topk import find_topk
from ckn_scale.errors import MissingDependency

if TYPE_CHECKING:
    import faiss

BLAS_FROM_QUERIES = 4  # from here on one matrix product is faster than row by row
LONGEST_NORM = 1.01  # vectors are unit vectors, but for the rounding of float16
FLOAT32_ROUNDING = 2.0**-24
SMALLEST = 1e-30  # of an error: a query of zeros is compared too, and processors may take less for zero


def import_faiss() -> Any:
    """The faiss module, or one sentence saying what to install."""
    try:
        import faiss
    except ImportError as error:
        message = "faiss is missing: pip install 'ckn-scale[cpu]' (or [gpu] on a machine with GPUs)"
        raise MissingDependency(message) from error
    return faiss


@contextmanager
def faiss_threads(count: int) -> Iterator[None]:
    """FAISS has `count` threads for what this thread calls inside, and what it had before afterwards."""
    faiss = import_faiss()
    before = faiss.omp_get_max_threads()  # OpenMP keeps this number per calling thread
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


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
        check_ids(self.ids)

    @property
    def rows(self) -> int:
        return int(self._index.ntotal)

    @property
    def dim(self) -> int:
        return int(self._index.d)

    def search(self, queries: np.ndarray, k: int, *, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """(Q, D) queries → similarity (Q, k') float32, ids (Q, k') int64, k' = min(k, rows).

        Best first; equal similarities by ascending id.
        """
        with faiss_threads(threads):
            similarity, positions = find_topk(self, as_matrix(queries, self.dim), k)
        return similarity, self.ids[positions]

    def nearest(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        # FAISS compares this with queries × dimensions, for the whole process, and waits for 128,000.
        import_faiss().cvar.distance_compute_blas_threshold = BLAS_FROM_QUERIES * self.dim
        return self._vectors.search(queries, count)

    def above(self, query: np.ndarray, level: float) -> np.ndarray:
        # FAISS wants more than the radius, in float32.
        radius = np.nextafter(np.float32(level), np.float32(-np.inf))
        return self._vectors.range_search(query[None], float(radius))[2]

    def error_bound(self, queries: np.ndarray) -> np.ndarray:
        """The bound of a float32 sum of D products in any order, for unit vectors."""
        norms = np.linalg.norm(queries.astype(np.float64), axis=1)
        return (self.dim + 4) * FLOAT32_ROUNDING * LONGEST_NORM * norms + SMALLEST

    def vectors_at(self, positions: np.ndarray) -> np.ndarray:
        return self._vectors.reconstruct_batch(positions)

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
    check_ids(ids)
    matrix = as_matrix(vectors, vectors.shape[1])
    longest = float(np.sqrt(np.einsum("nd,nd->n", matrix, matrix).max(initial=0.0)))
    if longest > LONGEST_NORM:
        raise ValueError(f"vectors must have unit length, got one of length {longest:g}")
    index = faiss.IndexIDMap(faiss.IndexFlatIP(vectors.shape[1]))
    index.add_with_ids(matrix, ids)
    return VectorIndex(index)


def check_ids(ids: np.ndarray) -> None:
    if len(ids) and ids[0] < 0:
        raise ValueError(f"ids must be ≥ 0, got {ids[0]}")
    if (np.diff(ids) <= 0).any():
        position = int(np.argmax(np.diff(ids) <= 0))
        raise ValueError(f"ids must ascend, got {ids[position]} before {ids[position + 1]}")


def as_matrix(vectors: np.ndarray, dim: int) -> np.ndarray:
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise ValueError(f"vectors must be (N, {dim}), got {vectors.shape}")
    matrix = np.ascontiguousarray(vectors, dtype=np.float32)
    if not np.isfinite(matrix).all():
        raise ValueError("vectors must be finite, got NaN or infinity")
    return matrix
