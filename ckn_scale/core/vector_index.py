"""An index of vectors, exact or by signs, compared by inner product: its form, how it is built and searched.

An exact index compares vectors of two bytes a number with queries as they are; one of signs compares images
of one bit a number with queries of 8 bits a number. Both offer what `StoredIndex` says, and `core/topk.py`
makes the answer."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ckn_scale.core.faiss_library import faiss_threads, import_faiss
from ckn_scale.core.topk import RowMask, as_row_mask, find_topk, score_pairs
from ckn_scale.core.vector_codes import SIGN_FACTOR_BYTES, SignCodec, VectorCodec, empty_sign_index

if TYPE_CHECKING:
    import faiss

MOST_DROPPED = 1024  # rows to leave out that a search may find and drop
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


class StoredIndex(ABC):
    """Rows with ascending int64 ids in a `faiss.IndexIDMap`, compared by inner product (larger is nearer).

    `rounds` and the methods from `nearest` on are what `find_topk` asks for.
    """

    rounds: ClassVar[bool]
    dim: int  # of the vectors

    def __init__(self, index: faiss.IndexIDMap) -> None:
        self._index = index
        self.ids: np.ndarray = import_faiss().vector_to_array(index.id_map)
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
        prepared, mask = self.prepare(queries), as_row_mask(allowed, self.rows)
        with faiss_threads(threads):
            similarity, positions = find_topk([(self, mask)], prepared, k)
        return similarity, self.ids[positions]

    @abstractmethod
    def prepare(self, queries: np.ndarray) -> np.ndarray:
        """(Q, D) queries in the form that `find_topk` takes, for this index and all others of its kind."""

    @abstractmethod
    def nearest(
        self, queries: np.ndarray, count: int, allowed: RowMask | None = None
    ) -> tuple[np.ndarray, np.ndarray]: ...

    @abstractmethod
    def above(
        self, query: np.ndarray, level: float, allowed: RowMask | None = None
    ) -> tuple[np.ndarray, np.ndarray]: ...

    @abstractmethod
    def error_bound(self, queries: np.ndarray) -> np.ndarray: ...

    @abstractmethod
    def vectors_at(self, positions: np.ndarray) -> np.ndarray:
        """(N,) → (N, D) float32: the vectors that stand for these rows."""

    def vector(self, position: int) -> np.ndarray:
        """The (D,) float32 vector that stands for the row whose id is `ids[position]`."""
        vector: np.ndarray = self.vectors_at(np.array([position]))[0]
        return vector

    def to_bytes(self) -> bytes:
        """The index in FAISS's own file format; equal rows and ids give equal bytes."""
        data: bytes = import_faiss().serialize_index(self._index).tobytes()
        return data


