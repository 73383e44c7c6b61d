"""Rendered views of a photograph: what another camera, screen or editor would make of it.

The planted queries of the publish gate and the demo's photo set come from here.
"""

from __future__ import annotations

from collections.abc import Callable

import cv2
import numpy as np

from ckn_scale.core.images import decode_jpeg, encode_jpeg

View = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def tilt(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A homography: each corner moves inwards by up to 18 % of the side."""
    height, width = image.shape[:2]
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    inwards = np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]], np.float32)
    source = corners + inwards * rng.uniform(0.02, 0.18, (4, 2)).astype(np.float32) * (width, height)
    matrix = cv2.getPerspectiveTransform(source.astype(np.float32), corners)
    return cv2.warpPerspective(image, matrix, (width, height), flags=cv2.INTER_AREA)


def crop(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A window of 55 to 80 % of each side."""
    height, width = image.shape[:2]
    share_y, share_x = rng.uniform(0.55, 0.8, 2)
    crop_height, crop_width = max(int(height * share_y), 1), max(int(width * share_x), 1)
    top = int(rng.integers(height - crop_height + 1))
    left = int(rng.integers(width - crop_width + 1))
    window: np.ndarray = image[top : top + crop_height, left : left + crop_width].copy()
    return window


def turn(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A rotation by 8 to 25 degrees, zoomed so far that every pixel comes from inside of the image."""
    height, width = image.shape[:2]
    angle_deg = float(rng.uniform(8, 25) * rng.choice([-1, 1]))
    angle_rad = abs(np.radians(angle_deg))
    # The corners of the turned frame must lie in the image: of 3:2 at 25 degrees they need 1.54.
    needed = np.cos(angle_rad) + np.sin(angle_rad) * max(width, height) / min(width, height)
    centre = ((width - 1) / 2, (height - 1) / 2)
    matrix = cv2.getRotationMatrix2D(centre, angle_deg, max(1.45, 1.01 * float(needed)))
    return cv2.warpAffine(image, matrix, (width, height), borderMode=cv2.BORDER_REPLICATE)


def shrink(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """45 to 75 % of the size."""
    share = rng.uniform(0.45, 0.75)
    height, width = (max(int(side * share), 1) for side in image.shape[:2])
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)


def blur(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return cv2.GaussianBlur(image, (0, 0), float(rng.uniform(1.0, 2.0)))


def relight(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Other exposure, contrast and colour temperature."""
    gamma = rng.uniform(0.6, 1.6)
    gain = rng.uniform(0.85, 1.15, 3)
    light = (np.arange(256) / 255.0) ** gamma
    tables = np.clip(light[:, None] * gain * 255 + rng.uniform(-12, 12), 0, 255).astype(np.uint8)
    return cv2.LUT(image, tables.reshape(1, 256, 3))


def compress(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """JPEG at quality 20 to 40."""
    return decode_jpeg(encode_jpeg(image, int(rng.integers(20, 41))))


VIEWS: dict[str, View] = {
    "tilt": tilt,
    "crop": crop,
    "turn": turn,
    "shrink": shrink,
    "blur": blur,
    "relight": relight,
    "compress": compress,
}


def render_view(image: np.ndarray, name: str, seed: int) -> np.ndarray:
    """The named view of (H, W, 3) uint8 RGB; the same seed gives the same pixels."""
    if name not in VIEWS:
        raise ValueError(f"no view named {name!r}; there are: {', '.join(VIEWS)}")
    return VIEWS[name](image, np.random.default_rng(seed))
