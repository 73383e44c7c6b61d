"""Sample: the images drawn by the plan → keypoints → patches, the set everything is learned on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckn_scale.config import Settings
from ckn_scale.core.encoder import Front, PreparedImage
from ckn_scale.core.sampling import hash_priorities, smallest
from ckn_scale.errors import ImageRejected, InputError
from ckn_scale.schemas import SAMPLED_PATCHES
from ckn_scale.steps.base import ShardResult, Step, WorkerSettings
from ckn_scale.steps.plan import PlannedImage, read_sample, require_segments
from ckn_scale.steps.prepare_images import prepare_images
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.shards import read_table

STAGE = "samples/patches"

Priorities: TypeAlias = np.ndarray


def make_front(settings: Settings) -> Front:
    return Front(settings.images, settings.keypoints, settings.patches)


class SampledImagesStep(Step):
    """A step whose shards are the sampled images."""

    @cached_property
    def sample(self) -> list[PlannedImage]:
        return read_sample(self.run, require_segments(self.run))

    def shard_ids(self) -> Sequence[int]:
        return range(-(-len(self.sample) // self.settings.sample.images_per_shard))

    def images_of(self, shard_id: int) -> list[PlannedImage]:
        size = self.settings.sample.images_per_shard
        return self.sample[shard_id * size : (shard_id + 1) * size]


class SamplePatches(SampledImagesStep):
    name = "sample_patches"
    sections = ("images", "keypoints", "patches", "sample")

    @cached_property
    def patches_per_image(self) -> int:
        return -(-self.settings.sample.num_patches // len(self.sample))

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        blocks, states = [], {"ok": 0}
        front, deadline_s = make_front(self.settings), self.settings.encode.image_deadline_s
        for image, outcome in prepare_images(self.images_of(shard_id), front, worker, deadline_s):
            state = outcome.state if isinstance(outcome, ImageRejected) else "ok"
            states[state] = states.get(state, 0) + 1
            if isinstance(outcome, PreparedImage):
                blocks.append(self._draw(image, outcome))
        table = pa.concat_tables(blocks) if blocks else SAMPLED_PATCHES.empty_table()
        return ShardResult(tables={STAGE: table}, states=states)

    def _draw(self, image: PlannedImage, prepared: PreparedImage) -> pa.Table:
        count = len(prepared.patches)
        ids = np.full(count, image.image_id)
        priorities = hash_priorities(self.settings.sample.seed, ids, np.arange(count))
        chosen = smallest(priorities, self.patches_per_image)
        patches = [prepared.patches[point].tobytes() for point in chosen]
        return pa.table([ids[chosen], chosen, priorities[chosen], patches], schema=SAMPLED_PATCHES)


def read_patches(run: RunFolder, count: int, size_px: int) -> np.ndarray:
    """The `count` sampled patches of smallest hash, (N, S, S, 3) uint8, whatever their sharding."""
    commits = sorted(run.commits(SamplePatches.name).committed().items())
    files = [commit.files[STAGE] for _, commit in commits]
    limit = _find_limit([read_table(run.store, file, columns=["priority"]) for file in files], count)
    tables = pa.concat_tables(_below(read_table(run.store, file), limit) for file in files)
    if tables.num_rows == 0:
        raise InputError(f"{run.url}: no sampled image gave a patch; see `ckn-scale failures {run.url}`")
    table = tables.sort_by([("priority", "ascending"), ("image_id", "ascending"), ("point", "ascending")])
    return np.stack(list(_decode_patches(table.column("patch"), size_px)))


def _find_limit(tables: Sequence[pa.Table], count: int) -> int:
    priorities = np.sort(np.concatenate([table.column("priority").to_numpy() for table in tables]))
    return int(priorities[min(count, len(priorities)) - 1]) if len(priorities) else 0


def _below(table: pa.Table, limit: int) -> pa.Table:
    return table.filter(pc.less_equal(table.column("priority"), pa.scalar(limit, pa.uint64())))


def _decode_patches(column: pa.ChunkedArray, size_px: int) -> Iterator[np.ndarray]:
    for value in column:
        yield np.frombuffer(value.as_buffer(), np.uint8).reshape(size_px, size_px, 3)
