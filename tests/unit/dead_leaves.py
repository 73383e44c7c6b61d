"""A generated image with the statistics of a photograph: overlapping discs of all sizes."""

from __future__ import annotations

import cv2
import numpy as np


def make_dead_leaves(height_px: int = 240, width_px: int = 320, *, seed: int = 0) -> np.ndarray:
    """(H, W) uint8."""
    rng = np.random.default_rng(seed)
    image = np.full((height_px, width_px), 128, np.uint8)
    for _ in range(height_px * width_px // 50):
        centre = (int(rng.integers(-20, width_px + 20)), int(rng.integers(-20, height_px + 20)))
        radius = int(3 / np.sqrt(rng.uniform(0.002, 1)))
        cv2.circle(image, centre, radius, int(rng.integers(0, 256)), -1, cv2.LINE_AA)
    return image


def warp_image(image: np.ndarray, homography: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """`image` under an affine `homography`, (width, height) = `size`, averaged over 3 × 3 sub-pixels."""
    enlarge = np.array([[3.0, 0, 1], [0, 3, 1], [0, 0, 1]])
    large = cv2.warpAffine(
        image,
        (enlarge @ homography)[:2],
        (3 * size[0], 3 * size[1]),
        flags=cv2.INTER_CUBIC,
        borderMode=cv2.BORDER_REPLICATE,
    )
    return cv2.resize(large, size, interpolation=cv2.INTER_AREA)
