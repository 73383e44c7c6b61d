"""Dominant gradient orientation of affine regions."""

from __future__ import annotations

import cv2
import numpy as np

from ckn_scale.core.scale_space import ScaleSpace, chunks, disk_window, locate_pixels

WINDOW = disk_window(radius=4.0, weight_sigma=2.0, side=13)
NUM_BINS = 72  # samples go to the nearest bin, so a bin's width is the error they may have
SMOOTHING_RAD = 0.8  # wide: a dominant direction is found again, a narrow peak often is not


def _smoothing_matrix(sigma_rad: float) -> np.ndarray:
    """(NUM_BINS, NUM_BINS): Gaussian of the circular distance between two bins."""
    distance = np.abs(np.subtract.outer(np.arange(NUM_BINS), np.arange(NUM_BINS)))
    distance_rad = np.minimum(distance, NUM_BINS - distance) * (2 * np.pi / NUM_BINS)
    return np.exp(-0.5 * (distance_rad / sigma_rad) ** 2)


SMOOTHING = _smoothing_matrix(SMOOTHING_RAD)


def orient_frames(space: ScaleSpace, octaves: np.ndarray, frames: np.ndarray) -> np.ndarray:
    """`frames` (N, 2, 3) turned so that the first axis points along the dominant gradient of the region."""
    parts = chunks(len(frames))
    angles_rad = [_dominant_angles(space, octaves[part], frames[part]) for part in parts]
    return turn_frames(frames, np.concatenate(angles_rad))


def turn_frames(frames: np.ndarray, angles_rad: np.ndarray) -> np.ndarray:
    """Frames whose first axis is where the direction (cos, sin) of the old frame was."""
    cos, sin = np.cos(angles_rad)[:, None], np.sin(angles_rad)[:, None]
    first, second = frames[:, :, 0], frames[:, :, 1]
    return np.stack([first * cos + second * sin, second * cos - first * sin, frames[:, :, 2]], axis=2)


def _dominant_angles(space: ScaleSpace, octaves: np.ndarray, frames: np.ndarray) -> np.ndarray:
    dx, dy = _sample_gradients(space, octaves, frames)
    shape = frames[:, :, :2, None]
    along_first = shape[:, 0, 0] * dx + shape[:, 1, 0] * dy  # the gradient in the region's own frame
    along_second = shape[:, 0, 1] * dx + shape[:, 1, 1] * dy
    magnitude, angle = cv2.cartToPolar(along_first, along_second)
    bins = (angle * (NUM_BINS / (2 * np.pi)) + 0.5).astype(np.intp)  # 0 … NUM_BINS, the last is the first
    bins += (np.arange(len(frames)) * (NUM_BINS + 1))[:, None]
    counts = np.bincount(bins.ravel(), (magnitude * WINDOW.weights).ravel(), len(frames) * (NUM_BINS + 1))
    histograms = counts.reshape(-1, NUM_BINS + 1)
    histograms[:, 0] += histograms[:, NUM_BINS]
    return peak_angles(histograms[:, :NUM_BINS])


def _sample_gradients(
    space: ScaleSpace, octaves: np.ndarray, frames: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(N, K) dx and dy of level 0 at the window's samples: cheaper there than everywhere."""
    pitch_px = np.exp2(octaves).astype(np.float32)
    pixels = locate_pixels(space.layout, octaves, pitch_px, frames, WINDOW, margin_px=1)
    row = space.layout.widths[octaves, None]
    take = space.bases.take
    return take(pixels + 1) - take(pixels - 1), take(pixels + row) - take(pixels - row)


def peak_angles(histograms: np.ndarray) -> np.ndarray:
    """(N,) float32 radians of the highest peak of (N, NUM_BINS) histograms, between bins by a parabola.

    Bin b is centred at b · 2π / NUM_BINS.
    """
    smooth = histograms @ SMOOTHING
    peak = smooth.argmax(axis=1)
    rows = np.arange(len(smooth))
    left, centre, right = (smooth[rows, (peak + step) % NUM_BINS] for step in (-1, 0, 1))
    curvature = np.minimum(left - 2 * centre + right, -1e-12)
    shift = np.clip(0.5 * (left - right) / curvature, -0.5, 0.5)
    return ((peak + shift) * (2 * np.pi / NUM_BINS)).astype(np.float32)
