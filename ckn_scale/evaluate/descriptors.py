"""Names of descriptors on the command line (`config.py: find_channels`), and the descriptors they stand for.

paper:ckn-grad   is one by another preset than the command's
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckn_scale.config import Settings, find_channels, find_weights
from ckn_scale.core.descriptors.catalogue import load_descriptor, make_part, train_descriptor
from ckn_scale.core.descriptors.deepcompare import PairNetwork, load_pair_network
from ckn_scale.core.descriptors.network import make_network_part
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.specs import PAIR_NETWORKS, ChannelSpec, NetworkSpec
from ckn_scale.errors import InputError
from ckn_scale.evaluate.cache import ContentCache, hash_code, make_key
from ckn_scale.evaluate.layers import CachedLayers
from ckn_scale.evaluate.regions import KeyedDescriptor
from ckn_scale.storage.input_files import read_input

SIDE_OF_NONE = 8  # any will do
PatchSource = Callable[[int], np.ndarray]  # how many training patches are wanted → (N, S, S, 3) uint8


@dataclass(frozen=True)
class Member:
    """One descriptor that can be fitted."""

    label: str
    settings: Settings
    channel: ChannelSpec


@dataclass(frozen=True)
class Request:
    """A row of the table: one member, or several whose rows are concatenated."""

    name: str
    members: tuple[Member, ...]


def parse_requests(
    text: str, load: Callable[[str | None], Settings], weights: Sequence[str] = ()
) -> list[Request]:
    """`load` gives the settings of a preset by its name, the command's own for none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError("--descriptors names no descriptor")
    repeated = [name for position, name in enumerate(names) if name in names[:position]]
    if repeated:
        raise InputError(f"--descriptors names {repeated[0]} twice")
    return [
        Request(
            name,
            tuple(member for part in name.split("+") for member in _parse_part(part.strip(), load, weights)),
        )
        for name in names
    ]


def _parse_part(part: str, load: Callable[[str | None], Settings], weights: Sequence[str]) -> list[Member]:
    preset, colon, name = part.rpartition(":")
    settings = load(preset if colon else None)
    channels = find_channels(settings, name, weights)
    return [Member(f"{preset}{colon}{one.label}", settings, one) for one in channels]


def split_pair_networks(text: str) -> tuple[str, list[str]]:
    """The names of descriptors, and those of networks that compare patches and describe none."""
    names = [name.strip() for name in text.split(",")]
    pairs = [name for name in names if name in PAIR_NETWORKS]
    return ",".join(name for name in names if name not in PAIR_NETWORKS), pairs


def read_pair_network(name: str, weights: Sequence[str]) -> PairNetwork:
    """With the file that `weights` names for it; InputError when it is missing or another's."""
    path = find_weights(name, weights)
    return load_pair_network(name, None if path is None else read_input(path), str(path))


def list_members(requests: Sequence[Request]) -> list[Member]:
    """Every member once, in order."""
    return list({member.label: member for request in requests for member in request.members}.values())


def fit_member(
    member: Member, smoothing_px: float | None, source: PatchSource, cache: ContentCache
) -> KeyedDescriptor:
    """The descriptor behind a member; what is learned is learned on the source's patches, or in the cache.

    `smoothing_px` blurs the patch first; by default as the member's own settings say.
    """
    channel, settings = member.channel, member.settings
    if smoothing_px is not None:
        channel = channel.smoothed(smoothing_px)
    network = None if channel.network is None else read_network(channel.network)
    count = _count_patches(channel, settings)
    patches = source(count) if count else np.empty((0, SIDE_OF_NONE, SIDE_OF_NONE, 3), np.uint8)
    numerics = settings.numerics
    weights = [] if network is None else [network.arrays[name] for name in sorted(network.arrays)]
    key = make_key(
        *("descriptor", hash_code(), numerics.model_dump(), patches, channel, settings.training), *weights
    )
    options = {"batch_size": numerics.batch_patches, "device": numerics.device, "dtype": numerics.dtype}
    arrays = cache.load(key)
    if arrays is None:
        layers = CachedLayers(
            cache, numerics.model_dump(), settings.training, patches[: settings.training.num_patches]
        )
        arrays = _train(channel, settings, patches, network, layers, options)
        cache.save(key, arrays)
    seconds, metadata = float(arrays.pop("seconds")[0]), json.loads(arrays.pop("metadata").tobytes())
    descriptor = load_descriptor(ModelPart(arrays, metadata), **options)
    return KeyedDescriptor(descriptor, key, round(seconds, 3), options)


def read_network(spec: NetworkSpec) -> ModelPart:
    """The model of a network that is no CKN; InputError when its weights' file is missing or another's."""
    part = make_part(spec, None if spec.weights is None else read_input(spec.weights))
    return make_network_part(spec.name, part.arrays, spec.smoothing_px)


def _count_patches(channel: ChannelSpec, settings: Settings) -> int:
    """How many the member learns from."""
    learned = settings.training.num_patches if channel.ckn is not None else 0
    return max(learned, channel.num_descriptors if channel.projection is not None else 0)


def _train(
    channel: ChannelSpec,
    settings: Settings,
    patches: np.ndarray,
    network: ModelPart | None,
    layers: CachedLayers,
    options: dict[str, Any],
) -> dict[str, np.ndarray]:
    """Arrays for the cache, which holds nothing else: the metadata are among them, as JSON."""
    started = time.perf_counter()
    trained = train_descriptor(patches, channel, settings.training, network, store=layers, **options)
    arrays, metadata = trained.to_part()
    return {
        **arrays,
        "metadata": np.frombuffer(json.dumps(metadata).encode(), np.uint8),
        "seconds": np.array([time.perf_counter() - started + layers.reused_s]),
    }
