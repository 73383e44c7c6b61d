"""Networks of the paper's other systems, trained here: data from folders, checkpoints, a file of weights.

A checkpoint lies beside the result until that is written; it is gone on from when it was begun with the same
recipe and data.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from ckn_scale.config import SampleSettings
from ckn_scale.core.alexnet_training import make_classifier
from ckn_scale.core.descriptors.weight_files import decode_weights
from ckn_scale.core.images import decode_image
from ckn_scale.core.network_objectives import VIEW_MARGIN, Classes, Labels, Pairs
from ckn_scale.core.network_training import Objective, Recipe, train_network
from ckn_scale.core.specs import ImageSpec, KeypointSpec, PatchSpec
from ckn_scale.errors import ImageRejected, InputError
from ckn_scale.evaluate.cache import ContentCache
from ckn_scale.evaluate.patch_sets import read_views
from ckn_scale.evaluate.regions import RegionReader
from ckn_scale.evaluate.report import write_file
from ckn_scale.evaluate.training_images import Progress, draw_patches, find_images
from ckn_scale.storage.input_files import read_input

_KEY = "ckn_scale_training"
SAVE_EVERY = 500  # steps


# PhilippNet's authors have 16,000 classes of some 150 views each; DeepCompare's batches of 256 pairs.
# AlexNet-Landmarks: a rate of 0.001, divided by ten when it saturates, about every 20 epochs.
EPOCHS = 60  # of alexnet-landmarks
TASKS = {
    "alexnet-landmarks": Recipe(steps=EPOCHS, batch_size=256, rate=1e-3),
    "philippnet": Recipe(steps=30_000, batch_size=128, rate=0.01),
    "philippnet-rome": Recipe(steps=30_000, batch_size=128, rate=0.01),
    **{
        f"deepcompare-{kind}": Recipe(steps=30_000, batch_size=256, rate=0.01)
        for kind in ("siam", "siam2stream", "2ch", "2ch2stream")
    },
}


def make_recipe(name: str, data: Path, *, seed: int = 0, **given: int | float | None) -> Recipe:
    """The default one with what is `given` over it (steps, batch_size, rate)."""
    chosen: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    try:
        recipe = replace(TASKS[name], seed=seed, **chosen)
    except ValueError as error:
        raise InputError(str(error)) from None
    if name == "alexnet-landmarks" and "steps" not in chosen:
        epoch = -(-len(find_images(data)) // recipe.batch_size)
        return replace(recipe, steps=EPOCHS * epoch)
    return recipe


def train(
    name: str,
    data: Path,
    out: Path,
    recipe: Recipe,
    *,
    start: str | None = None,
    num_classes: int = 16_000,
    on_progress: Progress = lambda what, done, total: None,
) -> float:
    """Write the weights to `out`; called again after it was stopped, it goes on. The mean loss of the end."""
    objective = make_objective(name, data, recipe.seed, start, num_classes, on_progress)
    checkpoint = Checkpoint.of(out, name, recipe, data, start)
    losses: list[float] = []

    def show(step: int, loss: float) -> None:
        losses.append(loss)
        del losses[:-100]
        on_progress(name, step, recipe.steps)

    try:
        train_network(
            objective, recipe, checkpoint.read(), on_step=show, save=checkpoint.write, save_every=SAVE_EVERY
        )
    except ValueError as error:
        raise InputError(str(error)) from None
    write_file(out, save_arrays(objective.export(), metadata={_KEY: checkpoint.facts}))
    checkpoint.path.unlink(missing_ok=True)
    return float(np.mean(losses)) if losses else float("nan")


def make_objective(
    name: str, data: Path, seed: int, start: str | None, num_classes: int, on_progress: Progress
) -> Objective:
    """What the network of this name learns from DATA; InputError when DATA does not hold it."""
    if (start is not None) != (name == "alexnet-landmarks"):
        raise InputError(f"--start is for alexnet-landmarks, which needs it: AlexNet's weights; got {name}")
    try:
        if start is not None:
            return _read_labels(data, start, seed)
        if name == "philippnet":
            seeds = draw_seeds(data, num_classes, seed, on_progress)
            return Classes([one[None] for one in seeds], seed=seed)
        groups = read_groups(data)
        return Classes(groups, seed=seed) if name == "philippnet-rome" else Pairs(groups, name, seed)
    except ValueError as error:
        raise InputError(f"{data} does not do for {name}: {error}") from None


def draw_seeds(folder: Path, count: int, seed: int, on_progress: Progress) -> np.ndarray:
    """Patches (N, S, S, 3) of photographs, a class each: regions as the pipeline finds and draws them."""
    spec = PatchSpec(size_px=round(64 * VIEW_MARGIN), region=8 * VIEW_MARGIN)
    reader = RegionReader(ImageSpec(), KeypointSpec(), spec, ContentCache())
    sample = SampleSettings(num_images=20_000, num_patches=count, seed=seed)
    return draw_patches(find_images(folder), reader, sample, on_progress)


def read_groups(folder: Path) -> list[np.ndarray]:
    """The views of each point: one folder each, as `evaluate patches --protocol rome` reads them."""
    views = read_views(folder)
    return [views.patches[views.points == point] for point in np.unique(views.points)]


def _read_labels(folder: Path, start: str, seed: int) -> Labels:
    paths = find_images(folder)
    names = sorted({path.parent.name for path in paths})
    labels = [names.index(path.parent.name) for path in paths]
    weights = decode_weights(read_input(start), start)
    classifier, prepare = make_classifier(weights, len(names), start)

    def read(position: int) -> np.ndarray:
        try:
            return decode_image(paths[position].read_bytes(), ImageSpec())
        except ImageRejected as rejected:
            raise InputError(f"{paths[position]} cannot be used: {rejected}") from None

    return Labels(weights, labels, read, classifier, prepare, seed)


@dataclass(frozen=True)
class Checkpoint:
    """A state of training beside the result, with the facts it was begun with."""

    path: Path
    facts: str

    @staticmethod
    def of(out: Path, name: str, recipe: Recipe, data: Path, start: str | None) -> Checkpoint:
        files = [f"{path} {path.stat().st_size}" for path in find_images(data)]
        listed = hashlib.sha256("\n".join(files).encode()).hexdigest()
        facts: dict[str, Any] = {"network": name, "recipe": asdict(recipe), "data": listed, "start": start}
        return Checkpoint(out.with_name(f"{out.name}.checkpoint"), json.dumps(facts, sort_keys=True))

    def read(self) -> dict[str, np.ndarray] | None:
        """None where there is none, or a damaged one; InputError when it was begun with something else."""
        try:
            content = self.path.read_bytes()
            arrays = load_arrays(content)
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        except FileNotFoundError:
            return None
        except (SafetensorError, ValueError):
            return None
        if header["__metadata__"][_KEY] != self.facts:
            raise InputError(
                f"{self.path} was begun with another recipe or other data: remove it to start over"
            )
        return arrays

    def write(self, step: int, arrays: Any) -> None:
        write_file(self.path, save_arrays(dict(arrays), metadata={_KEY: self.facts}))
