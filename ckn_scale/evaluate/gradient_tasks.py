"""What a worker does in a step of training: it opens the data once, then computes gradients of pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ckn_scale.core.alexnet_training import make_classifier
from ckn_scale.core.descriptors.architectures import find_architectures
from ckn_scale.core.descriptors.weight_files import decode_weights, warn_of_other_file
from ckn_scale.core.gradient_sums import PartialSum
from ckn_scale.core.images import decode_image
from ckn_scale.core.network_objectives import Classes, Labels, Pairs
from ckn_scale.core.network_training import GradientComputer, Objective, Recipe
from ckn_scale.core.numerics import find_arithmetic, require_device, set_compute_threads
from ckn_scale.core.specs import ImageSpec
from ckn_scale.errors import ImageRejected, InputError
from ckn_scale.evaluate.training_files import open_patches
from ckn_scale.evaluate.training_images import find_images
from ckn_scale.storage.input_files import read_input


@dataclass(frozen=True)
class TaskData:
    """Where a network finds what it learns from, on any host."""

    name: str
    data: Path
    patches: Path  # of all networks but alexnet-landmarks, which reads the images of `data`
    start: str | None
    seed: int

    def open(self) -> Objective:
        """InputError when the data do not do for the network."""
        try:
            if self.start is not None:
                return _read_labels(self.data, self.start, self.seed)
            groups = open_patches(self.patches)
            if self.name.startswith("philippnet"):
                return Classes(groups, seed=self.seed)
            return Pairs(groups, self.name, self.seed)
        except ValueError as error:
            raise InputError(f"{self.data} does not do for {self.name}: {error}") from None


class PieceGradients(NamedTuple):
    """Sums over pieces, and what they were computed with."""

    arithmetic: str
    sums: list[PartialSum]


@dataclass
class GradientTask:
    """Called with a step, its weights and some of its pieces; picklable until it is called first."""

    data: TaskData
    recipe: Recipe
    device: str = "cpu"
    threads: int = 1
    _computer: GradientComputer | None = field(default=None, init=False)

    def __call__(self, step: int, weights: Sequence[np.ndarray], pieces: range) -> PieceGradients:
        computer = self._computer or self._open()
        return PieceGradients(str(find_arithmetic(self.device)), computer.compute(step, weights, pieces))

    def _open(self) -> GradientComputer:
        require_device(self.device)
        set_compute_threads(self.threads)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        self._computer = GradientComputer(self.data.open(), self.recipe, self.device)
        return self._computer


def _read_labels(folder: Path, start: str, seed: int) -> Labels:
    paths = find_images(folder)
    names = sorted({path.parent.name for path in paths})
    labels = [names.index(path.parent.name) for path in paths]
    content = read_input(start)
    weights = decode_weights(content, start)
    classifier, prepare = make_classifier(weights, len(names), start)
    warn_of_other_file(content, [one.published for one in find_architectures("alexnet-conv1")], start)

    def read(position: int) -> np.ndarray:
        try:
            return decode_image(paths[position].read_bytes(), ImageSpec())
        except ImageRejected as rejected:
            raise InputError(f"{paths[position]} cannot be used: {rejected}") from None

    return Labels(weights, labels, read, classifier, prepare, seed)
