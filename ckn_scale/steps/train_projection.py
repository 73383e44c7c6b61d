"""Train: PCA + whitening of a channel's CKN descriptors. One shard per channel."""

from __future__ import annotations

from ckn_scale.core.ckn import Ckn, encode_patches
from ckn_scale.core.projection import fit_projection
from ckn_scale.steps.base import ShardResult, WorkerSettings
from ckn_scale.steps.model_parts import find_models, save_result
from ckn_scale.steps.sample_patches import read_patches
from ckn_scale.steps.train_ckn import ChannelStep, TrainCkn
from ckn_scale.storage.models import load_model


class TrainProjection(ChannelStep):
    name = "train_projection"
    sections = TrainCkn.sections

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        spec, numerics = self.channel(shard_id), self.settings.numerics
        name = spec.ckn.channel
        ckn = Ckn.from_arrays(
            *load_model(self.run.store, find_models(self.run, ["train_ckn"])[f"ckn-{name}"])
        )
        patches = read_patches(self.run, spec.projection.num_descriptors, self.settings.patches.size_px)
        descriptors = encode_patches(
            ckn, patches, batch_size=numerics.batch_patches, device=numerics.device, dtype=numerics.dtype
        )
        projection = fit_projection(descriptors, spec.projection)
        arrays, facts = projection.to_arrays()
        return save_result(self.run, f"projection-{name}", arrays, facts, dim=projection.dim)
