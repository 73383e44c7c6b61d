"""Train: from sampled patches to each channel's projections and visual words, and to the words of points.

Workers describe their part of the patches, raw for the projections and projected for the words; then one
worker per channel fits each, and one the words of points, which all channels that describe them share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from ckn_scale.core.encoder import load_descriptor, load_network_for
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.pca import Projection, learn_projection
from ckn_scale.core.points import fit_point_projection, fit_point_words
from ckn_scale.core.sampling import smallest
from ckn_scale.core.specs import ChannelSpec
from ckn_scale.core.vlad import fit_codebook
from ckn_scale.schemas import float_rows_schema, read_float_rows
from ckn_scale.step import ShardResult, Step, WorkerSettings
from ckn_scale.steps.sample_patches import SampledPatches, count_sampled_images
from ckn_scale.steps.take_networks import list_network_labels
from ckn_scale.steps.train_layers import (
    TRAINING_SECTIONS,
    ChannelPartStep,
    ChannelStep,
    save_result,
)
from ckn_scale.storage.models import load_trained, save_model
from ckn_scale.storage.run_folder import SAMPLE_DESCRIPTORS_STAGE, SAMPLE_POINTS_STAGE
from ckn_scale.storage.stored_files import read_table

Form = Literal["raw", "projected"]


DESCRIPTOR_SECTIONS = (*TRAINING_SECTIONS, "vlad", "points")


@dataclass(frozen=True, eq=False)
class DescribePatches(ChannelPartStep):
    """Patches as the network describes them: raw, before projections are learned, or projected.

    Projected for the VLAD and, where the channel describes points, for those too: one pass serves both.
    """

    form: Form

    name = "describe_patches"
    version = 3
    sections = DESCRIPTOR_SECTIONS
    label_fields = ("form",)

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        channel, part = self.part(shard_id)
        counts = self._count_rows(channel)
        samples = {stage: self._sample(count) for stage, count in counts.items()}
        largest = max(samples.values(), key=len)
        patches, priorities = largest.read_shard(part)
        described = self._describe(channel, patches)
        tables = {}
        for (stage, sampled), rows in zip(samples.items(), described, strict=True):
            chosen = sampled.holds(priorities)
            columns = [priorities[chosen], [row.tobytes() for row in rows[chosen]]]
            tables[stage] = pa.table(columns, schema=float_rows_schema(rows.shape[1]))
        return ShardResult(tables=tables)

    def _count_rows(self, channel: ChannelSpec) -> dict[str, int]:
        """How many descriptors each stage gets, at most; in the order in which `_describe` gives them."""
        if self.form == "raw":
            return {SAMPLE_DESCRIPTORS_STAGE: channel.num_descriptors}
        counts = {SAMPLE_DESCRIPTORS_STAGE: self.settings.vlad.num_descriptors}
        if channel.name in self.settings.point_channels:
            counts[SAMPLE_POINTS_STAGE] = self.settings.points.num_descriptors
        return counts

    def _sample(self, count: int) -> SampledPatches:
        return SampledPatches(self.run, count, self.settings.patches.size_px)

    def _describe(self, channel: ChannelSpec, patches: np.ndarray) -> list[np.ndarray]:
        name, numerics = channel.name, self.settings.numerics.model_dump()
        labels = [*list_network_labels(self.run, self.settings), TrainProjection.name]
        if self.form == "raw":
            part = load_trained(self.run, labels, channel.part_name)[channel.part_name]
            return [load_network_for(part, numerics).describe(patches)]
        names = [channel.part_name, f"projection-{name}"]
        if name in self.settings.point_channels:
            names.append(f"points-projection-{name}")
        parts = load_trained(self.run, labels, *names)
        descriptor = load_descriptor(parts, name, numerics)
        others = [descriptor.network.fold(Projection.from_part(parts[one])) for one in names[2:]]
        return descriptor.describe_with(patches, others)


def read_descriptors(
    step: DescribePatches, channel: str, stage: str = SAMPLE_DESCRIPTORS_STAGE
) -> np.ndarray:
    """The channel's descriptors (N, D) float32, in the order of their hashes, whoever made them."""
    commits = step.log.committed()
    tables = [read_table(step.run.store, commits[one].files[stage]) for one in step.shards_of(channel)]
    priorities = np.concatenate([table.column("priority").to_numpy() for table in tables])
    rows = np.concatenate([read_float_rows(table) for table in tables])
    ordered: np.ndarray = rows[smallest(priorities, len(priorities))]
    return ordered


class TrainProjection(ChannelStep):
    """PCA of a channel's raw descriptors: one projection for the VLAD, another for points."""

    name = "train_projection"
    version = 2
    sections = DESCRIPTOR_SECTIONS

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        spec, name = self.channel(shard_id), self.settings.channel_names[shard_id]
        descriptors = read_descriptors(DescribePatches(self.run, "raw"), name)
        learned = {f"projection-{name}": learn_projection(descriptors, spec.projection)}
        if name in self.settings.point_channels:
            learned[f"points-projection-{name}"] = fit_point_projection(descriptors, self.settings.points)
        files = {key: save_model(self.run.store, key, one.to_part()) for key, one in learned.items()}
        return ShardResult(files=files, report={"dim": learned[f"projection-{name}"].dim})


class TrainCodebook(ChannelStep):
    """k-means of a channel's projected descriptors: the words of the VLAD."""

    name = "train_codebook"
    version = 2
    sections = (*TRAINING_SECTIONS, "vlad")

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        name, vlad = self.channel(shard_id).name, self.settings.vlad
        descriptors = read_descriptors(DescribePatches(self.run, "projected"), name)
        centroids = fit_codebook(
            descriptors, vlad.num_words, iterations=vlad.kmeans_iterations, seed=vlad.seed
        )
        part = ModelPart({"centroids": centroids}, {})
        return save_result(self.run, f"codebook-{name}", part, words=len(centroids))


class TrainPointWords(Step):
    """k-means of what describes points, all channels side by side: as many words as the sample supports."""

    name = "train_point_words"
    version = 2
    sections = DESCRIPTOR_SECTIONS

    def shard_ids(self) -> Sequence[int]:
        return range(1 if self.settings.point_channels else 0)

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        described = DescribePatches(self.run, "projected")
        blocks = [
            read_descriptors(described, name, SAMPLE_POINTS_STAGE) for name in self.settings.point_channels
        ]
        descriptors, num_images = np.concatenate(blocks, axis=1), count_sampled_images(self.run)
        centroids = self.learn(descriptors, num_images)
        facts = {"words": len(centroids), "images": num_images, "descriptors": len(descriptors)}
        return save_result(self.run, "points-words", ModelPart({"centroids": centroids}, facts), **facts)

    def learn(self, descriptors: np.ndarray, num_images: int) -> np.ndarray:
        """The words; `runs/estimate.py` learns as many as the full run will have."""
        return fit_point_words(descriptors, num_images, self.settings.points)
