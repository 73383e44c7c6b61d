"""Cameras with known poses. Geometry is done in pixels without distortion, as a pinhole would see them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

UNDISTORT_STEPS = 50
UNDISTORTED_PX = 0.1
REFINE_STEPS = 3


@dataclass(frozen=True)
class Camera:
    """Pixel (0.5, 0.5) is the centre of the upper left one, as in COLMAP."""

    width_px: int
    height_px: int
    focal_px: tuple[float, float]
    centre_px: tuple[float, float]
    radial: tuple[float, float] = (0.0, 0.0)
    tangential: tuple[float, float] = (0.0, 0.0)

    @property
    def matrix(self) -> np.ndarray:
        """(3, 3) of the pinhole."""
        (fx, fy), (cx, cy) = self.focal_px, self.centre_px
        return np.array([[fx, 0, cx], [0, fy, cy], [0, 0, 1.0]])

    def undistort(self, points_px: np.ndarray) -> np.ndarray:
        """(N, 2) pixels of the image → of the pinhole, by fixed-point iteration.

        NaN where it finds none: what a reconstruction says of a lens need not hold in its corners.
        """
        distorted = (points_px - self.centre_px) / self.focal_px
        ideal = distorted.copy()
        with np.errstate(over="ignore", invalid="ignore"):
            for _ in range(UNDISTORT_STEPS if any((*self.radial, *self.tangential)) else 0):
                ideal = distorted - (self._distort(ideal) - ideal)
            missed_px = np.abs((self._distort(ideal) - distorted) * self.focal_px).max(axis=1, initial=0)
        pixels: np.ndarray = ideal * self.focal_px + self.centre_px
        pixels[~(missed_px <= UNDISTORTED_PX)] = np.nan
        return pixels

    def distort(self, points_px: np.ndarray) -> np.ndarray:
        """(N, 2) pixels of the pinhole → of the image."""
        ideal = (points_px - self.centre_px) / self.focal_px
        pixels: np.ndarray = self._distort(ideal) * self.focal_px + self.centre_px
        return pixels

    def _distort(self, ideal: np.ndarray) -> np.ndarray:
        (k1, k2), (p1, p2) = self.radial, self.tangential
        x, y = ideal.T
        squares = x * x + y * y
        scale = 1 + squares * (k1 + squares * k2)
        return np.stack(
            [
                x * scale + 2 * p1 * x * y + p2 * (squares + 2 * x * x),
                y * scale + 2 * p2 * x * y + p1 * (squares + 2 * y * y),
            ],
            axis=1,
        )


@dataclass(frozen=True)
class View:
    """An image with its camera: a point X of the scene is at rotation · X + translation before it."""

    path: Path
    camera: Camera
    rotation: np.ndarray  # (3, 3)
    translation: np.ndarray  # (3,)

    @property
    def projection(self) -> np.ndarray:
        """(3, 4): from the scene to pixels of the pinhole."""
        pose = np.concatenate([self.rotation, self.translation[:, None]], axis=1)
        matrix: np.ndarray = self.camera.matrix @ pose
        return matrix


def make_fundamental(first: View, second: View) -> np.ndarray:
    """(3, 3) F with x₂ᵀ F x₁ = 0 for pixels of the pinholes that show the same point."""
    rotation = second.rotation @ first.rotation.T
    baseline = second.translation - rotation @ first.translation
    if np.linalg.norm(baseline) <= 1e-9 * np.linalg.norm(second.translation):
        baseline = np.zeros(3)  # not what rounding leaves of it
    x, y, z = baseline
    essential = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ rotation
    inverses = [np.linalg.inv(one.camera.matrix) for one in (first, second)]
    matrix: np.ndarray = inverses[1].T @ essential @ inverses[0]
    return matrix


def measure_epipolar(fundamental: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(N,) the larger of the distances of both points to the line of the other; NaN without a baseline."""
    first, second = (np.column_stack([one, np.ones(len(one))]) for one in (first, second))
    lines = first @ fundamental.T, second @ fundamental  # in the second image, in the first
    offsets = np.abs(np.sum(lines[0] * second, axis=1))
    with np.errstate(invalid="ignore", divide="ignore"):
        distances = [offsets / np.hypot(line[:, 0], line[:, 1]) for line in lines]
    larger: np.ndarray = np.maximum(*distances)
    return larger


def triangulate(projections: np.ndarray, points_px: np.ndarray) -> tuple[np.ndarray, float]:
    """The point (3,) that K views (K, 3, 4) see at (K, 2), and its largest error in pixels.

    Linear, then refined by a few Gauss-Newton steps; infinite when it lies behind a camera.
    """
    rows = points_px[:, :, None] * projections[:, 2:] - projections[:, :2]  # (K, 2, 4)
    rows = rows.reshape(-1, 4) / np.linalg.norm(projections[:, :2, :3], axis=2).reshape(-1, 1)
    homogeneous = np.linalg.svd(rows)[2][-1]
    if abs(homogeneous[3]) < 1e-12:
        return homogeneous[:3], np.inf
    point = homogeneous[:3] / homogeneous[3]
    for _ in range(REFINE_STEPS):
        seen = projections[:, :, :3] @ point + projections[:, :, 3]
        if (seen[:, 2] <= 0).any():
            return point, np.inf
        pixels = seen[:, :2] / seen[:, 2:]
        slopes = (projections[:, :2, :3] - pixels[:, :, None] * projections[:, 2:, :3]) / seen[
            :, 2, None, None
        ]
        point = point + np.linalg.lstsq(slopes.reshape(-1, 3), (points_px - pixels).ravel(), rcond=None)[0]
    seen = projections[:, :, :3] @ point + projections[:, :, 3]
    if (seen[:, 2] <= 0).any():
        return point, np.inf
    errors = np.linalg.norm(seen[:, :2] / seen[:, 2:] - points_px, axis=1)
    return point, float(errors.max())
