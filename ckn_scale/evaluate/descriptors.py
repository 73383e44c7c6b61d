"""Names of descriptors on the command line, and the descriptors they stand for.

sift  rootsift  ckn-grad  ckn-white  ckn-raw     one descriptor
ckn                                              all channels of the preset: what it indexes with
ckn-mix                                          the paper's mix: grad, white and raw
ckn-grad+ckn-white                               concatenated
paper:ckn-grad                                   by another preset than the command's
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckn_scale.config import Settings, load_spare_channels
from ckn_scale.core.descriptors.ckn import CknDescriptor, train_descriptor
from ckn_scale.core.descriptors.sift import SiftDescriptor
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.specs import ChannelSpec
from ckn_scale.errors import InputError
from ckn_scale.evaluate.cache import ContentCache, hash_code, make_key
from ckn_scale.evaluate.layers import CachedLayers
from ckn_scale.evaluate.regions import KeyedDescriptor

SIFTS = {"sift": False, "rootsift": True}
CHANNELS = ("grad", "white", "raw")
GROUPS = ("ckn", "ckn-mix")

PatchSource = Callable[[int], np.ndarray]  # how many training patches are wanted → (N, S, S, 3) uint8


@dataclass(frozen=True)
class Member:
    """One descriptor that can be fitted: SIFT when `channel` is none."""

    label: str
    settings: Settings
    channel: ChannelSpec | None = None

    @property
    def weight(self) -> float:
        """Of its similarities in a mix of image vectors."""
        return 1.0 if self.channel is None else self.channel.weight


@dataclass(frozen=True)
class Request:
    """A row of the table: one member, or several whose rows are concatenated."""

    name: str
    members: tuple[Member, ...]


def parse_requests(text: str, load: Callable[[str | None], Settings]) -> list[Request]:
    """`load` gives the settings of a preset by its name, the command's own for none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError("--descriptors names no descriptor")
    repeated = [name for position, name in enumerate(names) if name in names[:position]]
    if repeated:
        raise InputError(f"--descriptors names {repeated[0]} twice")
    return [
        Request(name, tuple(member for part in name.split("+") for member in _parse_part(part.strip(), load)))
        for name in names
    ]


def _parse_part(part: str, load: Callable[[str | None], Settings]) -> list[Member]:
    preset, colon, kind = part.rpartition(":")
    if kind in SIFTS and not colon:
        return [Member(kind, load(None))]
    if kind in GROUPS or kind in [f"ckn-{channel}" for channel in CHANNELS]:
        settings = load(preset if colon else None)
        groups = dict(zip(GROUPS, (settings.channel_names, CHANNELS), strict=True))
        names = groups.get(kind, [kind.removeprefix("ckn-")])
        channels = load_spare_channels() | {one.ckn.channel: one for one in reversed(settings.channels)}
        return [Member(f"{preset}{colon}ckn-{one}", settings, channels[one]) for one in names]
    known = [*SIFTS, *(f"ckn-{channel}" for channel in CHANNELS), *GROUPS]
    raise InputError(f"unknown descriptor {part!r}; there are: {', '.join(known)}")


def list_members(requests: Sequence[Request]) -> list[Member]:
    """Every member once, in order."""
    return list({member.label: member for request in requests for member in request.members}.values())


def fit_member(
    member: Member, smoothing_px: float | None, source: PatchSource, cache: ContentCache
) -> KeyedDescriptor:
    """The descriptor behind a member; learned ones are fitted on the source's patches, or found in the cache.

    `smoothing_px` blurs the patch first; by default as the member's own settings say.
    """
    if member.channel is None:
        options = {} if smoothing_px is None else {"smoothing_px": smoothing_px}
        sift = SiftDescriptor(root=SIFTS[member.label], **options)
        key = make_key("sift", hash_code(), sift.root, sift.window_sigma, sift.smoothing_px)
        return KeyedDescriptor(sift, key)
    channel = member.channel
    if smoothing_px is not None:
        channel = replace(channel, ckn=replace(channel.ckn, input_blur_px=smoothing_px))
    return _fit_ckn(channel, member.settings, source, cache)


def _fit_ckn(
    channel: ChannelSpec, settings: Settings, source: PatchSource, cache: ContentCache
) -> KeyedDescriptor:
    patches = source(max(settings.training.num_patches, channel.projection.num_descriptors))
    numerics = settings.numerics
    key = make_key(
        "ckn", hash_code(), numerics.model_dump(), patches, channel.ckn, channel.projection, settings.training
    )
    options = {"batch_size": numerics.batch_patches, "device": numerics.device, "dtype": numerics.dtype}
    arrays = cache.load(key)
    if arrays is None:
        layers = CachedLayers(
            cache, numerics.model_dump(), settings.training, patches[: settings.training.num_patches]
        )
        arrays = _train(channel, settings, patches, layers, options)
        cache.save(key, arrays)
    seconds, metadata = float(arrays.pop("seconds")[0]), json.loads(arrays.pop("metadata").tobytes())
    descriptor = CknDescriptor.from_part(ModelPart(arrays, metadata), **options)
    return KeyedDescriptor(descriptor, key, round(seconds, 3), options)


def _train(
    channel: ChannelSpec,
    settings: Settings,
    patches: np.ndarray,
    layers: CachedLayers,
    options: dict[str, Any],
) -> dict[str, np.ndarray]:
    """Arrays for the cache, which holds nothing else: the metadata are among them, as JSON."""
    started = time.perf_counter()
    trained = train_descriptor(patches, channel, settings.training, store=layers, **options)
    arrays, metadata = trained.to_part()
    return {
        **arrays,
        "metadata": np.frombuffer(json.dumps(metadata).encode(), np.uint8),
        "seconds": np.array([time.perf_counter() - started + layers.reused_s]),
    }
