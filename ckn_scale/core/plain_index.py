"""Indexes of shards joined into one that plain FAISS opens and searches, without anything of ours.

An exact index becomes an `IndexFlatIP`. One of signs keeps its codes where the rotation before them can go
along: FAISS knows this rotation as a matrix only, which for 32,768 numbers takes 4 GB. Where the matrix is
too large for what is indexed, the vectors that the codes stand for are kept in two bytes a number: the same
images come first, but queries are not rounded to 8 bits there, so scores differ in the fourth digit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ckn_scale.core.faiss_library import import_faiss
from ckn_scale.core.rotation import Rotation
from ckn_scale.core.vector_codes import SignCodec, empty_sign_index
from ckn_scale.core.vector_index import QUERY_BITS, SignIndex, StoredIndex

BLOCK_BYTES = 32 * 2**20  # of float32 vectors, which lie in memory together
SMALL_MATRIX_BYTES = 256 * 2**20  # goes along however few images there are: 8,192 numbers


def join_indexes(
    parts: Sequence[StoredIndex], kind: str, dim: int, on_rows: Callable[[int], None] = lambda rows: None
) -> Any:
    """One `faiss.Index` with the ids of all parts, for (Q, dim) float32 queries; larger is more similar.

    It lies in memory as a whole. `on_rows` is told how many rows are in it.
    """
    faiss = import_faiss()
    rows = sum(part.rows for part in parts)
    if kind == "signs" and 4 * dim * Rotation(dim).padded_dim <= max(SMALL_MATRIX_BYTES, 2 * dim * rows):
        return _join_codes(parts, dim, on_rows)
    if kind == "signs":
        half, metric = faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
        joined = faiss.IndexIDMap(faiss.IndexScalarQuantizer(dim, half, metric))
    else:
        joined = faiss.IndexIDMap(faiss.IndexFlatIP(dim))
    for part in parts:
        for positions, vectors in read_blocks(part):
            joined.add_with_ids(vectors, part.ids[positions])
            on_rows(joined.ntotal)
    return joined


def read_blocks(index: StoredIndex) -> Iterator[tuple[slice, np.ndarray]]:
    """All rows of an index in order, some at a time: where they are, and their (N, D) float32 vectors."""
    step = max(1, BLOCK_BYTES // (4 * index.dim))
    for start in range(0, index.rows, step):
        rows = slice(start, min(start + step, index.rows))
        yield rows, index.vectors_at(np.arange(rows.start, rows.stop))


def describe_index(index: Any) -> str:
    """The classes of an index from the outside in: `IndexIDMap of IndexFlatIP`."""
    faiss = import_faiss()
    names: list[str] = []
    inner = index
    while True:
        inner = faiss.downcast_index(inner)
        names.append(type(inner).__name__)
        if not isinstance(inner, faiss.IndexPreTransform | faiss.IndexIDMap):
            return " of ".join(names)
        inner = inner.index


def _join_codes(parts: Sequence[StoredIndex], dim: int, on_rows: Callable[[int], None]) -> Any:
    faiss = import_faiss()
    rotation = SignCodec(dim).rotation
    signs = empty_sign_index(rotation.padded_dim)
    signs.qb = QUERY_BITS
    named = faiss.IndexIDMap(signs)
    for part in parts:
        assert isinstance(part, SignIndex)
        signs.add_sa_codes(part.codes)
        on_rows(signs.ntotal)
    ids = np.concatenate([part.ids for part in parts]) if parts else np.empty(0, np.int64)
    faiss.copy_array_to_vector(ids, named.id_map)
    named.ntotal = signs.ntotal
    return faiss.IndexPreTransform(_as_matrix(rotation), named)


def _as_matrix(rotation: Rotation) -> Any:
    """The rotation as FAISS multiplies with it: (padded_dim, dim), made some columns at a time."""
    faiss = import_faiss()
    matrix = np.empty((rotation.padded_dim, rotation.dim), np.float32)
    step = max(1, BLOCK_BYTES // (4 * rotation.dim))
    for start in range(0, rotation.dim, step):
        stop = min(start + step, rotation.dim)
        units = np.zeros((stop - start, rotation.dim), np.float32)
        units[np.arange(stop - start), np.arange(start, stop)] = 1
        matrix[:, start:stop] = rotation.apply(units).T
    transform = faiss.LinearTransform(rotation.dim, rotation.padded_dim, False)
    faiss.copy_array_to_vector(matrix.ravel(), transform.A)
    transform.is_trained = True
    return transform
