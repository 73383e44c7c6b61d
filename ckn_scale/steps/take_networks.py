"""Take: networks that are not learned here, with the weights that a user gave, become models of the run.

A weights' file is read when the run is planned and never again: the run keeps what it holds as a model named
by its content, and in the settings `sha256:…` stands for the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ckn_scale.config import Settings, parse_settings
from ckn_scale.core.descriptors.catalogue import make_part
from ckn_scale.core.descriptors.network import make_network_part
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.specs import ChannelSpec, NetworkSpec
from ckn_scale.errors import InputError
from ckn_scale.step import ShardResult, WorkerSettings
from ckn_scale.steps.train_layers import TRAINING_SECTIONS, ChannelStep, list_layer_labels, save_result
from ckn_scale.storage.input_files import read_input, stat_input
from ckn_scale.storage.models import encode_model, load_model, save_model
from ckn_scale.storage.run_folder import RunFolder, is_run, model_path
from ckn_scale.storage.stored_files import StoredFile

KEPT = "sha256:"


def read_networks(settings: Settings, run_url: str) -> tuple[Settings, dict[str, ModelPart]]:
    """Settings that name what the weights' files hold instead of the files, and the models by name."""
    parts: dict[str, ModelPart] = {}
    channels = []
    for channel in settings.channels:
        network = channel.network
        if network is not None and network.takes_weights and not _is_kept(network):
            weights = _find_taken(channel, run_url)
            if weights is None:
                part = make_part(network, None if network.weights is None else read_input(network.weights))
                parts[channel.part_name] = part
                weights = KEPT + hashlib.sha256(encode_model(channel.part_name, part)).hexdigest()
            channel = replace(channel, network=replace(network, weights=weights))
        channels.append(channel)
    return settings.model_copy(update={"channels": tuple(channels)}), parts


def keep_networks(run: RunFolder, parts: Mapping[str, ModelPart]) -> None:
    """Write the models into the run, where workers find them by what the settings say."""
    for name, part in parts.items():
        save_model(run.store, name, part)


def load_kept(run: RunFolder, settings: Settings) -> dict[str, ModelPart]:
    """What `keep_networks` wrote."""
    return {
        one.part_name: _load_kept(run, one.part_name, str(one.network.weights))
        for one in settings.channels
        if one.network is not None and one.network.takes_weights
    }


class TakeNetworks(ChannelStep):
    """The model of each channel that is no CKN; one shard per channel."""

    name = "take_networks"
    sections = TRAINING_SECTIONS

    def shard_ids(self) -> Sequence[int]:
        return [one for one, channel in enumerate(self.settings.channels) if channel.network is not None]

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        channel = self.channel(shard_id)
        assert channel.network is not None
        arrays: Mapping[str, np.ndarray] = {}
        if channel.network.takes_weights:
            arrays = _load_kept(self.run, channel.part_name, str(channel.network.weights)).arrays
        part = make_network_part(channel.name, arrays, channel.network.smoothing_px)
        return save_result(self.run, channel.part_name, part)


def list_network_labels(run: RunFolder, settings: Settings) -> list[str]:
    """What the networks of all channels are filed under: learned layers, lowest first, then taken ones."""
    return [*list_layer_labels(run, settings), TakeNetworks.name]


def _is_kept(network: NetworkSpec) -> bool:
    return network.weights is not None and network.weights.startswith(KEPT)


def _find_taken(channel: ChannelSpec, run_url: str) -> str | None:
    """What a run that was planned with these weights has of them, where the file is gone since."""
    assert channel.network is not None
    path = channel.network.weights
    if path is None or not is_run(run_url) or stat_input(path) is not None:
        return None
    planned = parse_settings(RunFolder.open(run_url).settings).channels
    names = [one.network.weights for one in planned if one.name == channel.name and one.network is not None]
    return names[0] if names else None


def _load_kept(run: RunFolder, name: str, weights: str) -> ModelPart:
    digest = weights.removeprefix(KEPT)
    path = model_path(name, digest)
    if not run.store.exists(path):
        raise InputError(f"{run.url} does not hold the weights of {name}: plan it again, with their file")
    return load_model(run.store, name, StoredFile(path, digest, run.store.size(path)))
