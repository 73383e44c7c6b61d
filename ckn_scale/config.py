"""Settings: *what* is computed (in the fingerprints of the steps it concerns) apart from *how* (in no byte).

Presets are TOML files in `ckn_scale/presets`; `--config FILE` and `--set key.path=value` lie over
them. Models are frozen and closed: a misspelt key stops the job in its first second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    field_serializer,
    model_serializer,
    model_validator,
)

from ckn_scale.core.specs import (
    NETWORK_NAMES,
    PAIR_NETWORKS,
    ChannelSpec,
    CknTrainingSpec,
    ImageSpec,
    KeypointSpec,
    NetworkSpec,
    PatchSpec,
    PointsSpec,
    ReductionSpec,
    VladSpec,
)
from ckn_scale.errors import SettingsError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RENAMED = {"encode.max_descriptors": "points.max_points"}  # keys of earlier releases
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
DEFAULT_PRESET = "fast"


class Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PlanSettings(Closed):
    images_per_shard: Count = 256  # at most: small collections are cut finer, see steps.plan.shard_size


class SampleSettings(Closed):
    """The images everything is learned on, chosen by hash."""

    num_images: Count = 20_000
    num_patches: Count = 100_000  # over all sampled images, evenly
    images_per_shard: Count = 64  # at most, as above
    seed: int = 0


class EncodeSettings(Closed):
    thumbnail_side_px: Count = 256
    image_deadline_s: Annotated[float, Field(gt=0)] = 60.0  # an image that takes longer is a row: timeout


class IndexSettings(Closed):
    shards_per_index_shard: Count = 64  # how many encode shards one index shard holds
    # How rows are found. exact and signs compare all of them, as reduction.stored keeps them; pq looks at
    # short codes of all in memory and compares a shortlist; ivf-pq looks at codes in the nearest lists.
    # auto: by the number of rows and their bytes, if planted queries confirm it.
    kind: Literal["auto", "exact", "signs", "pq", "ivf-pq"] = "auto"
    # Database-side augmentation: each row is joined with so many of its nearest neighbours; 0: with none.
    augment: Annotated[int, Field(ge=0, le=20)] = 0

    @model_serializer(mode="wrap")
    def _leave_out_what_is_off(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without augmentation the section is what it was before there was any: runs of then go on."""
        tree: dict[str, Any] = dump(self)
        return tree if self.augment else {key: value for key, value in tree.items() if key != "augment"}


class PublishSettings(Closed):
    """The gate: planted queries must come back first, by the lower end of a confidence interval."""

    num_queries: Count = 200
    queries_per_shard: Count = 32
    target: Share = 0.8
    confidence: Share = 0.95
    # Nothing is published when more than this share of the images that no version holds yet could not be
    # used, or of those that the current version holds is lost since. What was published with its failures,
    # within the share or by --accept, is not held against a later append.
    max_failed_share: Share = 0.02
    # `--sync` deletes nothing when more than this share of what a source had is gone from it.
    max_gone_share: Share = 0.2


class NumericsSettings(Closed):
    """The numerics class: within one, bytes are equal whatever the number of workers."""

    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    threads: Count = 1
    batch_patches: Annotated[int, Field(ge=64)] = 256


