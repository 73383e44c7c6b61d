"""Scenes: six images of one plane and the homographies from the first to each other.

Two layouts are read: Mikolajczyk's (`img1.ppm … img6.*`, `H1to2p …`) and HPatches' (`1.ppm … 6.*`,
`H_1_2 …`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckn_scale.errors import InputError
from ckn_scale.evaluate.regions import EXTENSIONS, ImageFile

LAYOUTS = {"img{}": "H1to{}p", "{}": "H_1_{}"}


@dataclass(frozen=True)
class Scene:
    """`homographies[k]` (3, 3) takes a pixel of image 1 to image k."""

    name: str
    images: dict[int, ImageFile]
    homographies: dict[int, np.ndarray]


def read_scenes(folder: Path) -> list[Scene]:
    """Every scene below a folder, or the folder itself as the only scene; sorted by name."""
    if not folder.is_dir():
        raise InputError(f"no such folder: {folder}")
    folders = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    scenes = [scene for one in folders if (scene := _read_scene(one)) is not None]
    if not scenes:
        raise InputError(f"there is no scene in {folder}: none of its folders has an image img1 or 1")
    return scenes


def _read_scene(folder: Path) -> Scene | None:
    for image_name, homography_name in LAYOUTS.items():
        images = {
            number: file for number in range(1, 100) if (file := _find_image(folder, image_name, number))
        }
        if 1 not in images:
            continue
        files = {number: folder / homography_name.format(number) for number in images if number > 1}
        homographies = {number: _read_homography(path) for number, path in files.items() if path.is_file()}
        if not homographies:
            expected = homography_name.format(2)
            raise InputError(f"the scene {folder} has images but no homography (a file {expected}, say)")
        return Scene(folder.name, images, homographies)
    return None


def _find_image(folder: Path, name: str, number: int) -> ImageFile | None:
    stem = name.format(number)
    found = [path for path in folder.glob(f"{stem}.*") if path.suffix.lower()[1:] in EXTENSIONS]
    return ImageFile(min(found)) if found else None


def _read_homography(path: Path) -> np.ndarray:
    try:
        numbers = np.array(path.read_text().split(), np.float64)
    except (OSError, ValueError):
        raise InputError(f"{path} does not hold numbers") from None
    if (
        len(numbers) != 9
        or not np.isfinite(numbers).all()
        or abs(np.linalg.det(numbers.reshape(3, 3))) < 1e-12
    ):
        raise InputError(f"{path} must hold nine numbers of an invertible matrix, got {len(numbers)}")
    return numbers.reshape(3, 3)
