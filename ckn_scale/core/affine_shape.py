"""Affine shape of regions from the structure tensor around them (Lindeberg's fixed point)."""

from __future__ import annotations

import cv2
import numpy as np

from ckn_scale.core.refinement import Points
from ckn_scale.core.scale_space import Layout

NUM_ITERATIONS = 2  # more gain nothing
HALF_WIDTH = 8.0  # of the window, in units of the point's scale
WEIGHT_SIGMA = 4.0
GRID_SIDE = 9
BOX_PX = 5  # each sample stands for the mean tensor over so many pixels
ISOTROPY = 0.1  # share of the trace added to the diagonal: bounds the axes' ratio by 3.3


def estimate_shapes(image: np.ndarray, layout: Layout, points: Points) -> np.ndarray:
    """(N, 2, 2) lower triangular: the upright frame of each region, determinant sigma_px²."""
    tensors = structure_tensors(image, layout)
    grid, weights = window_samples()
    shapes = np.zeros((len(points), 2, 2), np.float32)
    shapes[:, 0, 0] = shapes[:, 1, 1] = 1.0
    for _ in range(NUM_ITERATIONS):
        moments = _window_moments(tensors, layout, points, shapes, grid, weights)
        shapes = upright_shapes(moments)
    return shapes * points.sigma_px.astype(np.float32)[:, None, None]


def structure_tensors(image: np.ndarray, layout: Layout) -> np.ndarray:
    """(P, 4) float32: xx, xy, yy and a filler, box-averaged, of all pixels of all octaves."""
    tensors = np.empty((layout.num_pixels, 4), np.float32)
    for height, width, start in zip(layout.heights, layout.widths, layout.starts, strict=True):
        image = image if image.shape == (height, width) else cv2.pyrDown(image)
        products = tensors[start : start + height * width].reshape(height, width, 4)
        dx = cv2.Sobel(image, cv2.CV_32F, 1, 0, ksize=1)
        dy = cv2.Sobel(image, cv2.CV_32F, 0, 1, ksize=1)
        merged = cv2.merge([dx * dx, dx * dy, dy * dy, dx])
        cv2.boxFilter(merged, -1, (BOX_PX, BOX_PX), products)
    return tensors


def window_samples() -> tuple[np.ndarray, np.ndarray]:
    """(2, K) positions on a disk in units of the scale, (K,) Gaussian weights that sum to 1."""
    line = np.linspace(-HALF_WIDTH, HALF_WIDTH, GRID_SIDE, dtype=np.float32)
    x, y = np.meshgrid(line, line)
    radius_sq = (x * x + y * y).ravel()
    inside = radius_sq <= HALF_WIDTH**2 * 1.001
    weights = np.exp(-radius_sq[inside] / (2 * WEIGHT_SIGMA**2))
    return np.stack([x.ravel()[inside], y.ravel()[inside]]), weights / weights.sum()


def upright_shapes(moments: np.ndarray) -> np.ndarray:
    """(N, 2, 2) lower triangular A with A Aᵀ ∝ M⁻¹ and determinant 1, of moments (N, 3) = (xx, xy, yy).

    A lower triangular frame keeps the vertical axis vertical: "up is up" at no cost.
    """
    trace = moments[:, 0] + moments[:, 2]
    xx = moments[:, 0] + ISOTROPY * trace + 1e-12
    yy = moments[:, 2] + ISOTROPY * trace + 1e-12
    xy = moments[:, 1]
    root = np.sqrt(np.sqrt(xx * yy - xy * xy))  # makes the determinant 1
    shapes = np.zeros((len(moments), 2, 2), moments.dtype)
    shapes[:, 0, 0] = np.sqrt(yy) / root
    shapes[:, 1, 0] = -xy / (np.sqrt(yy) * root)
    shapes[:, 1, 1] = root / np.sqrt(yy)
    return shapes


def _window_moments(
    tensors: np.ndarray,
    layout: Layout,
    points: Points,
    shapes: np.ndarray,
    grid: np.ndarray,
    weights: np.ndarray,
) -> np.ndarray:
    """(N, 3) weighted mean tensor over each point's current window."""
    index = pixel_indices(layout, points, shapes, grid)
    return np.einsum("nkc,k->nc", tensors[index], weights)[:, :3]


def pixel_indices(layout: Layout, points: Points, shapes: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """(N, K) positions in the flat buffers of the pixels nearest to shape · grid around each point."""
    step_px = np.exp2(points.octaves)
    scale = (points.sigma_px / step_px).astype(np.float32)
    offsets = (shapes * scale[:, None, None]) @ grid  # (N, 2, K)
    width, height = layout.widths[points.octaves], layout.heights[points.octaves]
    x = offsets[:, 0] + (points.x_px / step_px + 0.5).astype(np.float32)[:, None]
    y = offsets[:, 1] + (points.y_px / step_px + 0.5).astype(np.float32)[:, None]
    column = np.clip(x, 0, (width - 1)[:, None]).astype(np.int32)
    row = np.clip(y, 0, (height - 1)[:, None]).astype(np.int32)
    return row * width[:, None] + column + layout.starts[points.octaves][:, None]
