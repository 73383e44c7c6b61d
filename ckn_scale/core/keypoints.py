"""Keypoints: affine frames with a strength. What every detector returns and every extractor takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
        return np.sqrt(np.abs(np.linalg.det(self.frames[:, :, :2])))

    def strongest(self, count: int) -> Keypoints:
        return Keypoints(self.frames[:count], self.responses[:count])


def empty_keypoints() -> Keypoints:
    return Keypoints(np.empty((0, 2, 3), np.float32), np.empty(0, np.float32))
