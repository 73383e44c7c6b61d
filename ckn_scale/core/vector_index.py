"""The best k of many rows, exactly: shortlist, score again, break ties by id; and merge several answers.

A fast search (a matrix product, codes) rounds each sum in its own way, so equal images would get
unequal scores, and other ones in another shard or batch. Here it only makes a shortlist that surely
holds the answer; what counts is scored again, one fixed sum per pair of query and row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ckn_scale.errors import MissingDependency

if TYPE_CHECKING:
    import faiss

NO_ID = -1  # fills a list that has fewer than k entries; never wins
SHORTLIST_MARGIN = 16  # extra candidates, so that most queries need no second look
SCORED_BYTES = 2**21  # rows are scored in blocks that stay in the processor's cache


class SearchableRows(Protocol):
    """Vectors in the order of their ids, with a fast search whose similarities are off by a known bound."""

    @property
    def rows(self) -> int: ...

    def nearest(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(Q, D) → about the `count` best: similarity (Q, count) descending, positions (Q, count)."""

    def above(self, query: np.ndarray, level: float) -> np.ndarray:
        """(D,) → the positions of all rows whose approximate similarity is at least `level`."""

    def error_bound(self, queries: np.ndarray) -> np.ndarray:
        """(Q, D) → (Q,): how far an approximate similarity may be from `score_pairs`."""

    def vectors_at(self, positions: np.ndarray) -> np.ndarray:
        """(N,) → (N, D): what a query is multiplied with."""


def find_topk(rows: SearchableRows, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(Q, D) → similarity (Q, k') float32 and positions (Q, k'), k' = min(k, rows), ties by position.

    The answer depends on nothing but the query and the rows: not on other queries, and the answers of
    parts merged are the answer of the whole.
    """
    if k < 1:
        raise ValueError(f"k must be ≥ 1, got {k}")
    k = min(k, rows.rows)
    if k == 0 or len(queries) == 0:
        return np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
    approximate, shortlist = rows.nearest(queries, min(k + SHORTLIST_MARGIN, rows.rows))
    # At least k rows score above the k-th less the error, and whatever scores that is no further below.
    level = approximate[:, k - 1] - 2 * rows.error_bound(queries)
    similarity, positions = _rank(rows, queries, shortlist, k)
    if shortlist.shape[1] < rows.rows:
        # Many near-equal rows: all that may matter are scored, in one more pass, however many they are.
        for row in np.flatnonzero(approximate[:, -1] >= level):
            every = rows.above(queries[row], float(level[row]))
            similarity[row : row + 1], positions[row : row + 1] = _rank(
                rows, queries[row : row + 1], every[None], k
            )
    return similarity, positions


def _rank(
    rows: SearchableRows, queries: np.ndarray, shortlist: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    scores = score_pairs(rows, queries, shortlist)
    order = np.lexsort((shortlist, -scores), axis=-1)[:, :k]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(shortlist, order, axis=1)


def score_pairs(rows: SearchableRows, queries: np.ndarray, positions: np.ndarray) -> np.ndarray:
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
    _check_lists(values, ids)
    worst = np.float32(-np.inf if larger_is_better else np.inf)
    all_ids = np.concatenate(ids, axis=1).astype(np.int64)
    all_values = np.where(all_ids == NO_ID, worst, np.concatenate(values, axis=1)).astype(np.float32)
    costs = -all_values if larger_is_better else all_values
    # The middle key keeps fillers behind real entries whose value is infinite too.
    order = np.lexsort((all_ids, all_ids == NO_ID, costs), axis=-1)[:, :k]
    return np.take_along_axis(all_values, order, axis=1), np.take_along_axis(all_ids, order, axis=1)


def _check_lists(values: Sequence[np.ndarray], ids: Sequence[np.ndarray]) -> None:
    if len(values) != len(ids) or not values:
        raise ValueError(f"merge needs as many value lists as id lists, got {len(values)} and {len(ids)}")
    for value, index in zip(values, ids, strict=True):
        if value.ndim != 2 or value.shape != index.shape or value.shape[0] != values[0].shape[0]:
            raise ValueError(f"lists must be (Q, k) alike, got values {value.shape} and ids {index.shape}")
        if np.isnan(value).any():
            raise ValueError("values must be numbers, got NaN")


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
