"""The shortlist of a group of index shards: codes of all rows in memory, then rows from the mapped files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ckn_scale.core.faiss_library import faiss_threads
from ckn_scale.core.topk import RowMask
from ckn_scale.core.vector_index import rank_rows
from ckn_scale.errors import CorruptData
from ckn_scale.search.cache import FileCache
from ckn_scale.storage.index_files import IndexManifest, IndexShard, ShortCodes, open_short_codes
from ckn_scale.storage.models import load_model
from ckn_scale.storage.store import Store

if TYPE_CHECKING:
    from ckn_scale.core.short_codes import CodeScan, Quantiser
    from ckn_scale.search.shard import OpenShard

QUANTISER = "quantiser"  # its name as a model
FIXED_BYTES = 14 * 2**20  # quantiser, libraries
ID_BYTES = 3 * 8  # of a row: FAISS's, the shard's and the group's


def predict_memory(rows: int, code_bytes: int, lists: int = 0) -> int:
    """Bytes of memory that opening so many rows with short codes takes, at its peak; files are mapped."""
    from ckn_scale.core.short_codes import CodeScan

    return FIXED_BYTES + rows * ID_BYTES + CodeScan.predict_memory(rows, code_bytes, lists)


class Shortlist:
    """Answers of a group of shards: the best by code, compared by what the index keeps of them."""

    def __init__(
        self,
        scan: CodeScan,
        shards: Sequence[OpenShard],
        depth: int,
    ) -> None:
        self._scan, self._shards, self._depth = scan, shards, depth
        self._starts = np.cumsum([0, *(shard.index.rows for shard in shards)])
        self._ids = np.concatenate([shard.index.ids for shard in shards])

    def find(
        self, vectors: np.ndarray, k: int, masks: Sequence[np.ndarray | RowMask | None], threads: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """(Q, D) → similarity (Q, k'), ids (Q, k'), k' = min(k, rows allowed), best first, ties by id."""
        allowed = self._join(masks)
        k = min(k, self._scan.rows if allowed is None else allowed.count)
        if k == 0 or len(vectors) == 0:
            return np.empty((len(vectors), k), np.float32), np.empty((len(vectors), k), np.int64)
        with faiss_threads(threads):
            chosen = self._scan.shortlist(vectors, max(k, self._depth), k, allowed)
            prepared = self._shards[0].index.prepare(vectors)
            answers = [
                self._rank(query, rows, k) for query, rows in zip(prepared[:, None], chosen, strict=True)
            ]
        return np.stack([scores for scores, _ in answers]), np.stack([ids for _, ids in answers])

    def _rank(self, query: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        bounds = np.searchsorted(rows, self._starts)
        parts = [
            (shard.index, rows[bounds[place] : bounds[place + 1]] - self._starts[place])
            for place, shard in enumerate(self._shards)
            if bounds[place] < bounds[place + 1]
        ]
        similarity, places = rank_rows(query, parts, k)
        return similarity, self._ids[rows[places]]  # which ascend with the places

    def _join(self, masks: Sequence[np.ndarray | RowMask | None]) -> RowMask | None:
        """The masks of all shards as one."""
        if all(mask is None for mask in masks):
            return None
        parts = []
        for shard, mask in zip(self._shards, masks, strict=True):
            if mask is None:
                parts.append(np.ones(shard.index.rows, bool))
            else:
                parts.append(mask.mask if isinstance(mask, RowMask) else mask)
        return RowMask(np.concatenate(parts))


def open_codes(
    store: Store, manifest: IndexManifest, spec: ShortCodes, shards: Sequence[IndexShard], cache: FileCache
) -> CodeScan:
    """The short codes of these shards, in memory."""
    from ckn_scale.core.short_codes import CodeScan

    quantiser = load_quantiser(store, manifest, spec)
    parts = [
        open_short_codes(cache.fetch(store, shard.codes), shard.rows, quantiser.code_bytes)
        for shard in shards
        if shard.codes is not None
    ]
    return CodeScan(quantiser, [codes for codes, _ in parts], [lists for _, lists in parts], spec.probes)


def load_quantiser(store: Store, manifest: IndexManifest, spec: ShortCodes) -> Quantiser:
    """What a manifest's short codes are made with; CorruptData when it is for other vectors."""
    from ckn_scale.core.short_codes import Quantiser

    try:
        quantiser = Quantiser.from_part(load_model(store, QUANTISER, spec.quantiser))
    except ValueError as error:
        raise CorruptData(f"{spec.quantiser.path}: {error}") from error
    if quantiser.dim != manifest.dim:
        raise CorruptData(
            f"{spec.quantiser.path} is for vectors of {quantiser.dim} numbers, the index has {manifest.dim}"
        )
    return quantiser
