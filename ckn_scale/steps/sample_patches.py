"""Sample: the images drawn by the plan → keypoints → patches, the set everything is learned on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckn_scale.config import Settings
from ckn_scale.core.preprocessor import PreparedImage, Preprocessor
from ckn_scale.core.sampling import hash_priorities, smallest
from ckn_scale.errors import ImageRejected, RunFailed
from ckn_scale.prepare_images import prepare_images
from ckn_scale.schemas import SAMPLED_PATCHES, SAMPLED_PRIORITIES
from ckn_scale.step import ShardResult, Step, WorkerSettings
from ckn_scale.storage.plans import PlannedImage, read_sample, require_segments, shard_size
from ckn_scale.storage.run_folder import PATCHES_STAGE, PRIORITIES_STAGE, RunFolder
from ckn_scale.storage.shards import Commit
from ckn_scale.storage.stored_files import read_table


def make_preprocessor(settings: Settings) -> Preprocessor:
    return Preprocessor(settings.images, settings.keypoints, settings.patches)


class SampledImagesStep(Step):
    """A step whose shards are the sampled images."""

    @cached_property
    def sample(self) -> list[PlannedImage]:
        return self.read_drawn()

    def read_drawn(self) -> list[PlannedImage]:
        """The images that the plan drew."""
        return read_sample(self.run, require_segments(self.run))

    def shard_ids(self) -> Sequence[int]:
        return range(-(-len(self.sample) // self._images_per_shard))

    def num_images(self, shard_id: int) -> int:
        return len(self.images_of(shard_id))

    def images_of(self, shard_id: int) -> list[PlannedImage]:
        size = self._images_per_shard
        return self.sample[shard_id * size : (shard_id + 1) * size]

    @property
    def _images_per_shard(self) -> int:
        return shard_size(len(self.sample), self.settings.sample.images_per_shard)


class SamplePatches(SampledImagesStep):
    name = "sample_patches"
    sections = ("images", "keypoints", "patches", "sample")

    @cached_property
    def patches_per_image(self) -> int:
        return -(-self.settings.sample.num_patches // len(self.sample))

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        blocks, states = [SAMPLED_PATCHES.empty_table()], Counter({"ok": 0})
        prepare, deadline_s = make_preprocessor(self.settings).prepare, self.settings.encode.image_deadline_s
        for image, outcome in prepare_images(self.images_of(shard_id), prepare, worker, deadline_s):
            states[outcome.state if isinstance(outcome, ImageRejected) else "ok"] += 1
            if isinstance(outcome, PreparedImage):
                blocks.append(self._draw(image, outcome))
        table = pa.concat_tables(blocks)
        priorities = table.select(SAMPLED_PRIORITIES.names)
        return ShardResult(tables={PATCHES_STAGE: table, PRIORITIES_STAGE: priorities}, states=states)

    def _draw(self, image: PlannedImage, prepared: PreparedImage) -> pa.Table:
        count = len(prepared.patches)
        ids = np.full(count, image.image_id)
        priorities = hash_priorities(self.settings.sample.seed, ids, np.arange(count))
        chosen = smallest(priorities, self.patches_per_image)
        patches = [prepared.patches[point].tobytes() for point in chosen]
        return pa.table([ids[chosen], chosen, priorities[chosen], patches], schema=SAMPLED_PATCHES)


def count_sampled_images(run: RunFolder) -> int:
    """Those that gave patches."""
    commits = run.commits(SamplePatches.name).committed().values()
    return sum(commit.states.get("ok", 0) for commit in commits)


class SampledPatches:
    """The `count` sampled patches of smallest hash, however many shards they lie in."""

    def __init__(self, run: RunFolder, count: int, size_px: int) -> None:
        self.run, self.count, self.size_px = run, count, size_px
        self.commits: dict[int, Commit] = run.commits(SamplePatches.name).committed()

    @cached_property
    def priorities(self) -> np.ndarray:
        """Of the set, ascending."""
        tables = [read_table(self.run.store, one.files[PRIORITIES_STAGE]) for one in self.commits.values()]
        priorities = np.concatenate([table.column("priority").to_numpy() for table in tables])
        if len(priorities) == 0:
            raise RunFailed(f"{self.run.url}: no sampled image gave a patch")
        return np.sort(priorities)[: self.count]

    def __len__(self) -> int:
        return len(self.priorities)

    def holds(self, priorities: np.ndarray) -> np.ndarray:
        """(N,) bool: which of these belong to the set."""
        held: np.ndarray = priorities <= self.priorities[-1]
        return held

    def read_shard(self, shard_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Patches (N, S, S, 3) uint8 of one sample shard that belong to the set, with their priorities."""
        table = read_table(self.run.store, self.commits[shard_id].files[PATCHES_STAGE])
        last = pa.scalar(int(self.priorities[-1]), pa.uint64())
        table = table.filter(pc.less_equal(table.column("priority"), last))
        data = b"".join(table.column("patch").to_pylist())
        patches = np.frombuffer(data, np.uint8).reshape(-1, self.size_px, self.size_px, 3)
        return patches, table.column("priority").to_numpy()
