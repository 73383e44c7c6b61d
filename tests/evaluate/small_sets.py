"""Settings, photographs and truth that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from ckn_scale.demo import read_photo

TINY = ["--preset", "tiny", "--set", "sample.num_patches=600", "--set", "training.num_patches=400"]
TINY += ["--set", "training.num_subpatches=4000", "--set", "vlad.num_descriptors=600"]
HOMOGRAPHY = np.array([[0.92, -0.2, 40.0], [0.18, 0.95, -10.0], [1e-4, 5e-5, 1.0]])


def photo(name: str, side_px: int = 240) -> np.ndarray:
    image = read_photo(name)
    factor = side_px / max(image.shape[:2])
    return cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_AREA)


def save(path: Path, image: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), image[..., ::-1])
