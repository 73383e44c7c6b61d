"""Training steps whose shards are channels, or the parts of the sample once per channel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from ckn_scale.core.specs import ChannelSpec
from ckn_scale.steps.base import Step
from ckn_scale.steps.sample_patches import SamplePatches

TRAINING_SECTIONS = ("images", "keypoints", "patches", "sample", "channels", "training")


class ChannelStep(Step):
    """One shard per channel: channels train on different workers."""

    def shard_ids(self) -> Sequence[int]:
        return range(len(self.settings.channels))

    def channel(self, shard_id: int) -> ChannelSpec:
        return self.settings.channels[shard_id]


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
