"""Build: committed vectors and points → index, side table and points of each index shard; the manifest.

A build is named by what it holds, and so is each of its shards (`storage/builds.py`). The same run built
again gives the same names and finds its shards done; after an append, those that did not change. A shard
holds every image that is ok; the manifest names those of them that are dead (`storage/deletions.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckn_scale.core.vector_codes import make_codec
from ckn_scale.core.vector_index import KINDS, StoredIndex, build_index
from ckn_scale.errors import RunFailed
from ckn_scale.schemas import PLANNED_IMAGES, read_codes
from ckn_scale.step import ShardResult, Step, WorkerSettings
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.storage.builds import (
    cut_index_shards,
    name_shards,
    number_index_shard,
    number_index_shards,
    position_of,
)
from ckn_scale.storage.deletions import NO_IDS, find_tombstones
from ckn_scale.storage.index_files import (
    IndexManifest,
    IndexShard,
    make_side_table,
    write_index_shard,
    write_manifest,
    write_tombstones,
)
from ckn_scale.storage.models import read_generation
from ckn_scale.storage.plans import PlanReader, require_segments
from ckn_scale.storage.point_files import serialise_points
from ckn_scale.storage.records import new_attempt
from ckn_scale.storage.run_folder import BUILD_INDEX, DESCRIPTORS_STAGE, VECTORS_STAGE
from ckn_scale.storage.run_records import Purge
from ckn_scale.storage.shards import Commit
from ckn_scale.storage.stored_files import StoredFile, read_table

INDEX_FILES = ("index", "table", "ids", "points")  # of an index shard


@dataclass(frozen=True, eq=False)
class BuildIndex(Step):
    """A shard's number names its content: what is committed already, of whatever build, is not rebuilt."""

    build: str  # as `name_build` gives it

    name = BUILD_INDEX
    sections = (*EncodeImages.sections, "index")
    version = 7

    @cached_property
    def plan(self) -> PlanReader:
        return PlanReader(self.run, require_segments(self.run))

    @cached_property
    def purge(self) -> Purge | None:
        return self.run.purges.latest()

    def shard_ids(self) -> Sequence[int]:
        encoded = self.run.commits(EncodeImages.name).committed()
        numbers = number_index_shards(self.run, self.plan.segments, encoded, self.purge)
        if name_shards(numbers) != self.build:
            raise RunFailed(f"{self.run.url}: images were appended or encoded anew since the build was named")
        return numbers

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        covered = self._read_commits(shard_id)
        tables = (read_table(self.run.store, commit.files[VECTORS_STAGE]) for commit in covered)
        vectors = pa.concat_tables(table.filter(pc.equal(table.column("state"), "ok")) for table in tables)
        side = self._make_side_table(covered, vectors.column("image_id"))
        index = make_index(vectors)
        points = self._collect_points(covered, vectors)
        folder = self.run.index_folder(shard_id, attempt)
        written = write_index_shard(
            self.run.store, folder, position_of(shard_id), index.to_bytes(), side, points
        )
        return ShardResult(
            files={name: file for name in INDEX_FILES if (file := getattr(written, name)) is not None},
            report={"first_id": written.first_id, "last_id": written.last_id, "rows": written.rows},
        )

    def _read_commits(self, shard_id: int) -> list[Commit]:
        """The records of the encoded shards that an index shard holds, and no others."""
        position, log = position_of(shard_id), self.run.commits(EncodeImages.name)
        cut = cut_index_shards(self.run, self.plan.segments, self.purge)
        wanted = cut[position] if position < len(cut) else range(0)
        covered = [commit for one in wanted if (commit := log.get(one)) is not None]
        if not covered or number_index_shard(position, covered) != shard_id:
            raise RunFailed(f"{self.run.url}: images were appended or encoded anew since the build was named")
        return covered

    def _collect_points(self, covered: Sequence[Commit], vectors: pa.Table) -> bytes | None:
        """The points of these images, as a file that searches read; None where the run keeps none."""
        if self.settings.points.max_points == 0:
            return None
        files = (commit.files[DESCRIPTORS_STAGE] for commit in covered)
        points = pa.concat_tables(read_table(self.run.store, file) for file in files)
        return serialise_points(vectors, points)

    def _make_side_table(self, covered: Sequence[Commit], ids: pa.ChunkedArray) -> pa.Table:
        """What the index has beside the vectors of these images: URIs and kept columns."""
        planned = pa.concat_tables(self.plan.read_table(commit.shard_id) for commit in covered)
        rows = planned.take(pc.index_in(ids, planned.column("image_id").combine_chunks()))
        kept = rows.drop_columns(PLANNED_IMAGES.names)
        return make_side_table(ids, rows.column("uri"), kept)


def make_index(vectors: pa.Table) -> StoredIndex:
    """The index of the rows of a vectors table, all of them `ok`; its kind is that of their encoding."""
    metadata = vectors.schema.metadata
    codec = make_codec(metadata[b"encoding"].decode(), int(metadata[b"dim"]))
    return build_index(codec, read_codes(vectors), vectors.column("image_id").to_numpy())


def list_index_shards(step: BuildIndex) -> list[IndexShard]:
    """The committed index shards of the build that the committed vectors make."""
    committed = step.log.committed()
    commits = {number: committed[number] for number in step.shard_ids() if number in committed}
    return [
        IndexShard(
            position_of(number),
            commit.files["index"],
            commit.files["table"],
            commit.files["ids"],
            points=commit.files.get("points"),
            rows=commit.report["rows"],
            first_id=commit.report["first_id"],
            last_id=commit.report["last_id"],
        )
        for number, commit in commits.items()
    ]


def write_build_manifest(
    step: BuildIndex, dead: np.ndarray = NO_IDS, shards: Sequence[IndexShard] | None = None
) -> StoredFile:
    """The manifest of a build whose shards are all committed; the `dead` among its rows are tombstones.

    `shards` are those that the build made, unless others are made of them.
    """
    run, folder = step.run, step.run.index_folder(step.build, new_attempt())
    shards = list_index_shards(step) if shards is None else shards
    tombstones = find_tombstones(run.store, shards, dead)
    generation = read_generation(run)
    encoded = run.commits(EncodeImages.name).committed()[0]
    vectors = read_table(run.store, encoded.files[VECTORS_STAGE], columns=["image_id"])
    manifest = IndexManifest(
        build=step.build,
        dim=int(vectors.schema.metadata[b"dim"]),
        rows=sum(shard.rows for shard in shards) - len(tombstones),
        models=generation.models,
        shards=tuple(shards),
        kind=KINDS[step.settings.reduction.stored],
        generation=generation.number,
        tombstones=write_tombstones(run.store, folder, tombstones),
    )
    return write_manifest(run.store, folder, manifest)
