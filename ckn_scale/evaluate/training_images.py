"""The photographs that descriptors and words are learned on: their patches, drawn by hash."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ckn_scale.config import SampleSettings
from ckn_scale.core.sampling import hash_priorities, smallest
from ckn_scale.errors import InputError
from ckn_scale.evaluate.regions import EXTENSIONS, ImageFile, RegionReader, UnusableImage

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # what is done, how many, of how many


def find_images(folder: Path) -> list[Path]:
    """Image files below a folder, sorted; InputError when there is no folder or nothing in it."""
    if not folder.is_dir():
        raise InputError(f"no such folder: {folder}")
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower()[1:] in EXTENSIONS)
    if not found:
        raise InputError(f"there is no image in {folder}")
    return found


class TrainingPatches:
    """Patches of the training images at the regions and numbers that are asked for; the last draw is kept."""

    def __init__(self, paths: Sequence[Path], reader: RegionReader, on_progress: Progress) -> None:
        self.paths, self.reader, self.on_progress = paths, reader, on_progress
        self._kept: tuple[object, np.ndarray] | None = None

    def source(self, region: float, sample: SampleSettings) -> Callable[[int], np.ndarray]:
        """A function that gives the first n patches of the draw, and draws when first called."""

        def take(count: int) -> np.ndarray:
            if self._kept is None or self._kept[0] != (region, sample):
                reader = self.reader.with_region(region)
                self._kept = None  # not two of them in memory
                drawn = draw_patches(self.paths, reader, sample, self.on_progress)
                self._kept = ((region, sample), drawn)
            return self._kept[1][:count]

        return take


def draw_patches(
    paths: Sequence[Path], reader: RegionReader, sample: SampleSettings, on_progress: Progress
) -> np.ndarray:
    """`sample.num_patches` patches (N, S, S, 3) of `sample.num_images` images, in the order of their hash.

    The first n of them are again a sample, as with the pipeline's own.
    """
    chosen = np.sort(smallest(hash_priorities(sample.seed, np.arange(len(paths))), sample.num_images))
    per_image = -(-sample.num_patches // len(chosen))
    drawn = []
    for done, image_id in enumerate(chosen.tolist()):
        try:
            drawn.append(
                _draw_from_image(ImageFile(paths[image_id]), image_id, reader, per_image, sample.seed)
            )
        except UnusableImage as error:
            log.warning("training goes on without an image: %s", error)
        on_progress("training patches", done + 1, len(chosen))
    return _join(drawn, sample.num_patches)


def _draw_from_image(
    file: ImageFile, image_id: int, reader: RegionReader, count: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    detected = reader.detect(file)
    points = np.arange(len(detected.keypoints))
    hashes = hash_priorities(seed, np.full(len(points), image_id), points)
    chosen = smallest(hashes, count)
    return reader.extract_some(file, detected, chosen.tolist()), hashes[chosen]


def _join(drawn: Sequence[tuple[np.ndarray, np.ndarray]], count: int) -> np.ndarray:
    if not any(len(hashes) for _, hashes in drawn):
        raise InputError("no training image gave a patch: all are flat or unreadable")
    order = smallest(np.concatenate([hashes for _, hashes in drawn]), count)
    patches: np.ndarray = np.concatenate([patches for patches, _ in drawn])[order]
    return patches
