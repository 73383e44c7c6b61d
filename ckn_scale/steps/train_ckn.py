"""Train: sub-patches → the filters of a CKN, layer by layer. One shard per channel."""

from __future__ import annotations

from collections.abc import Sequence

from ckn_scale.core.ckn_training import train_ckn
from ckn_scale.core.specs import ChannelSpec
from ckn_scale.steps.base import ShardResult, Step, WorkerSettings
from ckn_scale.steps.model_parts import save_result
from ckn_scale.steps.sample_patches import read_patches


class ChannelStep(Step):
    """A training step whose shards are the channels."""

    def shard_ids(self) -> Sequence[int]:
        return range(len(self.settings.channels))

    def channel(self, shard_id: int) -> ChannelSpec:
        return self.settings.channels[shard_id]


class TrainCkn(ChannelStep):
    name = "train_ckn"
    sections = ("images", "keypoints", "patches", "sample", "channels", "training")

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        spec, training = self.channel(shard_id).ckn, self.settings.training
        patches = read_patches(self.run, training.num_patches, self.settings.patches.size_px)
        ckn = train_ckn(patches, spec, training, device=self.settings.numerics.device)
        arrays, facts = ckn.to_arrays()
        return save_result(self.run, f"ckn-{spec.channel}", arrays, facts, patches=len(patches))
