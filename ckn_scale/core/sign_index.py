"""Search over signs: images of one bit a number, compared with queries of 8 bits a number.

The score of a pair depends on its code and its query alone, so answers are the same however the images
are cut into indexes and whatever else is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ckn_scale.core.vector_codes import SignCodec, VectorCodec, empty_sign_index
from ckn_scale.core.vector_index import (
    VectorIndex,
    as_matrix,
    build_exact,
    check_ids,
    faiss_threads,
    import_faiss,
)

if TYPE_CHECKING:
    import faiss

# Queries in 8 bits move a score by a tenth of what the signs do and are 300 times quicker than in floats.
QUERY_BITS = 8


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

    def search(self, queries: np.ndarray, k: int, *, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """(Q, D) queries → similarity (Q, k') float32, ids (Q, k') int64, k' = min(k, rows).

        Best first; equal similarities by ascending id.
        """
        if k < 1:
            raise ValueError(f"k must be ≥ 1, got {k}")
        queries, k = as_matrix(queries, self.dim), min(k, self.rows)
        if k == 0 or len(queries) == 0:
            return np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
        with faiss_threads(threads):
            similarity, positions = self._find(self._codec.rotation.apply(queries), k)
        return similarity, self.ids[positions]

    def _find(self, rotated: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Similarity and positions, which ascend with the ids."""
        params = import_faiss().RaBitQSearchParameters()
        params.qb = QUERY_BITS
        similarity, positions = self._signs.search(rotated, min(k + 1, self.rows), params=params)
        # FAISS keeps any of several equal images at the k-th place: such queries look at all of them.
        tied = similarity[:, k - 1] == similarity[:, k] if similarity.shape[1] > k else ()
        similarity, positions = _order(similarity[:, :k], positions[:, :k])
        for row in np.flatnonzero(tied):
            below = float(np.nextafter(similarity[row, -1], np.float32(-np.inf)))
            _, every, where = self._signs.range_search(rotated[row : row + 1], below, params=params)
            ordered = _order(every[None], where[None])
            similarity[row], positions[row] = ordered[0][0, :k], ordered[1][0, :k]
        return similarity, positions

    def vector(self, position: int) -> np.ndarray:
        """The (D,) float32 vector that stands for the row whose id is `ids[position]`."""
        return self._codec.rotation.undo(self._signs.reconstruct(position)[None])[0]

    def to_bytes(self) -> bytes:
        """The index in FAISS's own file format; equal codes and ids give equal bytes."""
        return import_faiss().serialize_index(self._index).tobytes()


StoredIndex = VectorIndex | SignIndex
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
