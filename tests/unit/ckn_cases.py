"""Patches and networks that the descriptor tests share."""

from __future__ import annotations

import cv2
import numpy as np
from skimage import data

from ckn_scale.core.specs import CknSpec, CknTrainingSpec, LayerSpec

SIDE = 51

PAPER = {
    "raw": CknSpec("raw", (LayerSpec(5, 512, 5),)),
    "white": CknSpec("white", (LayerSpec(3, 128, 3), LayerSpec(2, 512, 2))),
    "grad": CknSpec("grad", (LayerSpec(1, 16, 3), LayerSpec(4, 1024, 2))),
}
SMALL = {
    "raw": CknSpec("raw", (LayerSpec(5, 16, 5),), alpha_quantile=0.1),
    "white": CknSpec("white", (LayerSpec(3, 16, 4), LayerSpec(2, 24, 3))),
    "grad": CknSpec("grad", (LayerSpec(1, 8, 4), LayerSpec(4, 24, 3)), norm_power=0.5, window_sigma=0.3),
}
TRAINING = CknTrainingSpec(num_patches=300, num_subpatches=3000, kmeans_iterations=4)


def cut_patches(count: int, seed: int = 0) -> np.ndarray:
    """(count, 51, 51, 3) uint8: turned and scaled squares of scikit-image's photographs."""
    rng = np.random.default_rng(seed)
    images = [data.astronaut(), data.chelsea(), data.coffee()]
    patches = np.empty((count, SIDE, SIDE, 3), np.uint8)
    for index in range(count):
        image = images[rng.integers(len(images))]
        scale, angle_rad = rng.uniform(0.8, 2.0), rng.uniform(0, 2 * np.pi)
        centre = rng.uniform(40, np.array(image.shape[1::-1]) - 40)
        cosine, sine = scale * np.cos(angle_rad), scale * np.sin(angle_rad)
        frame = np.array([[cosine, -sine, 0], [sine, cosine, 0]])
        frame[:, 2] = centre - frame[:, :2] @ np.array([SIDE // 2, SIDE // 2])
        flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        patches[index] = cv2.warpAffine(
            image, frame, (SIDE, SIDE), flags=flags, borderMode=cv2.BORDER_REPLICATE
        )
    return patches


def pooling_matrix(side: int, subsampling: int) -> np.ndarray:
    """The rule written out: (pooled side, side), a row for each centre."""
    offset = -(-subsampling // 2) - 1
    taps = np.exp(-((np.arange(-subsampling, subsampling + 1) / subsampling) ** 2))
    rows = []
    for centre in range(offset, side, subsampling):
        row = np.zeros(side + 2 * subsampling)
        row[centre : centre + 2 * subsampling + 1] = taps / taps.sum()
        rows.append(row[subsampling:-subsampling])
    return np.array(rows)