class Settings(Closed):
    """What is computed, section by section; frozen, and closed to keys it does not know."""

    channels: Annotated[tuple[ChannelSpec, ...], Field(min_length=1)]
    images: ImageSpec = ImageSpec()
    keypoints: KeypointSpec = KeypointSpec()
    patches: PatchSpec = PatchSpec()
    plan: PlanSettings = PlanSettings()
    sample: SampleSettings = SampleSettings()
    training: CknTrainingSpec = CknTrainingSpec()
    vlad: VladSpec = VladSpec()
    reduction: ReductionSpec = ReductionSpec()
    points: PointsSpec = PointsSpec()
    encode: EncodeSettings = EncodeSettings()
    index: IndexSettings = IndexSettings()
    publish: PublishSettings = PublishSettings()
    numerics: NumericsSettings = NumericsSettings()

    @field_serializer("channels", mode="wrap")
    def _leave_out_other_kinds(
        self, channels: tuple[ChannelSpec, ...], dump: SerializerFunctionWrapHandler
    ) -> list[dict[str, Any]]:
        """A CKN's channel is what it was before there were other networks: runs of then go on."""
        kinds = ("ckn", "network")
        return [
            {key: value for key, value in tree.items() if key not in kinds or value is not None}
            for tree in dump(channels)
        ]

    @model_validator(mode="after")
    def _check_points(self) -> Settings:
        repeated = [name for name in self.channel_names if self.channel_names.count(name) > 1]
        if repeated:
            raise ValueError(f"channels has {repeated[0]!r} twice")
        unknown = [name for name in self.points.channels if name not in self.channel_names]
        if unknown and self.points.max_points:
            described = ", ".join(self.channel_names)
            raise ValueError(
                f"points.channels names {unknown[0]!r}, but the channels of images are {described} "
                "(points.max_points=0 keeps no points)"
            )
        return self

    @model_validator(mode="after")
    def _check_kind(self) -> Settings:
        whole = {"exact": "float16", "signs": "signs"}.get(self.index.kind)
        if whole is not None and whole != self.reduction.stored:
            raise ValueError(
                f"index.kind = {self.index.kind} compares vectors stored as {whole}, "
                f"but reduction.stored is {self.reduction.stored}"
            )
        return self

    @property
    def channel_names(self) -> list[str]:
        return [channel.name for channel in self.channels]

    @property
    def point_channels(self) -> list[str]:
        """The channels that describe points for matching; none when no points are kept."""
        return list(self.points.channels) if self.points.max_points else []


class Resources(Closed):
    """How the work is done; never changes a byte of the result."""

    workers: Annotated[int, Field(ge=0)] = 1  # 0: this process itself
    ray: Literal["local", "auto"] | None = None
    gpus_per_worker: Annotated[float, Field(gt=0)] = 1.0  # on Ray, with numerics.device = cuda
    read_ahead: Count = 4  # images read and decoded ahead of the encoder, per worker
    read_deadline_s: Annotated[float, Field(gt=0)] = 300.0  # an image not read by then fails its shard
    image_memory_mb: Annotated[int, Field(ge=64)] = 1024  # for images read and decoded ahead, per worker
    shard_deadline_s: Annotated[float, Field(gt=0)] = 3600.0
    max_attempts: Count = 4  # of one shard, before the run says it failed


def list_presets() -> list[str]:
    folder = resources.files("ckn_scale") / "presets"
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_settings(
    preset: str = DEFAULT_PRESET,
    config_file: str | None = None,
    overrides: Sequence[str] = (),
    *,
    descriptor: str | None = None,
    weights: Sequence[str] = (),
    choose_device: Callable[[], str] | None = None,
    recorded: Mapping[str, Any] | None = None,
) -> Settings:
    """The preset, then the file, then `key.path=value` pairs over it, then the channels that are named.

    `choose_device` is asked for `numerics.device` where none of them names it. The settings that a run has
    `recorded` take the place of the preset.
    """
    tree = _read_preset(preset) if recorded is None else deepcopy(dict(recorded))
    if config_file is not None:
        _merge(tree, _read_toml(config_file))
    for override in overrides:
        _apply_override(tree, override)
    if choose_device is not None:
        numerics = tree.setdefault("numerics", {})
        if isinstance(numerics, dict) and "device" not in numerics:
            numerics["device"] = choose_device()
    settings = parse_settings(tree)
    if descriptor is None:
        if weights:
            raise SettingsError("--weights is of no use without --descriptor")
        return settings
    return with_channels(settings, find_channels(settings, descriptor, weights))


def load_spare_channels() -> dict[str, ChannelSpec]:
    """By name, the channels that can be evaluated though the preset does not index with them."""
    path = resources.files("ckn_scale") / "presets" / "spare" / "channels.toml"
    channels = tomllib.loads(path.read_text(encoding="utf-8"))["channels"]
    specs = TypeAdapter(tuple[ChannelSpec, ...]).validate_python(channels)
    return {spec.name: spec for spec in specs}


CKNS = ("grad", "white", "raw")
CKN_GROUPS = ("ckn", "ckn-mix")


