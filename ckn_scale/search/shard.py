"""A group of index shards on this machine: search their vectors, look up what an id names."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ckn_scale.core.numerics import import_faiss
from ckn_scale.core.vector_index import NO_ID, StoredIndex, merge_topk, wrap_index
from ckn_scale.errors import CorruptData
from ckn_scale.search.cache import FileCache
from ckn_scale.storage.index_files import SIDE_COLUMNS, IndexManifest, IndexShard, open_side_table
from ckn_scale.storage.store import Store


@dataclass(frozen=True)
class Hit:
    """One indexed image in an answer; a larger score is more similar."""

    image_id: int
    uri: str
    score: float
    columns: dict[str, Any] = field(default_factory=dict)  # what the user kept beside the image

    def __repr__(self) -> str:
        kept = f", columns={self.columns!r}" if self.columns else ""
        return f"Hit(score={self.score:.4f}, uri={self.uri!r}, image_id={self.image_id}{kept})"


class ShardGroup:
    """Shards of one published version, memory-mapped, searched one after the other.

    Every file is checked against the manifest before it is opened. `shards` are those that have rows, in
    the order of their ids.
    """

    def __init__(
        self,
        store: Store,
        manifest: IndexManifest,
        shard_ids: Sequence[int] | None = None,
        *,
        threads: int = 1,
        cache: FileCache | None = None,
    ) -> None:
        wanted = {shard.shard for shard in manifest.shards} if shard_ids is None else set(shard_ids)
        unknown = wanted - {shard.shard for shard in manifest.shards}
        if unknown:
            raise ValueError(f"build {manifest.build} has no shards {sorted(unknown)}")
        cache = cache or FileCache()
        self.dim = manifest.dim
        self.threads = threads
        held = [shard for shard in manifest.shards if shard.shard in wanted and shard.rows]
        held.sort(key=lambda shard: shard.first_id)
        self._first_ids = [shard.first_id for shard in held]
        self.shards = [OpenShard(store, shard, manifest, cache) for shard in held]

    @property
    def rows(self) -> int:
        return sum(shard.index.rows for shard in self.shards)

    def vector(self, image_id: int) -> np.ndarray | None:
        """The (D,) vector of an image; None when it is not in this group."""
        found = self._find(image_id)
        return None if found is None else found[0].index.vector(found[1])

    def search(self, vectors: np.ndarray, k: int) -> list[list[Hit]]:
        """The k most similar images of this group for each of (Q, D) vectors, best first, ties by id."""
        if k < 1:
            raise ValueError(f"k must be ≥ 1, got {k}")
        if not self.shards:
            return [[] for _ in vectors]
        found = [shard.index.search(vectors, k, threads=self.threads) for shard in self.shards]
        values, found_ids = [value for value, _ in found], [index for _, index in found]
        similarity, image_ids = merge_topk(values, found_ids, k, larger_is_better=True)
        return [
            [
                self._make_hit(image_id, score)
                for image_id, score in zip(ids.tolist(), scores.tolist(), strict=True)
                if image_id != NO_ID
            ]
            for scores, ids in zip(similarity, image_ids, strict=True)
        ]

    def thumbnail(self, image_id: int) -> bytes | None:
        """The image's JPEG thumbnail; None when it has none or is not in this group."""
        found = self._find(image_id)
        return None if found is None else found[0].table.column("thumbnail")[found[1]].as_py()

    def _find(self, image_id: int) -> tuple[OpenShard, int] | None:
        """The shard whose range of ids holds the image, and its position there."""
        place = bisect_right(self._first_ids, image_id) - 1
        if place < 0:
            return None
        position = self.shards[place].position(image_id)
        return None if position is None else (self.shards[place], position)

    def _make_hit(self, image_id: int, score: float) -> Hit:
        found = self._find(image_id)
        if found is None:
            raise CorruptData(f"image {image_id} is in the index, but in no side table")
        return found[0].describe(found[1], image_id, score)


def merge_hits(groups: Sequence[Sequence[Hit]], k: int) -> list[Hit]:
    """The k best hits of several groups' answers to one query; equal scores by ascending id."""
    every = [hit for hits in groups for hit in hits]
    return sorted(every, key=lambda hit: (-hit.score, hit.image_id))[:k]


class OpenShard:
    """The index of one shard, and its side table with the same rows."""

    def __init__(self, store: Store, shard: IndexShard, manifest: IndexManifest, cache: FileCache) -> None:
        self.index = _map_index(cache.fetch(store, shard.index), manifest.kind, manifest.dim)
        self.table = open_side_table(cache.fetch(store, shard.table))
        self._columns = [name for name in self.table.column_names if name not in SIDE_COLUMNS.names]
        ids = self.table.column("image_id").to_numpy()
        as_recorded = len(ids) == shard.rows and (ids[0], ids[-1]) == (shard.first_id, shard.last_id)
        if self.index.dim != manifest.dim or not as_recorded or not np.array_equal(self.index.ids, ids):
            raise CorruptData(f"{shard.index.path} and {shard.table.path} do not hold the same images")

    def position(self, image_id: int) -> int | None:
        ids = self.index.ids
        position = int(np.searchsorted(ids, image_id))
        return position if position < len(ids) and ids[position] == image_id else None

    def describe(self, position: int, image_id: int, score: float) -> Hit:
        columns = {name: self.table.column(name)[position].as_py() for name in self._columns}
        return Hit(image_id, self.table.column("uri")[position].as_py(), score, columns)


def _map_index(path: Path, kind: str, dim: int) -> StoredIndex:
    faiss = import_faiss()
    # IO_FLAG_MMAP alone would still copy flat vectors into memory.
    return wrap_index(faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC), kind, dim)
