"""Affine shape of regions from the structure tensor around them (Lindeberg's fixed point)."""

from __future__ import annotations

import cv2
import numpy as np

from ckn_scale.core.buffers import Buffers
from ckn_scale.core.refinement import Points
from ckn_scale.core.scale_space import Layout
from ckn_scale.core.windows import chunks, disk_window, locate_pixels

NUM_ITERATIONS = 2  # the first does nearly all, a third nothing
ISOTROPY = 0.1  # share of the trace added to the diagonal: bounds the ratio of the axes by 3.3
WINDOW = disk_window(radius=8.0, weight_sigma=4.0, side=9)
BOX = np.full(3, 1 / 3, np.float32)
TINY = 1e-6  # a tensor without any gradient gives a circle

_buffers = Buffers()


def estimate_frames(luma: np.ndarray, layout: Layout, points: Points) -> np.ndarray:
    """(N, 2, 3) float32 upright frames: determinant sigma_px², the vertical axis stays vertical."""
    halved = layout.halved()
    tensors = structure_tensors(luma, layout, halved)
    frames = np.zeros((len(points), 2, 3), np.float32)
    frames[:, 0, 0] = frames[:, 1, 1] = points.sigma_px
    frames[:, 0, 2], frames[:, 1, 2] = points.x_px, points.y_px
    for part in chunks(len(points)):
        _adapt_frames(tensors, halved, points.octaves[part], frames[part])
    return frames


def _adapt_frames(tensors: np.ndarray, halved: Layout, octaves: np.ndarray, frames: np.ndarray) -> None:
    """Replace the shapes of round `frames` by those of the gradients around them."""
    pitch_px = np.exp2(octaves + 1).astype(np.float32)
    scale_px = frames[:, 0, 0].copy()
    for _ in range(NUM_ITERATIONS):
        samples = tensors.take(locate_pixels(halved, octaves, pitch_px, frames, WINDOW), axis=0)  # (N, K, 4)
        frames[:, :, :2] = upright_shapes(WINDOW.weights @ samples) * scale_px[:, None, None]


def structure_tensors(luma: np.ndarray, layout: Layout, halved: Layout) -> np.ndarray:
    """(P, 4) float32 in the `halved` layout: xx, xy, yy of the gradient, averaged, and a filler.

    Gradients are taken at the resolution of each octave, their products at half of it: the samples
    of a window are farther apart still.
    """
    tensors = _buffers.take("tensors", halved.num_pixels, 4)
    image = luma
    for octave, shape in enumerate(zip(layout.heights, layout.widths, strict=True)):
        if octave:
            image = cv2.pyrDown(
                image.astype(np.float32, copy=False), _buffers.take(f"image {octave % 2}", *shape)
            )
        _write_tensors(image, tensors[halved.starts[octave] :])
    return tensors


def _write_tensors(image: np.ndarray, out: np.ndarray) -> None:
    """Tensors of one octave into the first rows of `out`."""
    height, width = (image.shape[0] + 1) // 2, (image.shape[1] + 1) // 2
    planes = []
    for name, product in zip(("xx", "xy", "yy"), _gradient_products(image), strict=True):
        half = cv2.pyrDown(product, _buffers.take("half", height, width))
        planes.append(cv2.sepFilter2D(half, cv2.CV_32F, BOX, BOX, _buffers.take(name, height, width)))
    cv2.merge([*planes, planes[0]], out[: height * width].reshape(height, width, 4))


def _gradient_products(image: np.ndarray) -> tuple[np.ndarray, ...]:
    """xx, xy, yy of the gradient of an (H, W) image."""
    dx, dy, dx_dy = (_buffers.take(name, *image.shape) for name in ("dx", "dy", "dx dy"))
    cv2.Sobel(image, cv2.CV_32F, 1, 0, dx, ksize=1)
    cv2.Sobel(image, cv2.CV_32F, 0, 1, dy, ksize=1)
    np.multiply(dx, dy, out=dx_dy)
    return np.multiply(dx, dx, out=dx), dx_dy, np.multiply(dy, dy, out=dy)


def upright_shapes(moments: np.ndarray) -> np.ndarray:
    """(N, 2, 2) lower triangular A with A Aᵀ ∝ M⁻¹ and determinant 1; moments (N, ≥ 3) are M's xx, xy, yy.

    Lower triangular keeps the vertical axis vertical: "up is up" at no cost.
    """
    xx, xy, yy = moments[:, 0], moments[:, 1], moments[:, 2]
    more = ISOTROPY * (xx + yy) + TINY
    xx, yy = xx + more, yy + more
    fourth_root = np.sqrt(np.sqrt(xx * yy - xy * xy))
    shapes = np.zeros((len(moments), 2, 2), moments.dtype)
    shapes[:, 0, 0] = np.sqrt(yy) / fourth_root
    shapes[:, 1, 0] = -xy / (np.sqrt(yy) * fourth_root)
    shapes[:, 1, 1] = fourth_root / np.sqrt(yy)
    return shapes
