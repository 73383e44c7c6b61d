"""Purge: encoded shards once more, without what they hold of images that are dead.

The next generation of a shard has the same rows of living images, byte for byte, and of a dead one its id
and state only: no vector, points or thumbnail. Nothing is read or encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from ckn_scale.errors import RunFailed
from ckn_scale.step import ShardResult, WorkerSettings
from ckn_scale.steps.encode_images import PURGED, EncodeImages, report_not_ok
from ckn_scale.storage.deletions import DeadImages, find_shards, look_up_states
from ckn_scale.storage.plans import find_segment
from ckn_scale.storage.run_folder import VECTORS_STAGE, RunFolder
from ckn_scale.storage.run_records import Segment
from ckn_scale.storage.shards import Commit
from ckn_scale.storage.stored_files import read_table


class PurgeImages(EncodeImages):
    """The shards, records and fingerprint of `encode_images`: what it commits stands in their place."""

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        committed = self.log.get(shard_id)
        if committed is None:
            raise RunFailed(f"{self.run.url}: shard {shard_id} is not encoded yet")
        purged = self._find_purged(shard_id)
        tables = {stage: read_table(self.run.store, file) for stage, file in committed.files.items()}
        vectors = clear_rows(tables.pop(VECTORS_STAGE), purged)
        dead = pa.array(list(purged), pa.int64())
        kept = {
            stage: table.filter(pc.invert(pc.is_in(table.column("image_id"), dead)))
            for stage, table in tables.items()
        }
        counts = pc.value_counts(vectors.column("state")).to_pylist()
        return ShardResult(
            tables={VECTORS_STAGE: vectors, **kept},
            states={count["values"]: count["counts"] for count in counts},
            report=report_not_ok(vectors),
        )


def clear_rows(vectors: pa.Table, purged: Mapping[int, str]) -> pa.Table:
    """The rows of `purged` images have their state and nothing else."""
    is_dead = pc.is_in(vectors.column("image_id"), pa.array(list(purged), pa.int64()))
    cleared = {
        "state": pa.array([purged.get(one) for one in vectors.column("image_id").to_pylist()], pa.string()),
        "reason": pa.scalar(PURGED),
        "vector": pa.scalar(None, vectors.schema.field("vector").type),
    }
    for field in vectors.schema:
        if field.name != "image_id":
            value = cleared[field.name] if field.name in cleared else pa.scalar(0, field.type)
            column = pc.if_else(is_dead, value, vectors.column(field.name))
            vectors = vectors.set_column(vectors.schema.get_field_index(field.name), field, column)
    return vectors


def find_unpurged(
    run: RunFolder, segments: Sequence[Segment], encoded: Mapping[int, Commit], purged: DeadImages
) -> list[int]:
    """Encoded shards that have more of a purged image than its state."""
    found = []
    for shard_id in find_shards(segments, purged.ids):
        here = purged.of_range(*find_segment(segments, shard_id).ids_of_shard(shard_id))
        wanted = {image_id: state for state, ids in here.by_state() for image_id in ids.tolist()}
        if shard_id in encoded and look_up_states(run.store, encoded[shard_id], here.ids) != wanted:
            found.append(shard_id)
    return found
