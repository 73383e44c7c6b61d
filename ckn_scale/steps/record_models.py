"""Models between steps: what a training step saved, what the next one loads, and their generation.

A generation record (`models/000001.json`) names every model of the run at once; encoding and
queries load that, never "the latest file".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ckn_scale.config import Settings, parse_settings
from ckn_scale.core.encoder import encoder_metadata
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.errors import CorruptData, InputError, RunMismatch
from ckn_scale.step import ShardResult
from ckn_scale.steps.sample_patches import make_preprocessor
from ckn_scale.storage.models import load_model, save_model
from ckn_scale.storage.run_folder import RunFolder, description_path, split_generation_url
from ckn_scale.storage.run_records import Generation
from ckn_scale.storage.stored_files import StoredFile, find_damage


def layer_logs(below: int) -> list[str]:
    """The records of the layers before `below`, in order."""
    return [f"train_layer-{layer}" for layer in range(below)]


def trained_logs(settings: Settings) -> list[str]:
    """The records of everything that is learned; of models with one name the last one counts."""
    layers = max(len(channel.ckn.layers) for channel in settings.channels)
    return [*layer_logs(layers), "train_projection", "train_codebook", "train_reduction"]


def save_result(run: RunFolder, name: str, part: ModelPart, **report: Any) -> ShardResult:
    """One model as the output of a training shard."""
    return ShardResult(files={name: save_model(run.store, name, part)}, report=report)


def find_models(run: RunFolder, logs: Sequence[str]) -> dict[str, StoredFile]:
    """The models that committed training shards name; a later log's replaces an earlier one's."""
    return {
        name: file
        for log in logs
        for commit in run.commits(log).committed().values()
        for name, file in commit.files.items()
    }


def load_parts(run: RunFolder, models: Mapping[str, StoredFile]) -> dict[str, ModelPart]:
    return {name: load_model(run.store, name, file) for name, file in models.items()}


def load_trained(run: RunFolder, logs: Sequence[str], *names: str) -> dict[str, ModelPart]:
    """Models of these names that training shards have committed so far."""
    found = find_models(run, logs)
    return load_parts(run, {name: found[name] for name in names})


def encoder_part(settings: Settings) -> ModelPart:
    metadata = encoder_metadata(
        make_preprocessor(settings),
        {channel.ckn.channel: channel.weight for channel in settings.channels},
        intra_normalise=settings.vlad.intra_normalise,
        numerics=settings.numerics.model_dump(),
    )
    return ModelPart({"format": np.array([1], np.int32)}, metadata)


def record_generation(run: RunFolder, settings: Settings) -> int:
    """Bind the trained models into one generation, unless there is one already."""
    recorded = run.models.latest()
    if recorded is not None:
        return recorded.number
    encoder = save_model(run.store, "encoder", encoder_part(settings))
    models = {"encoder": encoder, **find_models(run, trained_logs(settings))}
    return run.models.create(Generation(run.models.next_number(), models)).record.number


def repair_models(run: RunFolder, settings: Settings) -> bool:
    """Look at every byte of the run's models; True when some have to be learned again."""
    generation = run.models.latest()
    if generation is None:
        return False
    damaged = [name for name, file in generation.models.items() if find_damage(run.store, [file])]
    if damaged and generation.taken_from is not None:
        raise CorruptData(f"the models {damaged} are damaged; copy them again from {generation.taken_from}")
    if "encoder" in damaged:
        save_model(run.store, "encoder", encoder_part(settings))
    return bool(set(damaged) - {"encoder"})


MODEL_SECTIONS = ("channels", "images", "keypoints", "patches", "sample", "training", "vlad", "reduction")


def settings_for_models(settings: Settings, source: str | None) -> Settings:
    """`settings` with all that made the models of another run taken from that run."""
    if source is None:
        return settings
    theirs = RunFolder.open(split_generation_url(source)[0]).settings
    mine = settings.model_dump(mode="json")
    wanted = {name: theirs[name] for name in (*MODEL_SECTIONS, "numerics")}
    return parse_settings({**mine, **wanted})


def adopt_models(run: RunFolder, source: str) -> None:
    """Take over the models of another run (its folder, or one of its `models/000001.json` records)."""
    url, number = split_generation_url(source)
    other = RunFolder.open(url)
    generations = {one.number: one for one in other.models.all()}
    theirs = generations.get(number or max(generations, default=0))
    if theirs is None:
        raise InputError(f"{other.url} has no models to take over: train it first")
    recorded = run.models.latest()
    if recorded is not None:
        if recorded.models != theirs.models:
            raise RunMismatch(
                f"{run.url} has models of its own, others than those of {source}: leave --models out to go "
                "on with them, or use another run folder"
            )
        return
    for file in theirs.models.values():
        for path in (file.path, description_path(file.path)):
            if not run.store.exists(path):
                run.store.create(path, other.store.read(path))
    run.models.create(Generation(1, theirs.models, f"{other.url} {theirs.number}"))


def read_generation(run: RunFolder) -> Generation:
    generation = run.models.latest()
    if generation is None:
        raise InputError(f"{run.url} has no models yet: run `ckn-scale train` first")
    return generation
