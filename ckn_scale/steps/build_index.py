"""Build: committed vectors → one index file and side table per index shard, then the manifest.

A build is named by what it holds: the hash of the vectors and models that went in. The same run
built again gives the same name, and finds its shards done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckn_scale.core.vector_index import build_exact
from ckn_scale.errors import WorkFailed
from ckn_scale.schemas import PLANNED_IMAGES, read_vectors
from ckn_scale.steps.base import ShardResult, Step, WorkerSettings
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.steps.model_parts import read_generation
from ckn_scale.steps.plan import PlanReader, Segment, count_shards, list_replaced, require_segments
from ckn_scale.storage.index_files import (
    IndexManifest,
    IndexShard,
    StoredFile,
    make_side_table,
    write_index_shard,
    write_manifest,
)
from ckn_scale.storage.records import new_attempt
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.shards import Commit, DataFile, read_table


def name_build(run: RunFolder, segments: Sequence[Segment], encoded: Mapping[int, Commit]) -> str:
    """The name of the build that the vectors of a plan make; WorkFailed while some are missing."""
    total = count_shards(segments)
    missing = sum(shard_id not in encoded for shard_id in range(total))
    if missing:
        raise WorkFailed(f"{run.url}: {missing} of {total} shards are not encoded yet")
    content = hashlib.sha256()
    for shard_id in range(total):
        content.update(f"{shard_id} {encoded[shard_id].files['vectors'].sha256}\n".encode())
    for name, file in sorted(read_generation(run)[1].items()):
        content.update(f"{name} {file.sha256}\n".encode())
    return content.hexdigest()[:16]


class BuildIndex(Step):
    """`params`: build, as `name_build` gives it."""

    name = "build_index"
    sections = (*EncodeImages.sections, "index")
    label_params = ("build",)

    @cached_property
    def plan(self) -> PlanReader:
        return PlanReader(self.run, require_segments(self.run))

    @cached_property
    def encoded(self) -> dict[int, Commit]:
        encoded = self.run.commits(EncodeImages.name).committed()
        if name_build(self.run, self.plan.segments, encoded) != self.params["build"]:
            raise WorkFailed(
                f"{self.run.url}: images were appended or encoded anew since the build was named"
            )
        return encoded

    @cached_property
    def replaced(self) -> pa.Array:
        return pa.array(list_replaced(self.plan.segments))

    def shard_ids(self) -> Sequence[int]:
        total = count_shards(self.plan.segments)
        return range(-(-total // self.settings.index.shards_per_index_shard))

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        size = self.settings.index.shards_per_index_shard
        covered = [one for one in range(shard_id * size, (shard_id + 1) * size) if one in self.encoded]
        usable = pa.concat_tables(self._read_usable(one) for one in covered)
        vectors = usable.filter(pc.invert(pc.is_in(usable.column("image_id"), self.replaced)))
        side = make_side_table(*self._side_columns(covered, vectors.column("image_id")))
        ids = vectors.column("image_id").to_numpy()
        index = build_exact(read_vectors(vectors).astype(np.float32), ids)
        folder = f"index/{self.params['build']}-{attempt}"
        written = write_index_shard(self.run.store, folder, shard_id, index.to_bytes(), side)
        files = {"index": _as_data(written.index, len(ids)), "table": _as_data(written.table, len(ids))}
        report = {"first_id": written.first_id, "last_id": written.last_id, "rows": written.rows}
        report["replaced"] = len(usable) - len(vectors)
        return ShardResult(files=files, report=report)

    def _read_usable(self, shard_id: int) -> pa.Table:
        table = read_table(self.run.store, self.encoded[shard_id].files["vectors"])
        return table.filter(pc.equal(table.column("state"), "ok"))

    def _side_columns(self, covered: Sequence[int], ids: pa.ChunkedArray) -> tuple[Any, ...]:
        planned = pa.concat_tables(self.plan.read_table(shard_id) for shard_id in covered)
        rows = planned.take(pc.index_in(ids, planned.column("image_id").combine_chunks()))
        thumbnails = pa.concat_tables(
            read_table(self.run.store, self.encoded[shard_id].files["thumbnails"]) for shard_id in covered
        )
        jpegs = thumbnails.take(pc.index_in(ids, thumbnails.column("image_id").combine_chunks())).column(
            "jpeg"
        )
        kept = rows.drop_columns(PLANNED_IMAGES.names)
        return ids, rows.column("uri"), jpegs, kept


def list_index_shards(step: BuildIndex) -> list[IndexShard]:
    """The index shards that stand."""
    return [_as_shard(shard_id, commit) for shard_id, commit in sorted(step.log.committed().items())]


def write_build_manifest(step: BuildIndex) -> StoredFile:
    """The manifest of a build whose shards are all committed."""
    commits = step.log.committed()
    shards = list_index_shards(step)
    generation, models = read_generation(step.run)
    dim = int(_first_vectors(step).schema.metadata[b"dim"])
    manifest = IndexManifest(
        build=step.params["build"],
        dim=dim,
        rows=sum(shard.rows for shard in shards),
        models={name: {"path": file.path, "sha256": file.sha256} for name, file in models.items()},
        shards=tuple(shards),
        kind=step.settings.index.kind,
        extra={"generation": generation, "replaced": sum(one.report["replaced"] for one in commits.values())},
    )
    return write_manifest(step.run.store, f"index/{step.params['build']}-{new_attempt()}", manifest)


def _first_vectors(step: BuildIndex) -> pa.Table:
    return read_table(step.run.store, step.encoded[min(step.encoded)].files["vectors"])


def _as_data(file: StoredFile, rows: int) -> DataFile:
    return DataFile(path=file.path, sha256=file.sha256, rows=rows, size_bytes=file.size_bytes)


def _as_shard(shard_id: int, commit: Commit) -> IndexShard:
    index, table = (
        StoredFile(file.path, file.sha256, file.size_bytes)
        for file in (commit.files["index"], commit.files["table"])
    )
    report = {name: commit.report[name] for name in ("rows", "first_id", "last_id")}
    return IndexShard(shard=shard_id, index=index, table=table, **report)
