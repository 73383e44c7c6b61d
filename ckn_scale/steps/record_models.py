"""Models between steps: what a training step saved, what the next one loads, and their generation.

A generation record (`models/000001.json`) names every model of the run at once; encoding and
queries load that, never "the latest file".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ckn_scale.config import Settings, parse_settings
from ckn_scale.core.encoder import ModelPart, encoder_metadata
from ckn_scale.errors import CorruptData, InputError, RunMismatch
from ckn_scale.runners.step import ShardResult
from ckn_scale.steps.sample_patches import make_preprocessor
from ckn_scale.storage.models import ModelFile, load_model, save_model
from ckn_scale.storage.records import new_attempt
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.shards import DataFile


def layer_logs(below: int) -> list[str]:
    """The records of the layers before `below`, in order."""
    return [f"train_layer-{layer}" for layer in range(below)]


def trained_logs(settings: Settings) -> list[str]:
    """The records of everything that is learned; of models with one name the last one counts."""
    layers = max(len(channel.ckn.layers) for channel in settings.channels)
    return [*layer_logs(layers), "train_projection", "train_codebook", "train_reduction"]


def save_result(
    run: RunFolder, name: str, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any], **report: Any
) -> ShardResult:
    """One model as the output of a training shard."""
    saved = save_model(run.store, name, arrays, metadata)
    size_bytes = run.store.size(saved.path)
    file = DataFile(path=saved.path, sha256=saved.sha256, rows=0, size_bytes=size_bytes)
    return ShardResult(files={name: file}, report=report)


def find_models(run: RunFolder, logs: Sequence[str]) -> dict[str, ModelFile]:
    """The models that committed training shards name; a later log's stands for an earlier one's."""
    return {
        name: ModelFile(name, file.path, file.sha256)
        for log in logs
        for commit in run.commits(log).committed().values()
        for name, file in commit.files.items()
    }


def load_model_named(run: RunFolder, logs: Sequence[str], name: str) -> ModelPart:
    return load_model(run.store, find_models(run, logs)[name])


def load_parts_named(run: RunFolder, logs: Sequence[str], names: Sequence[str]) -> dict[str, ModelPart]:
    found = find_models(run, logs)
    return {name: load_model(run.store, found[name]) for name in names}


def load_parts(run: RunFolder, models: Mapping[str, ModelFile]) -> dict[str, ModelPart]:
    return {name: load_model(run.store, file) for name, file in models.items()}


def encoder_part(settings: Settings) -> ModelPart:
    metadata = encoder_metadata(
        make_preprocessor(settings),
        {channel.ckn.channel: channel.weight for channel in settings.channels},
        intra_normalise=settings.vlad.intra_normalise,
        numerics=settings.numerics.model_dump(),
    )
    return {"format": np.array([1], np.int32)}, metadata


def record_generation(run: RunFolder, settings: Settings) -> int:
    """Bind the trained models into generation 1, unless one stands already."""
    standing = run.models.latest()
    if standing is not None:
        return standing[0]
    encoder = save_model(run.store, "encoder", *encoder_part(settings))
    models = {"encoder": encoder, **find_models(run, trained_logs(settings))}
    files = {name: {"path": file.path, "sha256": file.sha256} for name, file in sorted(models.items())}
    number = max(run.models.numbers(), default=0) + 1  # a damaged record keeps its number
    run.models.create(number, {"attempt": new_attempt(), "models": files})
    return number


def repair_models(run: RunFolder, settings: Settings) -> bool:
    """Look at every byte of the run's models; True when some have to be learned again."""
    body = (run.models.latest() or (0, {"models": {}}))[1]
    damaged = [name for name, file in body["models"].items() if not _is_whole(run, ModelFile(name, **file))]
    if damaged and "taken_from" in body:
        raise CorruptData(f"the models {damaged} are damaged; copy them again from {body['taken_from']}")
    if "encoder" in damaged:
        save_model(run.store, "encoder", *encoder_part(settings))
    return bool(set(damaged) - {"encoder"})


def _is_whole(run: RunFolder, file: ModelFile) -> bool:
    try:
        load_model(run.store, file)
    except CorruptData:
        return False
    return True


MODEL_SECTIONS = ("channels", "images", "keypoints", "patches", "sample", "training", "vlad", "reduction")


def settings_for_models(settings: Settings, source: str | None) -> Settings:
    """`settings` with all that made the models of another run taken from that run."""
    if source is None:
        return settings
    theirs = RunFolder.open(_split_source(source)[0]).settings
    mine = settings.model_dump(mode="json")
    wanted = {name: theirs[name] for name in (*MODEL_SECTIONS, "numerics")}
    return parse_settings({**mine, **wanted})


def _split_source(source: str) -> tuple[str, str]:
    """A run's url and the number of one of its generations, or nothing: the latest."""
    if not source.endswith(".json"):
        return source, ""
    url, _, record = source.rpartition("/models/")
    return url, record.removesuffix(".json")


def adopt_models(run: RunFolder, source: str) -> None:
    """Take over the models of another run (its folder, or one of its `models/000001.json` records)."""
    url, record = _split_source(source)
    other = RunFolder.open(url)
    bodies = dict(other.models.all())
    number = int(record) if record else max(bodies, default=0)
    if number not in bodies:
        raise InputError(f"{other.url} has no models to take over: train it first")
    standing = run.models.latest()
    if standing is not None:
        if standing[1]["models"] != bodies[number]["models"]:
            raise RunMismatch(
                f"{run.url} has models of its own, others than those of {source}: leave --models out to go "
                "on with them, or use another run folder"
            )
        return
    for file in bodies[number]["models"].values():
        for path in (file["path"], file["path"].removesuffix(".safetensors") + ".json"):
            if not run.store.exists(path):
                run.store.create(path, other.store.read(path))
    run.models.create(
        1,
        {"attempt": new_attempt(), "models": bodies[number]["models"], "taken_from": f"{other.url} {number}"},
    )


def read_generation(run: RunFolder) -> tuple[int, dict[str, ModelFile]]:
    standing = run.models.latest()
    if standing is None:
        raise InputError(f"{run.url} has no models yet: run `ckn-scale train` first")
    number, body = standing
    return number, {name: ModelFile(name, **file) for name, file in body["models"].items()}
