"""Keypoints, affine frames with a strength: what every detector returns and every extractor takes.

The dense grid, a detector that looks at nothing, is here too."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ckn_scale.core.specs import KeypointSpec


@dataclass(frozen=True)
class Keypoints:
    """N regions of one image, strongest first.

    `frames` (N, 2, 3) float32 maps region coordinates to pixels: x = frames @ (u, v, 1). The unit
    circle in (u, v) is the region at one detection scale s, so √|det frames[:, :, :2]| = s, and
    pixel (0, 0) is the centre of the upper left pixel. `responses` (N,) float32, larger is stronger.
    """

    frames: np.ndarray
    responses: np.ndarray

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def scales_px(self) -> np.ndarray:
        """(N,) detection scales in pixels."""
        scales: np.ndarray = np.sqrt(np.abs(np.linalg.det(self.frames[:, :, :2])))
        return scales


def empty_keypoints() -> Keypoints:
    return Keypoints(np.empty((0, 2, 3), np.float32), np.empty(0, np.float32))


MAX_POINTS = 25_000  # a patch has 7.8 KB: 195 MB of them; the default grid of a full image has 23,643
FIRST_SCALE_PX = 51 / 24  # a patch of 51 pixels and region 12 shows the finest image pixel by pixel


def detect_dense(luma: np.ndarray, spec: KeypointSpec) -> Keypoints:
    """A grid of `dense_step_px` on each of `dense_num_scales` images, each √2 smaller than the last.

    A grid whose step is fixed in the shrunken image has the step `dense_step_px` · √2^k in this one.
    All points are returned whatever `max_keypoints` says, because a grid has no strength to choose
    by; the finest come first. A step so small that there would be more than MAX_POINTS is widened.
    """
    steps = [2.0 ** (k / 2) for k in range(spec.dense_num_scales)]
    first_step_px = float(spec.dense_step_px)
    while _count_points(luma.shape[:2], first_step_px, steps) > MAX_POINTS:
        first_step_px *= 1.05
    grids = [_make_grid(luma.shape[:2], first_step_px * step) for step in steps]
    scales = np.repeat(FIRST_SCALE_PX * np.array(steps), [len(grid) for grid in grids])
    frames = np.zeros((len(scales), 2, 3), np.float32)
    frames[:, 0, 0] = frames[:, 1, 1] = scales
    frames[:, :, 2] = np.concatenate(grids)
    return Keypoints(frames, np.ones(len(frames), np.float32))


def _count_points(shape: tuple[int, int], first_step_px: float, steps: list[float]) -> int:
    return sum(math.prod(int(length // (first_step_px * step)) for length in shape) for step in steps)


def _make_grid(shape: tuple[int, int], step_px: float) -> np.ndarray:
    """(N, 2) centres (x, y), row by row, the grid centred in the image."""
    rows, columns = (_make_line(length, step_px) for length in shape)
    y, x = np.meshgrid(rows, columns, indexing="ij")
    return np.stack([x.ravel(), y.ravel()], axis=1)


def _make_line(length_px: int, step_px: float) -> np.ndarray:
    count = int(length_px // step_px)
    first = (length_px - 1 - (count - 1) * step_px) / 2.0
    return first + step_px * np.arange(count)
