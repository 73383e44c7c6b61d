"""Networks of the paper's other systems, trained here: data from folders, checkpoints, a file of weights.

Each step is shared by the workers of a group. A checkpoint lies beside the result until that is written; it
is gone on from when it was begun with the same recipe and data.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ckn_scale.config import SampleSettings
from ckn_scale.core.gradient_sums import PartialSum
from ckn_scale.core.network_objectives import VIEW_MARGIN
from ckn_scale.core.network_training import Recipe, train_network
from ckn_scale.core.specs import ImageSpec, KeypointSpec, PatchSpec
from ckn_scale.errors import InputError
from ckn_scale.evaluate.cache import ContentCache
from ckn_scale.evaluate.gradient_tasks import GradientTask, PieceGradients, TaskData
from ckn_scale.evaluate.patch_sets import read_views
from ckn_scale.evaluate.regions import RegionReader
from ckn_scale.evaluate.training_files import TrainingFiles
from ckn_scale.evaluate.training_images import Progress, draw_patches, find_images

SAVE_EVERY = 500  # steps
_UNFIT = (
    "has weights that are too large: layers of Caffe's layout get pixels of 0 … 255 without their mean, "
    "torchvision's those of −2 … 2"
)


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
    """The default one with what is `given` over it (steps, batch_size, rate, num_drops, num_pieces)."""
    chosen: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    try:
        recipe = replace(TASKS[name], seed=seed, **chosen)
    except ValueError as error:
        raise InputError(str(error)) from None
    if name == "alexnet-landmarks" and "steps" not in chosen:
        epoch = -(-len(find_images(data)) // recipe.batch_size)
        return replace(recipe, steps=EPOCHS * epoch)
    return recipe


class Group(Protocol):
    """Workers that compute gradients of pieces: see `runners/worker_groups.py`."""

    @property
    def size(self) -> int: ...

    def call_all(
        self, shared: tuple[int, Sequence[np.ndarray]], parts: Sequence[range]
    ) -> list[PieceGradients]: ...


OpenGroup = Callable[[GradientTask], AbstractContextManager[Group]]


@contextmanager
def compute_here(task: GradientTask) -> Iterator[Group]:
    """This process is all the workers there are."""

    class Alone:
        size = 1

        def call_all(
            self, shared: tuple[int, Sequence[np.ndarray]], parts: Sequence[range]
        ) -> list[PieceGradients]:
            return [task(*shared, part) for part in parts]

    yield Alone()


def train(
    name: str,
    data: Path,
    out: Path,
    recipe: Recipe,
    *,
    start: str | None = None,
    num_classes: int = 16_000,
    device: str = "cpu",
    threads: int = 1,
    open_group: OpenGroup = compute_here,
    on_progress: Progress = lambda what, done, total: None,
) -> float | None:
    """Write the weights to `out`; called again after it was stopped, it goes on. The mean loss of the end.

    None when `out` is there already, of the same recipe and data.
    """
    if (start is not None) != (name == "alexnet-landmarks"):
        raise InputError(f"--start is for alexnet-landmarks, which needs it: AlexNet's weights; got {name}")
    learned = {"network": name, "recipe": asdict(recipe), "start": start, "classes": num_classes}
    files = TrainingFiles(out, _state_facts(data, **learned, device=device, threads=threads))
    if files.is_done():
        return None
    if start is None and not files.has_patches():
        files.write_patches(_read_patches(name, data, num_classes, recipe.seed, on_progress))
    task = GradientTask(TaskData(name, data, files.patches, start, recipe.seed), recipe, device, threads)
    saved, arithmetic = files.read_checkpoint()
    objective, losses = task.data.open(), []

    def show(step: int, loss: float) -> None:
        losses.append(loss)
        on_progress(name, step, recipe.steps)

    with open_group(task) as group:
        exchange = GradientExchange(group, len(recipe.pieces), arithmetic)
        try:
            train_network(
                *(objective.network, recipe, exchange, saved),
                on_step=show,
                save=lambda step, arrays: files.write_checkpoint(arrays, str(exchange.arithmetic)),
                save_every=SAVE_EVERY,
            )
        except ValueError as error:
            raise InputError(f"{error}{f', or {start} {_UNFIT}' if start else ''}") from None
    files.finish(objective.export())
    return float(np.mean(losses[-100:]))


class GradientExchange:
    """A step's pieces shared by a group, whose workers must all compute alike: see `core/numerics.py`."""

    def __init__(self, group: Group, num_pieces: int, arithmetic: str | None = None) -> None:
        self.arithmetic = arithmetic
        self._group = group
        shares = min(group.size, num_pieces)
        bounds = [number * num_pieces // shares for number in range(shares + 1)]
        self._parts = [range(begin, end) for begin, end in itertools.pairwise(bounds)]

    def __call__(self, step: int, weights: Sequence[np.ndarray]) -> list[PartialSum]:
        answers = self._group.call_all((step, weights), self._parts)
        for answer in answers:
            self.arithmetic = self.arithmetic or answer.arithmetic
            if answer.arithmetic != self.arithmetic:
                raise InputError(
                    f"a worker computes with {answer.arithmetic}, the training was begun with "
                    f"{self.arithmetic}: its steps would depend on who does them"
                )
        return [one for answer in answers for one in answer.sums]


def _state_facts(data: Path, **facts: Any) -> str:
    files = [f"{os.path.relpath(path, data)} {path.stat().st_size}" for path in find_images(data)]
    listed = hashlib.sha256("\n".join(files).encode()).hexdigest()
    return json.dumps({**facts, "data": listed}, sort_keys=True)


def _read_patches(
    name: str, data: Path, num_classes: int, seed: int, on_progress: Progress
) -> list[np.ndarray]:
    """The groups of patches that the network of this name learns from."""
    if name == "philippnet":
        return [one[None] for one in draw_seeds(data, num_classes, seed, on_progress)]
    return read_groups(data)


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
