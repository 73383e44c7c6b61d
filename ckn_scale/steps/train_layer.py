"""Train: sub-patches → the filters of one CKN layer. One shard per channel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckn_scale.core.ckn_model import Ckn
from ckn_scale.core.ckn_training import add_layer
from ckn_scale.steps.base import ShardResult, WorkerSettings
from ckn_scale.steps.channels import TRAINING_SECTIONS, ChannelStep
from ckn_scale.steps.draw_subpatches import DrawSubpatches, read_ckn_below, read_subpatches
from ckn_scale.steps.model_parts import save_result
from ckn_scale.steps.search_rates import SearchRates, read_rate


class TrainLayer(ChannelStep):
    """`params`: layer, counted from 0."""

    name = "train_layer"
    sections = TRAINING_SECTIONS
    label_params = ("layer",)

    @property
    def drawn(self) -> DrawSubpatches:
        return DrawSubpatches(self.run, self.params)

    def shard_ids(self) -> Sequence[int]:
        return self.drawn.positions()

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        spec = self.channel(shard_id).ckn
        below = read_ckn_below(self.run, self.settings, spec.channel, int(self.params["layer"]))
        subpatches = read_subpatches(self.drawn, spec.channel)
        arrays, facts = self.learn(shard_id, below, subpatches).to_arrays()
        return save_result(self.run, f"ckn-{spec.channel}", arrays, facts, subpatches=len(subpatches))

    def learn(self, shard_id: int, below: Ckn, subpatches: np.ndarray) -> Ckn:
        """The CKN with one layer more."""
        spec, training = self.channel(shard_id).ckn, self.settings.training
        rate = read_rate(SearchRates(self.run, self.params), shard_id)
        device = self.settings.numerics.device
        return add_layer(below, spec, subpatches, training, rate=rate, device=device)