def find_channels(settings: Settings, name: str, weights: Sequence[str] = ()) -> tuple[ChannelSpec, ...]:
    """What a descriptor's name stands for.

    sift  rootsift  tfeat  …             a network, with what `weights` gives it: FILE or NAME=FILE
    ckn-grad  ckn-white  ckn-raw         one CKN of the settings, or a small one where they have none
    ckn                                  all channels of the settings: what the preset indexes with
    ckn-mix                              the paper's mix: grad, white and raw
    rootsift+ckn-white                   several, side by side
    """
    if "+" in name:
        return tuple(
            one for part in name.split("+") for one in find_channels(settings, part.strip(), weights)
        )
    if name in NETWORK_NAMES:
        return (ChannelSpec(network=_find_network(name, weights)),)
    if name not in (*CKN_GROUPS, *(f"ckn-{one}" for one in CKNS)):
        known = [*(f"ckn-{one}" for one in CKNS), *CKN_GROUPS, *NETWORK_NAMES]
        raise SettingsError(f"unknown descriptor {name!r}; there are: {', '.join(known)}")
    groups = dict(zip(CKN_GROUPS, (settings.channel_names, CKNS), strict=True))
    channels = load_spare_channels() | {one.name: one for one in reversed(settings.channels)}
    return tuple(channels[one] for one in groups.get(name, [name.removeprefix("ckn-")]))


def with_channels(settings: Settings, channels: Sequence[ChannelSpec]) -> Settings:
    """The settings with other channels; the first describes points, unless those that do are among them."""
    names = [one.name for one in channels]
    described = settings.points.channels
    if not set(described) <= set(names):
        described = (names[0],)
    points = replace(settings.points, channels=described)
    changed = settings.model_copy(update={"channels": tuple(channels), "points": points})
    return parse_settings(changed.model_dump(mode="json"))


def _find_network(name: str, weights: Sequence[str]) -> NetworkSpec:
    spec = NetworkSpec(name)
    return replace(spec, weights=find_weights(name, weights)) if spec.takes_weights else spec


def find_weights(name: str, weights: Sequence[str]) -> str | None:
    """The file of NAME=FILE for this name, or one without a name, which is for whatever takes weights."""
    files = dict(_split_weights(one) for one in weights)
    return files.get(name, files.get(""))


def _split_weights(text: str) -> tuple[str, str]:
    name, equals, file = text.partition("=")
    return (name, file) if equals and name in (*NETWORK_NAMES, *PAIR_NETWORKS) else ("", text)


def parse_settings(tree: Mapping[str, Any]) -> Settings:
    """Settings from a tree of plain values; SettingsError names the first key or value that is wrong."""
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(_one_line(error)) from None


def _read_preset(name: str) -> dict[str, Any]:
    if name not in list_presets():
        raise SettingsError(f"no preset named {name!r}; there are: {', '.join(list_presets())}")
    text = (resources.files("ckn_scale") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    return dict(tomllib.loads(text))


def _read_toml(path: str) -> dict[str, Any]:
    try:
        return dict(tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise SettingsError(f"no such settings file: {path}") from None
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from None


def _merge(tree: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


def _apply_override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise SettingsError(f"--set takes key.path=value, got {override!r}")
    node: Any = tree
    *parents, last = path.strip().split(".")
    for part in parents:
        node = _descend(node, part, path)
    if isinstance(node, list):
        node[_list_position(node, last, path)] = _parse_value(text)
    else:
        node[last] = _parse_value(text)


def _descend(node: Any, part: str, path: str) -> Any:
    if isinstance(node, list):
        return node[_list_position(node, part, path)]
    child = node.setdefault(part, {})
    if not isinstance(child, dict | list):
        raise SettingsError(f"--set {path}: {part} holds a value, not settings")
    return child


def _list_position(node: list[Any], part: str, path: str) -> int:
    if not part.isdigit() or int(part) >= len(node):
        raise SettingsError(f"--set {path}: {part!r} is not a position from 0 to {len(node) - 1}")
    return int(part)


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        renamed = f": it is {RENAMED[key]!r} now" if key in RENAMED else ""
        return f"unknown setting {key!r}{renamed}"
    if first["type"] == "missing":
        return f"setting {key!r} is missing"
    if first["type"] == "value_error":  # the spec's own sentence names the value
        message = first["msg"].removeprefix("Value error, ")
        return f"{key}: {message}" if key else message  # what concerns several sections names them itself
    return f"{key}: {first['msg']} (got {first['input']!r})"


def parse_resources(tree: Mapping[str, Any]) -> Resources:
    """The same for resources."""
    try:
        return Resources.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(_one_line(error)) from None
