"""Train: k-means words for VLAD. One shard per channel."""

from __future__ import annotations

from ckn_scale.core.codebook import fit_codebook
from ckn_scale.steps.base import ShardResult, WorkerSettings
from ckn_scale.steps.channels import TRAINING_SECTIONS, ChannelStep
from ckn_scale.steps.describe_patches import DescribePatches, read_descriptors
from ckn_scale.steps.model_parts import save_result


class TrainCodebook(ChannelStep):
    name = "train_codebook"
    sections = (*TRAINING_SECTIONS, "vlad")

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        name, vlad = self.channel(shard_id).ckn.channel, self.settings.vlad
        descriptors = read_descriptors(DescribePatches(self.run, {"form": "projected"}), name)
        centroids = fit_codebook(
            descriptors, vlad.num_words, iterations=vlad.kmeans_iterations, seed=vlad.seed
        )
        return save_result(self.run, f"codebook-{name}", {"centroids": centroids}, {}, words=len(centroids))
