"""Find copies: every image of a version against every other, two index shards at a time.

An image's copies are far more like it than the collection at large (as in `certify_index`), and, where the
run keeps points, one transform explains what both show. The collection at large is a few hundred images drawn
by hash from the run's first segments, so an append does not change what counts as a copy. A task is named by
what it compares: the files of its two index shards and what of them is deleted. So a rerun goes on where it
stopped, and after an append or a deletion only pairs with new or changed shards are compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement, pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from ckn_scale.core.copies import (
    COPY_DEVIATIONS,
    NEIGHBOURS,
    VERIFIED_DEVIATIONS,
    ScoredPairs,
    StoredRows,
    find_levels,
    find_pairs,
    restore_rows,
    take_rows,
)
from ckn_scale.core.evidence import verify_head
from ckn_scale.core.numerics import Arithmetic, find_arithmetic
from ckn_scale.core.sampling import hash_priorities
from ckn_scale.search.evidence import read_points, stored_query
from ckn_scale.search.shard import OpenShard, ShardGroup
from ckn_scale.step import ShardResult, Step, WorkerSettings
from ckn_scale.steps.augment_index import restore_built
from ckn_scale.storage.index_files import IndexManifest, IndexShard, read_ids, read_manifest
from ckn_scale.storage.plans import require_segments
from ckn_scale.storage.run_folder import COPIES_STAGE, DRAW_REFERENCES, FIND_COPIES, REFERENCES_STAGE
from ckn_scale.storage.stored_files import StoredFile, read_table

NUM_REFERENCES = 512  # that the collection at large is judged by
PAIRS = pa.schema(
    [
        ("first_id", pa.int64()),
        ("second_id", pa.int64()),
        ("score", pa.float64()),
        ("inliers", pa.int32()),  # null where the run keeps no points
        ("points", pa.int32()),  # of the image that has fewer of them; null likewise
        ("first_uri", pa.string()),
        ("second_uri", pa.string()),
        ("first_pixels", pa.int64()),  # 0 where the size is not known
        ("second_pixels", pa.int64()),
    ]
)


@dataclass(frozen=True, eq=False)
class _VersionStep(Step):
    """What goes over the index shards of one version."""

    manifest_file: StoredFile

    sections = ()  # what it reads is named by its content

    @cached_property
    def manifest(self) -> IndexManifest:
        """With the rows of images by themselves: what has neighbours in it is like them."""
        return restore_built(self.run, read_manifest(self.run.store, self.manifest_file))

    @cached_property
    def arithmetic(self) -> Arithmetic:
        """Whatever this process has: scores are counts of bits, or sums in double precision."""
        return find_arithmetic("cpu")

    def open_shard(self, shard: IndexShard) -> OpenShard:
        return ShardGroup(self.run.store, self.manifest, [shard.shard]).shards[0]

    @cached_property
    def shards(self) -> list[IndexShard]:
        """Those that have rows."""
        return [shard for shard in self.manifest.shards if shard.rows]


class DrawReferences(_VersionStep):
    """The collection at large: some images of the first segments, from each index shard that holds some."""

    name = DRAW_REFERENCES

    @cached_property
    def drawn(self) -> np.ndarray:
        """Sorted ids of planned images, whatever became of them: a draw that no later segment changes."""
        end = 0
        for segment in require_segments(self.run):
            end += segment.num_images
            if end >= 2 * NUM_REFERENCES:
                break
        if end <= NUM_REFERENCES:
            return np.arange(end)
        numbers = hash_priorities(0, np.arange(NUM_REFERENCES)) % np.uint64(end)
        return np.unique(numbers.astype(np.int64))

    @cached_property
    def _by_number(self) -> dict[int, IndexShard]:
        holding = [one for one in self.shards if len(self._drawn_in(one))]
        return {_number(one.index.sha256): one for one in holding}

    def _drawn_in(self, shard: IndexShard) -> np.ndarray:
        return self.drawn[slice(*np.searchsorted(self.drawn, (shard.first_id, shard.last_id + 1)))]

    def shard_ids(self) -> Sequence[int]:
        return list(self._by_number)

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        shard = self._by_number[shard_id]
        index = self.open_shard(shard).index
        rows = take_rows(index, np.flatnonzero(np.isin(index.ids, self._drawn_in(shard))))
        data = rows.data
        table = pa.table(
            [rows.ids, [row.tobytes() for row in data]],
            schema=pa.schema([("image_id", pa.int64()), ("row", pa.binary())], {"dtype": data.dtype.str}),
        )
        return ShardResult(tables={REFERENCES_STAGE: table})

    def read(self) -> tuple[StoredRows, str]:
        """What all shards drew, and a name for it."""
        commits = self.log.committed()
        tables = [
            read_table(self.run.store, commits[one].files[REFERENCES_STAGE]) for one in self.shard_ids()
        ]
        rows = [
            (image_id, np.frombuffer(row, table.schema.metadata[b"dtype"].decode()))
            for table in tables
            for image_id, row in zip(*(column.to_pylist() for column in table.columns), strict=True)
        ]
        rows.sort(key=lambda row: row[0])
        content = hashlib.sha256(
            b"".join(image_id.to_bytes(8, "big") + row.tobytes() for image_id, row in rows)
        )
        ids = np.array([image_id for image_id, _ in rows], np.int64)
        return restore_rows(ids, np.array([row for _, row in rows])), content.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class FindCopies(_VersionStep):
    """One task for two index shards, or for one with itself."""

    min_score: float | None = None  # that a copy has; none: what stands out from the collection at large

    name = FIND_COPIES
    version = 2

    @cached_property
    def references(self) -> tuple[StoredRows, str] | None:
        return None if self.min_score is not None else DrawReferences(self.run, self.manifest_file).read()

    @cached_property
    def label(self) -> str:
        """By all that its results depend on but the images, so that they never have to be refused."""
        rule = self.min_score if self.references is None else self.references[1]
        numbers = [self.version, NEIGHBOURS, self.deviations, rule]
        return f"{self.name}-{hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:16]}"

    @property
    def deviations(self) -> float:
        """By which a pair stands out. With points it may be less: what is no copy does not pass geometry."""
        has_points = all(shard.points is not None for shard in self.shards)
        return VERIFIED_DEVIATIONS if has_points else COPY_DEVIATIONS

    def inputs(self) -> Mapping[str, Any]:
        return {"label": self.label}

    @cached_property
    def pairs(self) -> dict[int, tuple[IndexShard, IndexShard]]:
        """The index shards of each task, by its number."""
        dead = read_ids(self.run.store, self.manifest.tombstones)
        content = {}
        for shard in self.shards:
            gone = dead[slice(*np.searchsorted(dead, (shard.first_id, shard.last_id + 1)))]
            files = [file.sha256 for file in (shard.index, shard.table, shard.points) if file is not None]
            content[shard.shard] = hashlib.sha256(f"{files} {gone.tolist()}".encode()).hexdigest()
        ordered = sorted(self.shards, key=lambda shard: shard.first_id)
        return {
            _number(content[one.shard] + content[other.shard]): (one, other)
            for one, other in combinations_with_replacement(ordered, 2)
        }

    def shard_ids(self) -> Sequence[int]:
        return list(self.pairs)

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        one, other = self.pairs[shard_id]
        first = self._take(one)
        second = first if one is other else self._take(other)
        pairs = find_pairs(first.rows, first.levels, second.rows, second.levels, NEIGHBOURS)
        return ShardResult(tables={COPIES_STAGE: _tabulate(pairs, first.shard, second.shard)})

    def _take(self, shard: IndexShard) -> _Side:
        """One index shard without what is deleted; the last two are kept."""
        side = self._sides.pop(shard.shard, None)
        if side is None:
            opened = self.open_shard(shard)
            positions = (
                np.arange(opened.index.rows) if opened.alive is None else opened.alive.mask.nonzero()[0]
            )
            rows = take_rows(opened.index, positions)
            levels = np.full(len(positions), self.min_score, np.float64)
            if self.references is not None:
                levels = find_levels(rows, self.references[0], self.deviations)
            side = _Side(opened, rows, levels)
        self._sides[shard.shard] = side
        if len(self._sides) > 2:
            del self._sides[next(iter(self._sides))]
        return side

    @cached_property
    def _sides(self) -> dict[int, _Side]:
        return {}


@dataclass(frozen=True)
class _Side:
    """One of the two index shards of a task."""

    shard: OpenShard
    rows: StoredRows
    levels: np.ndarray


def _tabulate(pairs: ScoredPairs, one: OpenShard, other: OpenShard) -> pa.Table:
    """The pairs with what geometry says of them, and what their images are called."""
    inliers, points = _verify(pairs, one, other)
    places = [
        np.searchsorted(shard.index.ids, ids) for shard, ids in ((one, pairs.first), (other, pairs.second))
    ]
    named = [shard.table.column("uri").take(rows) for shard, rows in zip((one, other), places, strict=True)]
    pixels = [_count_pixels(shard, rows) for shard, rows in zip((one, other), places, strict=True)]
    columns = [pairs.first, pairs.second, pairs.scores, inliers, points, *named, *pixels]
    return pa.table(columns, schema=PAIRS)


def _count_pixels(shard: OpenShard, rows: np.ndarray) -> np.ndarray:
    if shard.points is None:
        return np.zeros(len(rows), np.int64)
    sizes = shard.points.sizes_px(rows).astype(np.int64)
    described, original = sizes[:, 0] * sizes[:, 1], sizes[:, 2] * sizes[:, 3]
    return np.where(original > 0, original, described)


def _verify(pairs: ScoredPairs, one: OpenShard, other: OpenShard) -> tuple[pa.Array, pa.Array]:
    """Inliers of each pair, and points of the image that has fewer; null without points."""
    if one.points is None or other.points is None:
        return pa.nulls(len(pairs), pa.int32()), pa.nulls(len(pairs), pa.int32())
    counts = np.zeros((2, len(pairs)), np.int32)
    starts = np.flatnonzero(np.diff(pairs.first, prepend=-1)).tolist()
    for start, end in pairwise([*starts, len(pairs)]):
        query = stored_query(one, int(np.searchsorted(one.index.ids, pairs.first[start])))
        rows = np.searchsorted(other.index.ids, pairs.second[start:end])
        frames, sizes = other.points.read_frames(rows), other.points.sizes_px(rows)[:, :2]
        points = read_points(other, rows)
        counts[0, start:end] = [each.inliers for each in verify_head(query, points, frames, sizes)]
        counts[1, start:end] = np.minimum(np.diff(points.offsets), len(query))
    return pa.array(counts[0]), pa.array(counts[1])


def _number(content: str) -> int:
    """The number of a task, by its content."""
    return int(hashlib.sha256(content.encode()).hexdigest()[:15], 16)
