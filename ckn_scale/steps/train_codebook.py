"""Train: k-means words for VLAD. One shard per channel."""

from __future__ import annotations

from ckn_scale.core.codebook import fit_codebook
from ckn_scale.core.encoder import load_descriptor
from ckn_scale.steps.base import ShardResult, WorkerSettings
from ckn_scale.steps.model_parts import find_models, load_parts, save_result
from ckn_scale.steps.sample_patches import read_patches
from ckn_scale.steps.train_ckn import ChannelStep, TrainCkn


class TrainCodebook(ChannelStep):
    name = "train_codebook"
    sections = (*TrainCkn.sections, "vlad")

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        name, vlad = self.channel(shard_id).ckn.channel, self.settings.vlad
        models = find_models(self.run, ["train_ckn", "train_projection"])
        wanted = {part: models[part] for part in (f"ckn-{name}", f"projection-{name}")}
        parts = load_parts(self.run, wanted)
        descriptor = load_descriptor(parts, name, self.settings.numerics.model_dump())
        patches = read_patches(self.run, vlad.num_descriptors, self.settings.patches.size_px)
        centroids = fit_codebook(
            descriptor.describe(patches), vlad.num_words, iterations=vlad.kmeans_iterations, seed=vlad.seed
        )
        return save_result(self.run, f"codebook-{name}", {"centroids": centroids}, {}, words=len(centroids))
