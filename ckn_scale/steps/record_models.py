"""Record: the models that were learned, or another run's, become the run's generation of models.

A generation record (`models/000001.json`) names every model of the run at once.
"""

from __future__ import annotations

from ckn_scale.config import Settings, parse_settings
from ckn_scale.errors import CorruptData, InputError, RunMismatch
from ckn_scale.steps.take_networks import list_network_labels
from ckn_scale.steps.train_descriptors import TrainCodebook, TrainPointWords, TrainProjection
from ckn_scale.steps.train_reduction import TrainReduction, encoder_part
from ckn_scale.storage.models import find_trained, save_model
from ckn_scale.storage.run_folder import RunFolder, description_path, split_generation_url
from ckn_scale.storage.run_records import Generation
from ckn_scale.storage.stored_files import find_damage

MODEL_SECTIONS = (
    "channels",
    "images",
    "keypoints",
    "patches",
    "sample",
    "training",
    "vlad",
    "reduction",
    "points",
)


def record_generation(run: RunFolder, settings: Settings) -> int:
    """Bind the trained models into one generation, unless there is one already; its number."""
    recorded = run.models.latest()
    if recorded is not None:
        return recorded.number
    encoder = save_model(run.store, "encoder", encoder_part(settings))
    labels = [
        *list_network_labels(run, settings),
        TrainProjection.name,
        TrainCodebook.name,
        TrainPointWords.name,
        TrainReduction.name,
    ]
    models = {"encoder": encoder, **find_trained(run, labels)}
    return run.models.create(Generation(run.models.next_number(), models)).record.number


def repair_models(run: RunFolder, settings: Settings) -> bool:
    """Look at every byte of the run's models; True when some have to be learned again.

    CorruptData when they come from another run: they cannot be learned here.
    """
    generation = run.models.latest()
    if generation is None:
        return False
    damaged = [name for name, file in generation.models.items() if find_damage(run.store, [file])]
    if damaged and generation.taken_from is not None:
        raise CorruptData(f"the models {damaged} are damaged; copy them again from {generation.taken_from}")
    if "encoder" in damaged:
        save_model(run.store, "encoder", encoder_part(settings))
    return bool(set(damaged) - {"encoder"})


def settings_for_models(settings: Settings, source: str | None) -> Settings:
    """`settings` with all that made the models of another run taken from that run."""
    if source is None:
        return settings
    theirs = RunFolder.open(split_generation_url(source)[0]).settings
    mine = settings.model_dump(mode="json")
    wanted = {name: theirs[name] for name in (*MODEL_SECTIONS, "numerics")}
    return parse_settings({**mine, **wanted})


def adopt_models(run: RunFolder, source: str) -> None:
    """Take over the models of another run (its folder, or one of its `models/000001.json` records).

    InputError when it has none, RunMismatch when this run has others already.
    """
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
