"""Train: PCA + whitening of a channel's CKN descriptors. One shard per channel."""

from __future__ import annotations

from ckn_scale.core.projection import fit_projection
from ckn_scale.steps.base import ShardResult, WorkerSettings
from ckn_scale.steps.channels import TRAINING_SECTIONS, ChannelStep
from ckn_scale.steps.describe_patches import DescribePatches, read_descriptors
from ckn_scale.steps.model_parts import save_result


class TrainProjection(ChannelStep):
    name = "train_projection"
    sections = (*TRAINING_SECTIONS, "vlad")

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        spec = self.channel(shard_id)
        descriptors = read_descriptors(DescribePatches(self.run, {"form": "raw"}), spec.ckn.channel)
        projection = fit_projection(descriptors, spec.projection)
        arrays, facts = projection.to_arrays()
        return save_result(self.run, f"projection-{spec.ckn.channel}", arrays, facts, dim=projection.dim)
