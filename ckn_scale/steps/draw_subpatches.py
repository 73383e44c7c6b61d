"""Train: workers encode their part of the sampled patches up to a layer and draw its sub-patches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from ckn_scale.config import Settings
from ckn_scale.core.ckn_model import Ckn
from ckn_scale.core.ckn_training import Subpatches, draw_subpatches, start_ckn
from ckn_scale.schemas import float_rows, read_float_rows
from ckn_scale.steps.base import ShardResult, WorkerSettings
from ckn_scale.steps.channels import TRAINING_SECTIONS, ChannelPartStep
from ckn_scale.steps.model_parts import layer_logs, load_model_named
from ckn_scale.steps.sample_patches import SampledPatches
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.shards import read_table

STAGE = "samples/subpatches"


def learned_layers(settings: Settings, position: int) -> range:
    """The layers of a channel that are learned: all but grad's orientations."""
    ckn = settings.channels[position].ckn
    return range(1 if ckn.channel == "grad" else 0, len(ckn.layers))


class DrawSubpatches(ChannelPartStep):
    """`params`: layer, counted from 0."""

    name = "draw_subpatches"
    sections = TRAINING_SECTIONS
    label_params = ("layer",)

    @property
    def layer(self) -> int:
        return int(self.params["layer"])

    def positions(self) -> Sequence[int]:
        everyone = range(len(self.settings.channels))
        return [position for position in everyone if self.layer in learned_layers(self.settings, position)]

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        channel, part = self.part(shard_id)
        training, size_px = self.settings.training, self.settings.patches.size_px
        ckn = read_ckn_below(self.run, self.settings, channel.ckn.channel, self.layer)
        sampled = SampledPatches(self.run, training.num_patches, size_px)
        patches, priorities = sampled.read_shard(part)
        drawn = draw_subpatches(
            ckn,
            channel.ckn,
            patches,
            priorities.view(np.int64),
            -(-training.num_subpatches // len(sampled)),
            seed=training.seed,
            device=self.settings.numerics.device,
        )
        schema = float_rows(drawn.rows.shape[1])
        rows = [row.tobytes() for row in drawn.rows]
        return ShardResult(tables={STAGE: pa.table([drawn.priorities, rows], schema=schema)})


def read_ckn_below(run: RunFolder, settings: Settings, channel: str, layer: int) -> Ckn:
    """The channel's CKN as far as it is learned before `layer`."""
    position = settings.channel_names.index(channel)
    spec = settings.channels[position].ckn
    if layer == learned_layers(settings, position).start:
        return start_ckn(spec, settings.patches.size_px)
    return Ckn.from_arrays(*load_model_named(run, layer_logs(layer), f"ckn-{channel}"))


def read_subpatches(step: DrawSubpatches, channel: str) -> np.ndarray:
    """The channel's sub-patches (n, q): those of smallest hash, whatever workers drew them."""
    commits = step.log.committed()
    tables = [read_table(step.run.store, commits[one].files[STAGE]) for one in step.shards_of(channel)]
    parts = [Subpatches(read_float_rows(table), table.column("priority").to_numpy()) for table in tables]
    return Subpatches.merge(parts, step.settings.training.num_subpatches).rows
