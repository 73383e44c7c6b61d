"""Train: the layers of each channel's CKN, one on top of the other: draw sub-patches, search a rate, learn.

Drawing is sharded by channel and part of the sample, the search by channel and candidate, learning by
channel. `ChannelStep` and `ChannelPartStep` are those divisions, for the training steps after this, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from ckn_scale.config import Settings
from ckn_scale.core.ckn_model import Ckn
from ckn_scale.core.ckn_sgd import (
    PairProblem,
    candidate_rates,
    choose_rate,
    draw_filters,
    pose_problem,
    try_rate,
)
from ckn_scale.core.ckn_training import (
    Subpatches,
    add_layer,
    choose_alpha,
    draw_subpatches,
    start_ckn,
    subpatches_per_patch,
)
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.specs import ChannelSpec, CknSpec
from ckn_scale.schemas import float_rows_schema, read_float_rows
from ckn_scale.step import ShardResult, Step, WorkerSettings
from ckn_scale.steps.sample_patches import SampledPatches, SamplePatches
from ckn_scale.storage.models import load_trained, save_model
from ckn_scale.storage.run_folder import SUBPATCHES_STAGE, RunFolder
from ckn_scale.storage.stored_files import read_table

TRAINING_SECTIONS = ("images", "keypoints", "patches", "sample", "channels", "training")


class ChannelStep(Step):
    """One shard per channel: channels train on different workers."""

    def shard_ids(self) -> Sequence[int]:
        return range(len(self.settings.channels))

    def channel(self, shard_id: int) -> ChannelSpec:
        return self.settings.channels[shard_id]


def require_ckn(channel: ChannelSpec) -> CknSpec:
    """The CKN of a channel; only those are learned layer by layer."""
    assert channel.ckn is not None, channel.name
    return channel.ckn


class ChannelPart(NamedTuple):
    channel: ChannelSpec
    sample_shard: int


class ChannelPartStep(Step):
    """One shard per channel and part of the sample, channel by channel."""

    @cached_property
    def num_parts(self) -> int:
        return len(SamplePatches(self.run).shard_ids())

    def positions(self) -> Sequence[int]:
        """The channels that take part."""
        return range(len(self.settings.channels))

    def shard_ids(self) -> Sequence[int]:
        names = [self.settings.channel_names[position] for position in self.positions()]
        return [shard_id for name in names for shard_id in self.shards_of(name)]

    def part(self, shard_id: int) -> ChannelPart:
        return ChannelPart(self.settings.channels[shard_id // self.num_parts], shard_id % self.num_parts)

    def shards_of(self, channel: str) -> Sequence[int]:
        position = self.settings.channel_names.index(channel)
        return range(position * self.num_parts, (position + 1) * self.num_parts)


@dataclass(frozen=True, eq=False)
class DrawSubpatches(ChannelPartStep):
    """Sub-patches of one layer's input maps, of those with the smallest hashes."""

    layer: int  # counted from 0

    name = "draw_subpatches"
    version = 2
    sections = TRAINING_SECTIONS
    label_fields = ("layer",)

    def positions(self) -> Sequence[int]:
        channels = enumerate(self.settings.channels)
        return [position for position, channel in channels if self.layer in channel.learned_layers]

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        channel, part = self.part(shard_id)
        training, size_px = self.settings.training, self.settings.patches.size_px
        spec, ckn = require_ckn(channel), read_ckn_below(self.run, self.settings, channel.name, self.layer)
        sampled = SampledPatches(self.run, training.num_patches, size_px)
        patches, priorities = sampled.read_shard(part)
        drawn = draw_subpatches(
            ckn,
            spec,
            patches,
            priorities.view(np.int64),
            subpatches_per_patch(training, len(sampled)),
            seed=training.seed,
            device=self.settings.numerics.device,
        )
        schema = float_rows_schema(drawn.rows.shape[1])
        rows = [row.tobytes() for row in drawn.rows]
        return ShardResult(tables={SUBPATCHES_STAGE: pa.table([drawn.priorities, rows], schema=schema)})


def read_ckn_below(run: RunFolder, settings: Settings, channel: str, layer: int) -> Ckn:
    """The channel's CKN as far as it is learned before `layer`."""
    position = settings.channel_names.index(channel)
    spec = require_ckn(settings.channels[position])
    if layer == spec.learned_layers.start:
        return start_ckn(spec, settings.patches.size_px)
    name = f"ckn-{channel}"
    return Ckn.from_part(load_trained(run, list_layer_labels(run, settings, layer), name)[name])


