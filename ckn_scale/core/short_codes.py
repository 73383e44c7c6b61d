"""Short codes of vectors in memory: a scan of all of them, or of some lists, makes the shortlist of a search.

A vector is cut into up to 256 pieces, each kept as the number of the nearest of 16 centroids: 128 bytes for
32,768 numbers, which FAISS scans 4 bits at a time (fast-scan). The pieces are of the vector as it is: a
rotation before the cut, or a projection, costs more recall than twice the bytes bring (benchmarks/README.md).
For tens of millions of rows the codes lie in lists (`coarse_lists.py`): a query looks at the nearest only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ckn_scale.core.coarse_lists import choose_codec, open_lists
from ckn_scale.core.faiss_library import import_faiss
from ckn_scale.core.kmeans import cluster
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.topk import RowMask
from ckn_scale.core.vector_index import MOST_DROPPED, StoredIndex, as_matrix

# FAISS sums the pieces in 16 bits. With more than 256 of them the sum of a very good match overflows, and
# the best rows are lost.
MAX_PIECES = 256
NUMBERS_PER_PIECE = 4  # at least
CENTROIDS = 16
ITERATIONS = 15
BLOCK_ROWS = 16  # codes are made in padded blocks of this size, so that a row does not depend on its company


@dataclass(frozen=True)
class Quantiser:
    """Centroids (pieces, 16, numbers) of the pieces, and codes of those of the lists, as `learn_lists` gives
    them; there may be none."""

    dim: int
    centroids: np.ndarray
    coarse: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.uint8))

    @property
    def code_bytes(self) -> int:
        return len(self.centroids) // 2

    @property
    def num_lists(self) -> int:
        return len(self.coarse)

    def encode(self, rows: np.ndarray, device: str = "cpu") -> np.ndarray:
        """(N, dim) → (N, code_bytes) uint8, two pieces a byte."""
        rows = as_matrix(rows, self.dim)
        centroids = torch.from_numpy(self.centroids).to(device)
        half_squares = centroids.square().sum(dim=2)[:, None] / 2  # (pieces, 1, 16)
        codes = np.empty((len(rows), self.code_bytes), np.uint8)
        for start in range(0, len(rows), BLOCK_ROWS):
            block = np.zeros((BLOCK_ROWS, self._padded_dim), np.float32)
            taken = rows[start : start + BLOCK_ROWS]
            block[: len(taken), : self.dim] = taken
            pieces = torch.from_numpy(block).to(device).view(BLOCK_ROWS, *self._shape).transpose(0, 1)
            nearest = (pieces @ centroids.transpose(1, 2) - half_squares).argmax(dim=2)  # (pieces, rows)
            numbers = nearest.T[: len(taken)].to(torch.uint8).cpu().numpy()
            codes[start : start + len(taken)] = numbers[:, ::2] | numbers[:, 1::2] << 4
        return codes

    def assign(self, rows: np.ndarray) -> np.ndarray:
        """(N, dim) → (N,) int32: the list of each row; 0 when there is one list only."""
        if not self.num_lists:
            return np.zeros(len(rows), np.int32)
        return self.rank_lists(rows, 1)[:, 0].astype(np.int32)

    def rank_lists(self, rows: np.ndarray, count: int) -> np.ndarray:
        """(N, dim) → (N, count) int64: the nearest lists of each row, ties by number."""
        return self._lists.search(rows, count)[1]

    @cached_property
    def _lists(self) -> StoredIndex:
        return open_lists(self.coarse, self.dim)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.centroids.shape[0], self.centroids.shape[2]

    @property
    def _padded_dim(self) -> int:
        return int(self.centroids.shape[0] * self.centroids.shape[2])

    @cached_property
    def faiss(self) -> Any:
        """An empty `faiss.IndexIVFPQ` with these centroids, and a list that all rows are in without lists."""
        faiss, (pieces, _) = import_faiss(), self._shape
        lists = faiss.IndexFlatIP(self._padded_dim)  # never asked: which lists are looked at is said
        index = faiss.IndexIVFPQ(
            lists, self._padded_dim, max(1, self.num_lists), pieces, 4, faiss.METRIC_INNER_PRODUCT
        )
        index.by_residual = False
        faiss.copy_array_to_vector(self.centroids.ravel(), index.pq.centroids)
        index.is_trained = True
        return index

    def to_part(self) -> ModelPart:
        """Its arrays by name; the sizes as metadata."""
        arrays = {"centroids": self.centroids, "coarse": self.coarse}
        return ModelPart(arrays, {"dim": self.dim, "pieces": len(self.centroids), "lists": self.num_lists})

    @classmethod
    def from_part(cls, part: ModelPart) -> Quantiser:
        """What `to_part` gave; ValueError when the shapes do not fit together."""
        dim, centroids, coarse = int(part.metadata["dim"]), part.arrays["centroids"], part.arrays["coarse"]
        pieces, of_each, width = centroids.shape
        if of_each != CENTROIDS or pieces % 2 or not dim <= pieces * width:
            raise ValueError(f"centroids {centroids.shape} are none of vectors of {dim} numbers")
        if len(coarse) and coarse.shape[1] != choose_codec(dim).code_bytes:
            raise ValueError(f"lists {coarse.shape} are none of vectors of {dim} numbers")
        return cls(dim, centroids, coarse)


def count_pieces(dim: int) -> int:
    """How many pieces a vector is cut into, an even number."""
    return max(2, min(MAX_PIECES, dim // NUMBERS_PER_PIECE // 2 * 2))


def learn_quantiser(
    vectors: np.ndarray, seed: int, *, coarse: np.ndarray | None = None, device: str = "cpu"
) -> Quantiser:
    """From (N, dim) vectors; `coarse` is what `learn_lists` gave, None: no lists.

    Fewer than 16 vectors are repeated: their codes are exact. On `device` the clusters are found.
    """
    if not len(vectors):
        raise ValueError("a quantiser is learned from vectors, got none")
    dim = vectors.shape[1]
    pieces = count_pieces(dim)
    width = -(-dim // pieces)
    padded = np.asarray(vectors, np.float32)
    if pieces * width > dim:
        padded = np.pad(padded, ((0, 0), (0, pieces * width - dim)))
    if len(padded) < CENTROIDS:
        padded = np.tile(padded, (-(-CENTROIDS // len(padded)), 1))
    parts = torch.from_numpy(padded).view(-1, pieces, width)
    learned = [
        cluster(parts[:, one].contiguous().to(device), CENTROIDS, iterations=ITERATIONS, seed=seed)
        for one in range(pieces)
    ]
    centroids = torch.stack(learned).cpu().numpy()
    return Quantiser(dim, centroids) if coarse is None else Quantiser(dim, centroids, coarse)


class CodeScan:
    """The short codes of all rows of a group, in memory; rows are known by their position."""

    def __init__(
        self, quantiser: Quantiser, codes: Sequence[np.ndarray], lists: Sequence[np.ndarray], probes: int
    ) -> None:
        """`codes` (N_i, code_bytes) and `lists` (N_i,) of each shard; `probes` lists are looked at."""
        faiss = import_faiss()
        self.quantiser = quantiser
        self.rows = sum(len(part) for part in codes)
        self.num_lists = max(1, quantiser.num_lists)
        self.probes = min(max(1, probes), self.num_lists)
        plain = faiss.clone_index(quantiser.faiss)
        _fill_lists(plain, codes, lists)
        self._index = faiss.IndexIVFPQFastScan(plain)

    @staticmethod
    def predict_memory(rows: int, code_bytes: int, lists: int) -> int:
        """Bytes that opening so many rows takes at its peak: as they come, packed, and one list under way."""
        return rows * (2 * (code_bytes + 8) + code_bytes // max(1, lists))

    def score(
        self, queries: np.ndarray, count: int, allowed: RowMask | None = None, *, everywhere: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """(Q, dim) → the `count` best by code: scores (Q, count) descending, positions (Q, count) or −1.

        `everywhere`: all lists are looked at. The score of a pair depends on the pair alone.
        """
        faiss = import_faiss()
        probes = self.num_lists if everywhere or allowed is not None else self.probes
        parameters = faiss.IVFSearchParameters(nprobe=probes)
        if allowed is not None:
            parameters.sel = allowed.selector
        if probes == self.num_lists:
            near = np.tile(np.arange(probes), (len(queries), 1))
        else:
            near = self.quantiser.rank_lists(queries, probes)
        near = np.ascontiguousarray(near, np.int64)
        padded = np.zeros((len(queries), self._index.d), np.float32)
        padded[:, : queries.shape[1]] = queries
        scores = np.empty((len(queries), count), np.float32)
        positions = np.empty((len(queries), count), np.int64)
        # FAISS's Python form takes no parameters.
        arrays = (padded, near, np.zeros(near.shape, np.float32), scores, positions)
        asked, lists, unused, *found = (faiss.swig_ptr(one) for one in arrays)
        self._index.search_preassigned_c(len(queries), asked, count, lists, unused, *found, False, parameters)
        return scores, positions

    def shortlist(
        self, queries: np.ndarray, depth: int, fewest: int, allowed: RowMask | None = None
    ) -> list[np.ndarray]:
        """About the `depth` best rows for each of (Q, dim) queries, at least `fewest`: ascending positions.

        They are those whose score is above that of the row after them: of rows that tie there all or
        none, so the shortlist depends on the query and the rows alone. With a mask, on those allowed.
        """
        count = self.rows if allowed is None else allowed.count
        if count <= depth:
            return [self._list_rows(allowed)] * len(queries)
        dropped = self.rows - count
        if allowed is None or dropped > MOST_DROPPED:
            scores, positions = self.score(queries, depth + 1, allowed)
        else:  # with few rows to leave out, these are found and dropped: a selector doubles the time
            scores, positions = self.score(queries, depth + 1 + dropped)
        found = [_cut(one, where, depth, allowed) for one, where in zip(scores, positions, strict=True)]
        return [
            one if len(one) >= fewest else self._look_deeper(query, 2 * depth, fewest, allowed)
            for query, one in zip(queries, found, strict=True)
        ]

    def _look_deeper(self, query: np.ndarray, depth: int, fewest: int, allowed: RowMask | None) -> np.ndarray:
        """More rows than the depth tie, or the nearest lists hold too few: all of them are looked at."""
        while depth < (self.rows if allowed is None else allowed.count):
            scores, positions = self.score(query[None], depth + 1, allowed, everywhere=True)
            found = _cut(scores[0], positions[0], depth, allowed)
            if len(found) >= fewest:
                return found
            depth *= 2
        return self._list_rows(allowed)

    def _list_rows(self, allowed: RowMask | None) -> np.ndarray:
        return np.arange(self.rows) if allowed is None else np.flatnonzero(allowed.mask)


def _cut(scores: np.ndarray, positions: np.ndarray, depth: int, allowed: RowMask | None) -> np.ndarray:
    """Positions of the rows above the one at `depth`, ascending; of all where fewer were found."""
    real = positions >= 0
    if allowed is not None:
        real &= allowed.mask[positions]
    scores, positions = scores[real], positions[real]
    if len(scores) > depth:
        positions = positions[scores > scores[depth]]
    return np.sort(positions)


def _fill_lists(index: Any, codes: Sequence[np.ndarray], lists: Sequence[np.ndarray]) -> None:
    """Rows into their lists, in the order of their positions; lists get their size first, not bit by bit."""
    faiss, offset = import_faiss(), 0
    sizes = sum((np.bincount(one, minlength=index.nlist) for one in lists), np.zeros(index.nlist, np.int64))
    for owner, size in enumerate(sizes.tolist()):
        index.invlists.resize(owner, size)
    filled = np.zeros(index.nlist, np.int64)
    for part, owners in zip(codes, lists, strict=True):
        order, counts = np.argsort(owners, kind="stable"), np.bincount(owners, minlength=index.nlist)
        bounds = np.concatenate([[0], np.cumsum(counts)])
        for owner in np.flatnonzero(counts).tolist():
            rows = order[bounds[owner] : bounds[owner + 1]]
            held = np.ascontiguousarray(part if len(rows) == len(part) else part[rows])
            ids = (rows + offset).astype(np.int64)
            index.invlists.update_entries(
                owner, int(filled[owner]), len(rows), faiss.swig_ptr(ids), faiss.swig_ptr(held)
            )
        filled += counts
        offset += len(part)
    index.ntotal = offset
