"""Dominant gradient orientation of affine regions."""

from __future__ import annotations

import cv2
import numpy as np

from ckn_scale.core.affine_shape import pixel_indices
from ckn_scale.core.refinement import Points
from ckn_scale.core.scale_space import ScaleSpace

RADIUS = 3.0  # of the window, in units of the point's scale
WEIGHT_SIGMA = 1.5
GRID_SIDE = 17
NUM_BINS = 36
CHUNK = 512  # points at once: more fall out of the cache
SMOOTHING = np.array([1, 4, 6, 4, 1], np.float32) / 16


def estimate_orientations(space: ScaleSpace, points: Points, shapes: np.ndarray) -> np.ndarray:
    """`shapes` (N, 2, 2) turned so that the first axis points along the dominant gradient."""
    gradients = _base_gradients(space)
    unit = shapes / points.sigma_px.astype(np.float32)[:, None, None]
    angles = np.empty(len(points), np.float32)
    for start in range(0, len(points), CHUNK):
        part = slice(start, start + CHUNK)
        angles[part] = _dominant_angles(
            gradients, space, points.select(np.arange(len(points))[part]), unit[part]
        )
    cos, sin = np.cos(angles), np.sin(angles)
    return shapes @ np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], axis=1)


def _base_gradients(space: ScaleSpace) -> np.ndarray:
    gradients = np.empty((space.layout.num_pixels, 2), np.float32)
    for base, start in zip(space.bases, space.layout.starts, strict=True):
        part = gradients[start : start + base.size]
        part[:, 0] = cv2.Sobel(base, cv2.CV_32F, 1, 0, ksize=1).ravel()
        part[:, 1] = cv2.Sobel(base, cv2.CV_32F, 0, 1, ksize=1).ravel()
    return gradients


def _window() -> tuple[np.ndarray, np.ndarray]:
    line = np.linspace(-RADIUS, RADIUS, GRID_SIDE, dtype=np.float32)
    x, y = np.meshgrid(line, line)
    radius_sq = (x * x + y * y).ravel()
    inside = radius_sq <= RADIUS**2 * 1.001
    return np.stack([x.ravel()[inside], y.ravel()[inside]]), np.exp(
        -radius_sq[inside] / (2 * WEIGHT_SIGMA**2)
    )


def _dominant_angles(
    gradients: np.ndarray, space: ScaleSpace, points: Points, shapes: np.ndarray
) -> np.ndarray:
    grid, weights = _window()
    index = pixel_indices(space.layout, points, shapes, grid)
    local = gradients[index] @ shapes  # (N, K, 2): Aᵀ g
    magnitude, angle = cv2.cartToPolar(
        np.ascontiguousarray(local[..., 0]), np.ascontiguousarray(local[..., 1])
    )
    position = angle * (NUM_BINS / (2 * np.pi))
    low = position.astype(np.int32)
    share = position - low
    mass = magnitude * weights
    row = (np.arange(len(points)) * NUM_BINS)[:, None]
    size = len(points) * NUM_BINS
    histogram = np.bincount((row + low % NUM_BINS).ravel(), (mass * (1 - share)).ravel(), size)
    histogram += np.bincount((row + (low + 1) % NUM_BINS).ravel(), (mass * share).ravel(), size)
    return peak_angles(histogram.reshape(-1, NUM_BINS))


def peak_angles(histograms: np.ndarray) -> np.ndarray:
    """(N,) angle in radians of the highest peak of (N, NUM_BINS) histograms, between bins by a parabola."""
    smooth = sum(
        w * np.roll(histograms, shift, axis=1) for shift, w in zip(range(-2, 3), SMOOTHING, strict=True)
    )
    peak = smooth.argmax(axis=1)
    rows = np.arange(len(smooth))
    left, centre, right = (smooth[rows, (peak + d) % NUM_BINS] for d in (-1, 0, 1))
    curvature = left - 2 * centre + right
    shift = np.where(curvature < 0, 0.5 * (left - right) / np.minimum(curvature, -1e-12), 0.0)
    return ((peak + shift) * (2 * np.pi / NUM_BINS)).astype(np.float32)
