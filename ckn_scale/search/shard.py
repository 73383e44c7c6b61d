"""A group of index shards on this machine: search their vectors, look up what an id names."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ckn_scale.core.faiss_library import faiss_threads, import_faiss
from ckn_scale.core.sampling import hash_priorities, smallest
from ckn_scale.core.topk import NO_ID, RowMask, as_row_mask, find_topk
from ckn_scale.core.vector_index import StoredIndex, rank_rows, wrap_index
from ckn_scale.errors import CorruptData
from ckn_scale.search.cache import FileCache
from ckn_scale.search.filters import Filter
from ckn_scale.search.hits import Hit as Hit
from ckn_scale.search.hits import IndexedImage
from ckn_scale.search.hits import Verified as Verified
from ckn_scale.search.shortlist import Shortlist, open_codes
from ckn_scale.search.thumbnails import Thumbnails
from ckn_scale.storage.index_files import SIDE_COLUMNS, IndexManifest, IndexShard, open_side_table, read_ids
from ckn_scale.storage.point_files import PointFile
from ckn_scale.storage.store import Store

DRAW_SEED = 16
FILTERS_KEPT = 8  # a bit more than a byte a row each
# For each shard a (rows,) bool mask, or what `ShardGroup.allow` made of a filter; None: all of its rows.
Allowed: TypeAlias = Sequence[np.ndarray | RowMask | None]


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
        gone = read_ids(store, manifest.tombstones)
        self.shards = [OpenShard(store, shard, manifest, cache, gone) for shard in held]
        self._starts = np.cumsum([0, *(shard.index.rows for shard in self.shards)])
        self._thumbnails = Thumbnails(store, cache)
        self._shortlist: Shortlist | None = None
        if manifest.short_codes is not None and held:
            scan = open_codes(store, manifest, manifest.short_codes, held, cache)
            self._shortlist = Shortlist(scan, self.shards, manifest.short_codes.depth)
        self._allow = lru_cache(FILTERS_KEPT)(self._evaluate)

    def allow(self, wanted: Filter) -> Allowed:
        """What a filter admits, for `find` and `search`; that of the last few filters is kept.

        InputError when a column or value does not fit the index.
        """
        return self._allow(wanted)

    def _evaluate(self, wanted: Filter) -> Allowed:
        masks = [wanted.evaluate(shard.table) for shard in self.shards]
        alive = [None if shard.alive is None else shard.alive.mask for shard in self.shards]
        return [
            RowMask(mask if there is None else mask & there) for mask, there in zip(masks, alive, strict=True)
        ]

    @property
    def rows(self) -> int:
        """How many images can be found."""
        return sum(shard.rows for shard in self.shards)

    @property
    def has_points(self) -> bool:
        """Whether the points of all its images are there: answers can be verified."""
        return all(shard.points is not None for shard in self.shards)

    def locate(self, image_ids: np.ndarray) -> list[tuple[OpenShard, np.ndarray, np.ndarray]]:
        """Shards that hold some of the ids, all of this group: each with their places there, and its rows."""
        owner = np.searchsorted(self._first_ids, image_ids, side="right") - 1
        found = []
        for number in np.unique(owner).tolist():
            places = np.flatnonzero(owner == number)
            shard = self.shards[number]
            found.append((shard, places, np.searchsorted(shard.index.ids, image_ids[places])))
        return found

    def vector(self, image_id: int) -> np.ndarray | None:
        """The (D,) vector of an image; None when it is not in this group."""
        found = self._find(image_id)
        return None if found is None else found[0].index.vector(found[1])

    def compare(self, vector: np.ndarray, image_ids: np.ndarray) -> np.ndarray:
        """(D,) vector, (N,) ids of this group → (N,) float32: their similarities, as a search gives them."""
        scores = np.empty(len(image_ids), np.float32)
        for shard, places, rows in self.locate(image_ids):
            order = np.argsort(rows)
            prepared = shard.index.prepare(vector[None])
            values, found = rank_rows(prepared, [(shard.index, rows[order])], len(rows))
            scores[places[order[found]]] = values
        return scores

    def search(self, vectors: np.ndarray, k: int, *, allowed: Allowed | None = None) -> list[list[Hit]]:
        """The k most similar images of this group for each of (Q, D) vectors, best first, ties by id."""
        similarity, image_ids = self.find(vectors, k, allowed=allowed)
        return [self.describe(ids, scores) for ids, scores in zip(image_ids, similarity, strict=True)]

    def find(
        self, vectors: np.ndarray, k: int, *, allowed: Allowed | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(Q, D) vectors → similarity (Q, k') float32, ids (Q, k') int64, k' ≤ k, best first, ties by id.

        `allowed` has a mask for each of `shards`; deleted images are never found.
        """
        if k < 1:
            raise ValueError(f"k must be ≥ 1, got {k}")
        masks = [None] * len(self.shards) if allowed is None else allowed
        if not self.shards:
            return np.empty((len(vectors), 0), np.float32), np.empty((len(vectors), 0), np.int64)
        living = [shard.without_deleted(mask) for shard, mask in zip(self.shards, masks, strict=True)]
        if self._shortlist is not None:
            return self._shortlist.find(vectors, k, living, self.threads)
        prepared = self.shards[0].index.prepare(vectors)
        indexes = [shard.index for shard in self.shards]
        allowed_rows = [as_row_mask(mask, one.rows) for one, mask in zip(indexes, living, strict=True)]
        with faiss_threads(self.threads):
            similarity, places = find_topk(list(zip(indexes, allowed_rows, strict=True)), prepared, k)
        return similarity, self._ids_at(places)

    def _ids_at(self, places: np.ndarray) -> np.ndarray:
        """Ids of rows by their places among those of all shards."""
        ids = np.empty(places.shape, np.int64)
        owners = np.searchsorted(self._starts, places, side="right") - 1
        for number in np.unique(owners).tolist():
            held = owners == number
            ids[held] = self.shards[number].index.ids[places[held] - self._starts[number]]
        return ids

    def describe(self, image_ids: np.ndarray, scores: np.ndarray) -> list[Hit]:
        """(N,) ids of this group and their scores → hits, in this order."""
        pairs = zip(image_ids.tolist(), scores.tolist(), strict=True)
        return [self._make_hit(image_id, score) for image_id, score in pairs if image_id != NO_ID]

    def look_up(self, image_id: int) -> IndexedImage | None:
        """What is known of an image; None when it is not in this group, or deleted."""
        found = self._find(image_id)
        if found is None:
            return None
        shard, position = found
        hit = shard.describe(position, image_id, 0.0)
        return IndexedImage(image_id, hit.uri, hit.columns, shard.size_px(position))

    def is_deleted(self, image_id: int) -> bool:
        """Whether a shard still has the image's row, which no answer shows."""
        place = bisect_right(self._first_ids, image_id) - 1
        return place >= 0 and self.shards[place].holds_deleted(image_id)

    def draw(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(N,) priorities, ascending, and (N,) ids of at most `count` images: the same however they lie."""
        ids = np.concatenate([np.empty(0, np.int64), *(shard.living_ids for shard in self.shards)])
        priorities = hash_priorities(DRAW_SEED, ids)
        chosen = smallest(priorities, count)
        return priorities[chosen], ids[chosen]

    def thumbnail(self, image_id: int) -> bytes | None:
        """The image's JPEG thumbnail; None when it has none or is not in this group."""
        return None if self._find(image_id) is None else self._thumbnails.read(image_id)

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


def open_shards_of(store: Store, manifest: IndexManifest, image_ids: Sequence[int]) -> ShardGroup:
    """The shards that may hold these images, and no others."""
    ids = np.unique(np.asarray(image_ids, np.int64))
    holding = [
        shard.shard
        for shard in manifest.shards
        if np.searchsorted(ids, shard.first_id) < np.searchsorted(ids, shard.last_id, side="right")
    ]
    return ShardGroup(store, manifest, holding)


def merge_hits(groups: Sequence[Sequence[Hit]], k: int) -> list[Hit]:
    """The k best hits of several groups' answers to one query; equal scores by ascending id."""
    every = [hit for hits in groups for hit in hits]
    return sorted(every, key=lambda hit: (-hit.score, hit.image_id))[:k]


class OpenShard:
    """The index of one shard, and its side table with the same rows."""

    def __init__(
        self,
        store: Store,
        shard: IndexShard,
        manifest: IndexManifest,
        cache: FileCache,
        deleted: np.ndarray,
    ) -> None:
        self.index = map_index(cache.fetch(store, shard.index), manifest.kind, manifest.dim)
        self.table = open_side_table(cache.fetch(store, shard.table))
        self._columns = [name for name in self.table.column_names if name not in SIDE_COLUMNS.names]
        ids = self.table.column("image_id").to_numpy()
        as_recorded = len(ids) == shard.rows and (ids[0], ids[-1]) == (shard.first_id, shard.last_id)
        if self.index.dim != manifest.dim or not as_recorded or not np.array_equal(self.index.ids, ids):
            raise CorruptData(f"{shard.index.path} and {shard.table.path} do not hold the same images")
        self.points = None if shard.points is None else PointFile(cache.fetch(store, shard.points))
        if self.points is not None and not np.array_equal(self.points.ids, ids):
            raise CorruptData(f"{shard.table.path} and {shard.points} do not hold the same images")
        alive = np.isin(ids, deleted, assume_unique=True, invert=True)
        self.rows = int(np.count_nonzero(alive))
        self.alive = None if self.rows == len(ids) else RowMask(alive)

    @property
    def living_ids(self) -> np.ndarray:
        """Of the images that can be found."""
        ids: np.ndarray = self.index.ids
        return ids if self.alive is None else ids[self.alive.mask]

    def without_deleted(self, allowed: np.ndarray | RowMask | None) -> np.ndarray | RowMask | None:
        """A mask of this shard's rows without images that are deleted (a RowMask is without them already)."""
        if self.alive is None or isinstance(allowed, RowMask):
            return allowed
        return self.alive if allowed is None else allowed & self.alive.mask

    @property
    def living(self) -> np.ndarray:
        """For each row of the index, whether answers may hold it."""
        return np.ones(self.index.rows, bool) if self.alive is None else self.alive.mask

    def position(self, image_id: int) -> int | None:
        """Where the image is; None when it is not here, or deleted."""
        position = self._row_of(image_id)
        return None if position is None or self._is_dead(position) else position

    def holds_deleted(self, image_id: int) -> bool:
        position = self._row_of(image_id)
        return position is not None and self._is_dead(position)

    def _row_of(self, image_id: int) -> int | None:
        ids = self.index.ids
        position = int(np.searchsorted(ids, image_id))
        return position if position < len(ids) and ids[position] == image_id else None

    def _is_dead(self, position: int) -> bool:
        return self.alive is not None and not self.alive.mask[position]

    def size_px(self, position: int) -> tuple[int, int] | None:
        """Width and height of the upright original, where points were kept with it."""
        if self.points is None:
            return None
        width, height = self.points.sizes_px([position])[0, 2:].tolist()
        return (width, height) if width and height else None

    def describe(self, position: int, image_id: int, score: float) -> Hit:
        columns = {name: self.table.column(name)[position].as_py() for name in self._columns}
        return Hit(image_id, self.table.column("uri")[position].as_py(), score, columns)


def map_index(path: Path, kind: str, dim: int) -> StoredIndex:
    """An index from a local file, memory-mapped."""
    faiss = import_faiss()
    # IO_FLAG_MMAP alone would still copy flat vectors into memory.
    return wrap_index(faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC), kind, dim)
