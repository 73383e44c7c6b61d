"""Search by inner product, exact or by signs: the best k of many rows, ties by id; answers can be merged.

An exact index makes a shortlist by a fast search and scores it again: a matrix product rounds each sum in
its own way, so equal images would get unequal scores, and other ones in another shard or batch. An index
of signs compares images of one bit a number with queries of 8 bits a number. In both the score of a pair
depends on its image and its query alone, so answers are the same however the images are cut into indexes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ckn_scale.core.numerics import faiss_threads, import_faiss
from ckn_scale.core.vector_codes import SIGN_FACTOR_BYTES, SignCodec, VectorCodec, empty_sign_index

if TYPE_CHECKING:
    import faiss

MOST_DROPPED = 1024  # rows to leave out that a search may find and drop
NO_ID = -1  # fills a list that has fewer than k entries; never wins
SHORTLIST_MARGIN = 16  # extra candidates, so that most queries need no second look
SCORED_BYTES = 2**21  # rows are scored in blocks that stay in the processor's cache
BLAS_FROM_QUERIES = 4  # from here on one matrix product is faster than row by row
LONGEST_NORM = 1.01  # vectors are unit vectors, but for the rounding of float16
FLOAT32_ROUNDING = 2.0**-24
SMALLEST = 1e-30  # of an error: a query of zeros is compared too, and processors may take less for zero
# Queries in 8 bits move a score by a tenth of what the signs do and are 300 times quicker than in floats.
QUERY_BITS = 8
KINDS = {"float16": "exact", "signs": "signs"}  # what an index of each encoding is called in its manifest


def build_index(codec: VectorCodec, codes: np.ndarray, ids: np.ndarray) -> StoredIndex:
    """An index of (N, code_bytes) codes with (N,) strictly ascending int64 ids."""
    if codec.name == "signs":
        return build_signs(codes, ids, codec.dim)
    return build_exact(codec.decode(codes), ids)


def wrap_index(index: faiss.IndexIDMap, kind: str, dim: int) -> StoredIndex:
    """What a file of an index of this kind holds, as FAISS opened it."""
    if kind not in KINDS.values():
        raise ValueError(f"no kind of index named {kind!r}; there are {', '.join(KINDS.values())}")
    return SignIndex(index, dim) if kind == "signs" else VectorIndex(index)


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


class VectorIndex:
    """Vectors with ascending int64 ids, compared by inner product (larger is more similar).

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

    def search(
        self, queries: np.ndarray, k: int, *, threads: int = 1, allowed: np.ndarray | RowMask | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(Q, D) queries → similarity (Q, k') float32, ids (Q, k') int64, k' = min(k, rows allowed).

        Best first; equal similarities by ascending id. `allowed` (rows,) bool leaves out the others.
        """
        return self.find(self.prepare(queries), k, threads=threads, allowed=allowed)

    def prepare(self, queries: np.ndarray) -> np.ndarray:
        """(Q, D) queries in the form that `find` takes, of this index and all others of its kind."""
        return as_matrix(queries, self.dim)

    def find(
        self, prepared: np.ndarray, k: int, *, threads: int = 1, allowed: np.ndarray | RowMask | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `search`, for queries that were prepared."""
        mask = as_row_mask(allowed, self.rows)
        with faiss_threads(threads):
            similarity, positions = find_topk(self, prepared, k, mask)
        return similarity, self.ids[positions]

    def nearest(
        self, queries: np.ndarray, count: int, allowed: RowMask | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        # FAISS compares this with queries × dimensions, for the whole process, and waits for 128,000.
        import_faiss().cvar.distance_compute_blas_threshold = BLAS_FROM_QUERIES * self.dim
        excluded = 0 if allowed is None else self.rows - allowed.count
        if allowed is None or len(queries) < BLAS_FROM_QUERIES or excluded > MOST_DROPPED:
            params = None if allowed is None else allowed.parameters
            found: tuple[np.ndarray, np.ndarray] = self._vectors.search(queries, count, params=params)
            return found
        # A search with a selector goes row by row; with few rows to leave out BLAS finds these, too.
        similarity, positions = self._vectors.search(queries, count + excluded)
        order = np.argsort(~allowed.mask[positions], axis=1, kind="stable")[:, :count]
        return np.take_along_axis(similarity, order, axis=1), np.take_along_axis(positions, order, axis=1)

    def above(self, query: np.ndarray, level: float, allowed: RowMask | None = None) -> np.ndarray:
        # FAISS wants more than the radius, in float32.
        radius = np.nextafter(np.float32(level), np.float32(-np.inf))
        params = None if allowed is None else allowed.parameters
        positions: np.ndarray = self._vectors.range_search(query[None], float(radius), params=params)[2]
        return positions

    def error_bound(self, queries: np.ndarray) -> np.ndarray:
        """The bound of a float32 sum of D products in any order, for unit vectors."""
        norms = np.linalg.norm(queries.astype(np.float64), axis=1)
        bounds: np.ndarray = (self.dim + 4) * FLOAT32_ROUNDING * LONGEST_NORM * norms + SMALLEST
        return bounds

    def vectors_at(self, positions: np.ndarray) -> np.ndarray:
        vectors: np.ndarray = self._vectors.reconstruct_batch(positions)
        return vectors

    def vector(self, position: int) -> np.ndarray:
        """The (D,) float32 vector of the row whose id is `ids[position]`."""
        vector: np.ndarray = self._vectors.reconstruct(position)
        return vector

    def to_bytes(self) -> bytes:
        """The index in FAISS's own file format; equal vectors and ids give equal bytes."""
        data: bytes = import_faiss().serialize_index(self._index).tobytes()
        return data


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


class SignIndex:
    """Codes of vectors with ascending int64 ids; offers what `VectorIndex` does.

    Wraps a `faiss.IndexIDMap` of an `IndexRaBitQ`. `dim` is that of the vectors, before the rotation.
    """

    def __init__(self, index: faiss.IndexIDMap, dim: int) -> None:
        faiss = import_faiss()
        inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexIDMap) else index
        self._codec = SignCodec(dim)
        if not isinstance(inner, faiss.IndexRaBitQ) or inner.d != self._codec.rotation.padded_dim:
            raise ValueError(
                f"expected an IndexRaBitQ of {dim} numbers, got {type(inner).__name__} of {inner.d}"
            )
        self._index, self._signs = index, inner
        self.dim = dim
        self.ids: np.ndarray = faiss.vector_to_array(index.id_map)
        check_ids(self.ids)

    @property
    def rows(self) -> int:
        return int(self._index.ntotal)

    def search(
        self, queries: np.ndarray, k: int, *, threads: int = 1, allowed: np.ndarray | RowMask | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(Q, D) queries → similarity (Q, k') float32, ids (Q, k') int64, k' = min(k, rows allowed).

        Best first; equal similarities by ascending id. `allowed` (rows,) bool leaves out the others.
        """
        return self.find(self.prepare(queries), k, threads=threads, allowed=allowed)

    def prepare(self, queries: np.ndarray) -> np.ndarray:
        """(Q, D) queries in the form that `find` takes, of this index and all others of its kind: rotated."""
        return self._codec.rotation.apply(as_matrix(queries, self.dim))

    def find(
        self, prepared: np.ndarray, k: int, *, threads: int = 1, allowed: np.ndarray | RowMask | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `search`, for queries that were prepared."""
        if k < 1:
            raise ValueError(f"k must be ≥ 1, got {k}")
        mask = as_row_mask(allowed, self.rows)
        k = min(k, self.rows if mask is None else mask.count)
        if k == 0 or len(prepared) == 0:
            return np.empty((len(prepared), k), np.float32), np.empty((len(prepared), k), np.int64)
        with faiss_threads(threads):
            similarity, positions = _find_signs(self._signs, prepared, k, mask)
        return similarity, self.ids[positions]

    @property
    def codes(self) -> np.ndarray:
        """(N, code_bytes) uint8, as `SignCodec` makes them; where they lie, without a copy."""
        stored = self._signs.codes
        if not self.rows:
            return np.empty((0, self._codec.code_bytes), np.uint8)
        codes: np.ndarray = import_faiss().rev_swig_ptr(stored.data(), stored.size())
        return codes.reshape(self.rows, self._codec.code_bytes)

    def vectors_at(self, positions: np.ndarray) -> np.ndarray:
        """(N,) → (N, D) float32: the vectors that stand for these rows."""
        return self._codec.rotation.undo(self._signs.reconstruct_batch(positions))

    def vector(self, position: int) -> np.ndarray:
        """The (D,) float32 vector that stands for the row whose id is `ids[position]`."""
        vector: np.ndarray = self._codec.rotation.undo(self._signs.reconstruct(position)[None])[0]
        return vector

    def to_bytes(self) -> bytes:
        """The index in FAISS's own file format; equal codes and ids give equal bytes."""
        data: bytes = import_faiss().serialize_index(self._index).tobytes()
        return data


def build_signs(codes: np.ndarray, ids: np.ndarray, dim: int) -> SignIndex:
    """An index of codes (N, code_bytes), as `SignCodec` makes them, with strictly ascending int64 ids."""
    faiss = import_faiss()
    ids = np.ascontiguousarray(ids, dtype=np.int64)
    codec = SignCodec(dim)
    if codes.shape != (len(ids), codec.code_bytes):
        raise ValueError(f"{len(ids)} ids need codes ({len(ids)}, {codec.code_bytes}), got {codes.shape}")
    check_ids(ids)
    inner = empty_sign_index(codec.rotation.padded_dim)
    index = faiss.IndexIDMap(inner)
    inner.add_sa_codes(np.ascontiguousarray(codes))
    faiss.copy_array_to_vector(ids, index.id_map)
    index.ntotal = inner.ntotal
    return SignIndex(index, dim)


def _order(similarity: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((positions, -similarity), axis=-1)
    return np.take_along_axis(similarity, order, axis=1), np.take_along_axis(positions, order, axis=1)


StoredIndex = VectorIndex | SignIndex


def rank_rows(
    prepared: np.ndarray, parts: Sequence[tuple[StoredIndex, np.ndarray]], k: int
) -> tuple[np.ndarray, np.ndarray]:
    """The k most similar of chosen rows of several indexes of one kind, for one prepared query (1, D).

    `parts` has each index with ascending positions (N_i,); → similarity (k',) as a search of the index gives
    it, and (k',) places among all the chosen, best first, ties by place.
    """
    k = min(k, sum(len(rows) for _, rows in parts))
    if k == 0:
        return np.empty(0, np.float32), np.empty(0, np.int64)
    signs = [(index.codes, rows) for index, rows in parts if isinstance(index, SignIndex)]
    if signs:
        similarity, places = _find_signs(_gather_codes(signs), prepared, k, None)
        return similarity[0], places[0]
    exact = [(index, rows) for index, rows in parts if isinstance(index, VectorIndex)]
    scores = np.concatenate([score_pairs(index, prepared, rows[None])[0] for index, rows in exact])
    order = np.argsort(-scores, kind="stable")[:k]
    return scores[order], order


_scratch = threading.local()  # an index to fill with the codes of chosen rows: its memory is used again


def _gather_codes(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Any:
    """A `faiss.IndexRaBitQ` of chosen rows of arrays of codes, until the same thread asks for the next."""
    faiss, count, width = import_faiss(), sum(len(rows) for _, rows in parts), parts[0][0].shape[1]
    held: Any = getattr(_scratch, "held", None)
    if held is None or held.code_size != width or held.codes.size() < count * width:
        held = _scratch.held = empty_sign_index(8 * (width - SIGN_FACTOR_BYTES))
        held.add_sa_codes(np.zeros((count, width), np.uint8))
    gathered, start = faiss.rev_swig_ptr(held.codes.data(), held.codes.size()).reshape(-1, width), 0
    for codes, rows in parts:
        np.take(codes, rows, axis=0, out=gathered[start : start + len(rows)], mode="clip")
        start += len(rows)
    held.ntotal = count
    return held


def _find_signs(
    signs: Any, rotated: np.ndarray, k: int, allowed: RowMask | None
) -> tuple[np.ndarray, np.ndarray]:
    """Similarity and positions (Q, k) of a `faiss.IndexRaBitQ` of k rows at least, ties by position."""
    params = import_faiss().RaBitQSearchParameters()
    params.qb = QUERY_BITS
    if allowed is not None:
        params.sel = allowed.selector
    available = int(signs.ntotal) if allowed is None else allowed.count
    similarity, positions = signs.search(rotated, min(k + 1, available), params=params)
    # FAISS keeps any of several equal images at the k-th place: such queries look at all of them.
    tied = similarity[:, k - 1] == similarity[:, k] if similarity.shape[1] > k else ()
    similarity, positions = _order(similarity[:, :k], positions[:, :k])
    for row in np.flatnonzero(tied):
        below = float(np.nextafter(similarity[row, -1], np.float32(-np.inf)))
        _, every, where = signs.range_search(rotated[row : row + 1], below, params=params)
        ordered = _order(every[None], where[None])
        similarity[row], positions[row] = ordered[0][0, :k], ordered[1][0, :k]
    return similarity, positions


class SearchableRows(Protocol):
    """Vectors in the order of their ids, with a fast search whose similarities are off by a known bound."""

    @property
    def rows(self) -> int: ...

    def nearest(
        self, queries: np.ndarray, count: int, allowed: RowMask | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(Q, D) → about the `count` best: similarity (Q, count) descending, positions (Q, count)."""

    def above(self, query: np.ndarray, level: float, allowed: RowMask | None = None) -> np.ndarray:
        """(D,) → the positions of all rows whose approximate similarity is at least `level`."""

    def error_bound(self, queries: np.ndarray) -> np.ndarray:
        """(Q, D) → (Q,): how far an approximate similarity may be from `score_pairs`."""

    def vectors_at(self, positions: np.ndarray) -> np.ndarray:
        """(N,) → (N, D): what a query is multiplied with."""


def find_topk(
    rows: SearchableRows, queries: np.ndarray, k: int, allowed: RowMask | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(Q, D) → similarity (Q, k') float32 and positions (Q, k'), k' = min(k, rows), ties by position.

    The answer depends on nothing but the query and the rows: not on other queries, and the answers of
    parts merged are the answer of the whole.
    """
    if k < 1:
        raise ValueError(f"k must be ≥ 1, got {k}")
    available = rows.rows if allowed is None else allowed.count
    k = min(k, available)
    if k == 0 or len(queries) == 0:
        return np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
    approximate, shortlist = rows.nearest(queries, min(k + SHORTLIST_MARGIN, available), allowed)
    # At least k rows score above the k-th less the error, and whatever scores that is no further below.
    level = approximate[:, k - 1] - 2 * rows.error_bound(queries)
    similarity, positions = _rank(rows, queries, shortlist, k)
    if shortlist.shape[1] < available:
        # Many near-equal rows: all that may matter are scored, in one more pass, however many they are.
        for row in np.flatnonzero(approximate[:, -1] >= level):
            every = rows.above(queries[row], float(level[row]), allowed)
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


def check_ids(ids: np.ndarray) -> None:
    """ValueError unless ids (N,) are ≥ 0 and strictly ascending."""
    if len(ids) and ids[0] < 0:
        raise ValueError(f"ids must be ≥ 0, got {ids[0]}")
    if (np.diff(ids) <= 0).any():
        position = int(np.argmax(np.diff(ids) <= 0))
        raise ValueError(f"ids must ascend, got {ids[position]} before {ids[position + 1]}")


def as_matrix(vectors: np.ndarray, dim: int) -> np.ndarray:
    """As contiguous (N, dim) float32; ValueError for another shape, NaN or infinity."""
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise ValueError(f"vectors must be (N, {dim}), got {vectors.shape}")
    matrix = np.ascontiguousarray(vectors, dtype=np.float32)
    if not np.isfinite(matrix).all():
        raise ValueError("vectors must be finite, got NaN or infinity")
    return matrix