def read_subpatches(step: DrawSubpatches, channel: str) -> np.ndarray:
    """The channel's sub-patches (n, q): those of smallest hash, whatever workers drew them."""
    commits = step.log.committed()
    tables = [
        read_table(step.run.store, commits[one].files[SUBPATCHES_STAGE]) for one in step.shards_of(channel)
    ]
    parts = [Subpatches(read_float_rows(table), table.column("priority").to_numpy()) for table in tables]
    return Subpatches.merge(parts, step.settings.training.num_subpatches).rows


@dataclass(frozen=True, eq=False)
class LayerStep(Step):
    """Learns one layer from the sub-patches that were drawn for it."""

    layer: int  # counted from 0

    sections = TRAINING_SECTIONS
    label_fields = ("layer",)

    @property
    def drawn(self) -> DrawSubpatches:
        return DrawSubpatches(self.run, self.layer)


class SearchRates(LayerStep):
    """The error that each candidate of the learning rate ends with; one shard per channel and candidate."""

    name = "search_rates"

    def shards_of(self, position: int) -> Sequence[int]:
        training = self.settings.training
        count = training.sgd_rate_candidates if training.solver == "sgd" else 0
        return range(position * count, (position + 1) * count)

    def shard_ids(self) -> Sequence[int]:
        return [shard_id for position in self.drawn.positions() for shard_id in self.shards_of(position)]

    def pose(self, position: int) -> tuple[PairProblem, torch.Tensor]:
        """What a channel's layer has to learn, and the filters that every candidate begins with."""
        spec, training = require_ckn(self.settings.channels[position]), self.settings.training
        rows = read_subpatches(self.drawn, spec.channel)
        alpha = choose_alpha(rows, spec.alpha_quantile)
        problem = pose_problem(torch.from_numpy(rows).to(self.settings.numerics.device), alpha, training)
        num_filters = spec.layers[self.layer].num_filters
        return problem, draw_filters(problem, num_filters, training.seed)

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        training = self.settings.training
        position, candidate = divmod(shard_id, training.sgd_rate_candidates)
        problem, start = self.pose(position)
        rate = candidate_rates(training)[candidate]
        error = try_rate(problem, start, rate, training)
        return ShardResult(report={"rate": rate, "error": error if math.isfinite(error) else None})


def read_rate(step: SearchRates, position: int) -> float | None:
    """The best candidate of a channel; None where nothing is searched."""
    shard_ids = step.shards_of(position)
    if not shard_ids:
        return None
    commits = step.log.committed()
    reports = [commits[shard_id].report for shard_id in shard_ids]
    errors = [math.inf if report["error"] is None else report["error"] for report in reports]
    return choose_rate([report["rate"] for report in reports], errors)


class TrainLayer(LayerStep):
    """One layer more of each channel's CKN, at the best rate that was found; one shard per channel."""

    name = "train_layer"
    version = 2

    def shard_ids(self) -> Sequence[int]:
        return self.drawn.positions()

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        spec = require_ckn(self.settings.channels[shard_id])
        below = read_ckn_below(self.run, self.settings, spec.channel, self.layer)
        subpatches = read_subpatches(self.drawn, spec.channel)
        ckn = self.learn(shard_id, below, subpatches)
        return save_result(self.run, f"ckn-{spec.channel}", ckn.to_part(), subpatches=len(subpatches))

    def learn(self, shard_id: int, below: Ckn, subpatches: np.ndarray) -> Ckn:
        """The CKN with one layer more; the estimate has a quicker one."""
        spec, training = require_ckn(self.settings.channels[shard_id]), self.settings.training
        rate = read_rate(SearchRates(self.run, self.layer), shard_id)
        return add_layer(below, spec, subpatches, training, rate=rate, device=self.settings.numerics.device)


def list_layer_labels(run: RunFolder, settings: Settings, below: int | None = None) -> list[str]:
    """What the layers below one, or all of them, are filed under, lowest first."""
    count = max(channel.num_layers for channel in settings.channels) if below is None else below
    return [TrainLayer(run, layer).label for layer in range(count)]


def save_result(run: RunFolder, name: str, part: ModelPart, **report: Any) -> ShardResult:
    """One model as the output of a training shard."""
    return ShardResult(files={name: save_model(run.store, name, part)}, report=report)