class VectorIndex(StoredIndex):
    """Vectors as they are, in a `faiss.IndexFlatIP`."""

    rounds = True

    def __init__(self, index: faiss.IndexIDMap) -> None:
        faiss = import_faiss()
        if not isinstance(index, faiss.IndexIDMap):
            raise ValueError(f"expected a faiss IndexIDMap, got {type(index).__name__}")
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise ValueError(f"expected metric inner product, got faiss metric {index.metric_type}")
        super().__init__(index)
        self._vectors = faiss.downcast_index(index.index)
        self.dim = int(index.d)

    def prepare(self, queries: np.ndarray) -> np.ndarray:
        return as_matrix(queries, self.dim)

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

    def above(
        self, query: np.ndarray, level: float, allowed: RowMask | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        # FAISS wants more than the radius, in float32.
        radius = np.nextafter(np.float32(level), np.float32(-np.inf))
        params = None if allowed is None else allowed.parameters
        _, similarity, positions = self._vectors.range_search(query[None], float(radius), params=params)
        return similarity, positions

    def error_bound(self, queries: np.ndarray) -> np.ndarray:
        """The bound of a float32 sum of D products in any order, for unit vectors."""
        norms = np.linalg.norm(queries.astype(np.float64), axis=1)
        bounds: np.ndarray = (self.dim + 4) * FLOAT32_ROUNDING * LONGEST_NORM * norms + SMALLEST
        return bounds

    def vectors_at(self, positions: np.ndarray) -> np.ndarray:
        vectors: np.ndarray = self._vectors.reconstruct_batch(positions)
        return vectors


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


class SignIndex(StoredIndex):
    """Codes of vectors, in a `faiss.IndexRaBitQ` of rotated ones; `dim` is that before the rotation."""

    rounds = False

    def __init__(self, index: faiss.IndexIDMap, dim: int) -> None:
        faiss = import_faiss()
        inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexIDMap) else index
        self._codec = SignCodec(dim)
        if not isinstance(inner, faiss.IndexRaBitQ) or inner.d != self._codec.rotation.padded_dim:
            raise ValueError(
                f"expected an IndexRaBitQ of {dim} numbers, got {type(inner).__name__} of {inner.d}"
            )
        super().__init__(index)
        self._signs = inner
        self.dim = dim

    def prepare(self, queries: np.ndarray) -> np.ndarray:
        return self._codec.rotation.apply(as_matrix(queries, self.dim))

    def nearest(
        self, queries: np.ndarray, count: int, allowed: RowMask | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        found: tuple[np.ndarray, np.ndarray] = self._signs.search(
            queries, count, params=_sign_parameters(allowed)
        )
        return found

    def above(
        self, query: np.ndarray, level: float, allowed: RowMask | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        below, params = np.nextafter(np.float32(level), np.float32(-np.inf)), _sign_parameters(allowed)
        _, similarity, positions = self._signs.range_search(query[None], float(below), params=params)
        return similarity, positions

    def error_bound(self, queries: np.ndarray) -> np.ndarray:
        return np.zeros(len(queries))

    @property
    def codes(self) -> np.ndarray:
        """(N, code_bytes) uint8, as `SignCodec` makes them; where they lie, without a copy."""
        stored = self._signs.codes
        if not self.rows:
            return np.empty((0, self._codec.code_bytes), np.uint8)
        codes: np.ndarray = import_faiss().rev_swig_ptr(stored.data(), stored.size())
        return codes.reshape(self.rows, self._codec.code_bytes)

    def vectors_at(self, positions: np.ndarray) -> np.ndarray:
        return self._codec.rotation.undo(self._signs.reconstruct_batch(positions))


def _sign_parameters(allowed: RowMask | None) -> Any:
    params = import_faiss().RaBitQSearchParameters()
    params.qb = QUERY_BITS
    if allowed is not None:
        params.sel = allowed.selector
    return params


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


def rank_rows(
    prepared: np.ndarray, parts: Sequence[tuple[StoredIndex, np.ndarray]], k: int
) -> tuple[np.ndarray, np.ndarray]:
    """The k most similar of chosen rows of several indexes of one kind, for one prepared query (1, D).

    `parts` has each index with ascending positions (N_i,); → similarity (k',) as a search of the index gives
    it, and (k',) places among all the chosen, best first, ties by place.
    """
    signs = [(index.codes, rows) for index, rows in parts if isinstance(index, SignIndex)]
    if signs:
        scores = _score_codes(signs, prepared)
    else:
        alone = [score_pairs(index, prepared, rows[None])[0] for index, rows in parts]
        scores = np.concatenate([np.empty(0, np.float32), *alone])
    if k < len(scores):  # a sort of thousands for a few takes longer than comparing them
        least = np.partition(scores, len(scores) - k)[len(scores) - k]
        best = np.flatnonzero(scores >= least)
        order = best[np.argsort(-scores[best], kind="stable")[:k]]
    else:
        order = np.argsort(-scores, kind="stable")
    return scores[order], order


_scratch = threading.local()  # an index to fill with the codes of chosen rows: its memory is used again


def _score_codes(parts: Sequence[tuple[np.ndarray, np.ndarray]], prepared: np.ndarray) -> np.ndarray:
    """Similarities (N,) of chosen rows of arrays of codes to one prepared query (1, D)."""
    gathered = _gather_codes(parts)
    _, similarity, positions = gathered.range_search(prepared, -np.inf, params=_sign_parameters(None))
    scores = np.empty(len(positions), np.float32)
    scores[positions] = similarity
    return scores


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
