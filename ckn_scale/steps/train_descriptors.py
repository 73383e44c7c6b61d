"""Train: from sampled patches to each channel's projection and visual words.

Workers describe their part of the patches, raw for the projection and projected for the words; then one
worker per channel fits each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from ckn_scale.core.ckn import encode_patches
from ckn_scale.core.ckn_model import Ckn
from ckn_scale.core.encoder import load_descriptor
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.pca import fit_projection
from ckn_scale.core.sampling import smallest
from ckn_scale.core.vlad import fit_codebook
from ckn_scale.schemas import float_rows_schema, read_float_rows
from ckn_scale.step import ShardResult, WorkerSettings
from ckn_scale.steps.sample_patches import SampledPatches
from ckn_scale.steps.train_layers import (
    TRAINING_SECTIONS,
    ChannelPartStep,
    ChannelStep,
    list_layer_labels,
    save_result,
)
from ckn_scale.storage.models import load_trained
from ckn_scale.storage.run_folder import SAMPLE_DESCRIPTORS_STAGE
from ckn_scale.storage.stored_files import read_table

Form = Literal["raw", "projected"]


@dataclass(frozen=True, eq=False)
class DescribePatches(ChannelPartStep):
    """Patches as the network describes them: raw, before the projection is learned, or projected."""

    form: Form

    name = "describe_patches"
    sections = (*TRAINING_SECTIONS, "vlad")
    label_fields = ("form",)

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        channel, part = self.part(shard_id)
        is_raw = self.form == "raw"
        count = channel.projection.num_descriptors if is_raw else self.settings.vlad.num_descriptors
        sampled = SampledPatches(self.run, count, self.settings.patches.size_px)
        patches, priorities = sampled.read_shard(part)
        described = self._describe(channel.ckn.channel, patches)
        rows = [row.tobytes() for row in described]
        table = pa.table([priorities, rows], schema=float_rows_schema(described.shape[1]))
        return ShardResult(tables={SAMPLE_DESCRIPTORS_STAGE: table})

    def _describe(self, channel: str, patches: np.ndarray) -> np.ndarray:
        numerics = self.settings.numerics.model_dump()
        labels = [*list_layer_labels(self.run, self.settings), TrainProjection.name]
        if self.form == "projected":
            parts = load_trained(self.run, labels, f"ckn-{channel}", f"projection-{channel}")
            return load_descriptor(parts, channel, numerics).describe(patches)
        parts = load_trained(self.run, labels, f"ckn-{channel}")
        return encode_patches(
            Ckn.from_part(parts[f"ckn-{channel}"]),
            patches,
            batch_size=numerics["batch_patches"],
            device=numerics["device"],
            dtype=numerics["dtype"],
        )


def read_descriptors(step: DescribePatches, channel: str) -> np.ndarray:
    """The channel's descriptors (N, D) float32, in the order of their hashes, whoever made them."""
    commits = step.log.committed()
    tables = [
        read_table(step.run.store, commits[one].files[SAMPLE_DESCRIPTORS_STAGE])
        for one in step.shards_of(channel)
    ]
    priorities = np.concatenate([table.column("priority").to_numpy() for table in tables])
    rows = np.concatenate([read_float_rows(table) for table in tables])
    ordered: np.ndarray = rows[smallest(priorities, len(priorities))]
    return ordered


class TrainProjection(ChannelStep):
    """PCA of a channel's raw descriptors."""

    name = "train_projection"
    sections = (*TRAINING_SECTIONS, "vlad")

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        spec = self.channel(shard_id)
        descriptors = read_descriptors(DescribePatches(self.run, "raw"), spec.ckn.channel)
        projection = fit_projection(descriptors, spec.projection)
        part = projection.to_part()
        return save_result(self.run, f"projection-{spec.ckn.channel}", part, dim=projection.dim)


class TrainCodebook(ChannelStep):
    """k-means of a channel's projected descriptors: the words of the VLAD."""

    name = "train_codebook"
    sections = (*TRAINING_SECTIONS, "vlad")

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        name, vlad = self.channel(shard_id).ckn.channel, self.settings.vlad
        descriptors = read_descriptors(DescribePatches(self.run, "projected"), name)
        centroids = fit_codebook(
            descriptors, vlad.num_words, iterations=vlad.kmeans_iterations, seed=vlad.seed
        )
        part = ModelPart({"centroids": centroids}, {})
        return save_result(self.run, f"codebook-{name}", part, words=len(centroids))
