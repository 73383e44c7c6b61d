"""What is kept of a point for matching: its frame in 9 bytes and a code of 128 bits of each channel.

A frame is x, y (uint16 each, over the image's extent), log scale, angle, two numbers of the upright
shape, and the rank of its strength. A code is the signs of the descriptor's residual to its word, so that
the Hamming distance of two codes under one word estimates their angle.
"""

from __future__ import annotations

import numpy as np

from ckn_scale.core.keypoints import Keypoints
from ckn_scale.core.specs import count_code_bytes

LOG2_SCALE_RANGE = (-1.0, 8.0)
LOG_AXIS_RANGE = (-2.0, 2.0)
SHEAR_RANGE = (-4.0, 4.0)


def pack_frames(keypoints: Keypoints, width_px: int, height_px: int) -> np.ndarray:
    """(N, 9) uint8. `unpack_frames` gives the frames back within the quantisation."""
    linear = keypoints.frames[:, :, :2].astype(np.float64)
    scale, angle_rad, axis, shear = _split_linear(linear)
    xy = keypoints.frames[:, :, 2] / np.array([max(width_px - 1, 1), max(height_px - 1, 1)])
    packed = np.empty((len(keypoints), 9), np.uint8)
    packed[:, :4] = np.round(np.clip(xy, 0, 1) * 65535).astype("<u2").view(np.uint8).reshape(-1, 4)
    packed[:, 4] = _quantise(np.log2(scale), LOG2_SCALE_RANGE)
    packed[:, 5] = np.round(angle_rad / (2 * np.pi) * 256).astype(np.int64) % 256
    packed[:, 6] = _quantise(np.log(axis), LOG_AXIS_RANGE)
    packed[:, 7] = _quantise(shear, SHEAR_RANGE)
    packed[:, 8] = np.linspace(255, 0, len(keypoints)).astype(np.uint8)
    return packed


def unpack_frames(packed: np.ndarray, width_px: int, height_px: int) -> Keypoints:
    """(N, 9) uint8 → keypoints; responses are the ranks of the strengths, 255 for the strongest."""
    xy = np.ascontiguousarray(packed[:, :4]).view("<u2").astype(np.float64) / 65535
    cos, sin, scale, axis, shear = (_LEVELS[name][packed[:, place]] for name, place in _PLACES.items())
    frames = np.empty((len(packed), 2, 3), np.float32)
    frames[:, 0, 0], frames[:, 0, 1] = scale * (axis * cos), scale * (-axis * sin)
    frames[:, 1, 0], frames[:, 1, 1] = scale * (shear * cos + sin / axis), scale * (-shear * sin + cos / axis)
    frames[:, :, 2] = xy * np.array([max(width_px - 1, 1), max(height_px - 1, 1)])
    return Keypoints(frames, packed[:, 8].astype(np.float32))


def pack_codes(descriptors: np.ndarray, words: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """(N, D) descriptors with their words → (N, B) uint8: a bit for each number, in blocks of 16 bytes."""
    dim = centroids.shape[1]
    codes = np.zeros((len(descriptors), count_code_bytes(dim)), np.uint8)
    codes[:, : -(-dim // 8)] = np.packbits(descriptors > centroids[words], axis=1)
    return codes


def _split_linear(linear: np.ndarray) -> tuple[np.ndarray, ...]:
    """A = s · L · R(angle), L lower triangular with determinant 1: the upright ellipse."""
    scale = np.sqrt(np.maximum(np.abs(np.linalg.det(linear)), 1e-12))
    unit = linear / scale[:, None, None]
    row = unit[:, 0]
    axis = np.maximum(np.hypot(row[:, 0], row[:, 1]), 1e-6)
    cos, sin = row[:, 0] / axis, -row[:, 1] / axis
    shear = unit[:, 1, 0] * cos - unit[:, 1, 1] * sin
    return scale, np.arctan2(sin, cos) % (2 * np.pi), axis, shear


def _quantise(values: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    low, high = bounds
    return np.round(np.clip((values - low) / (high - low), 0, 1) * 255).astype(np.uint8)


def _restore(levels: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    low, high = bounds
    return low + levels.astype(np.float64) / 255 * (high - low)


# What each of a byte's values stands for: much faster than computing it for every point.
_ALL = np.arange(256, dtype=np.uint8)
_LEVELS = {
    "cos": np.cos(_ALL / 256 * 2 * np.pi),
    "sin": np.sin(_ALL / 256 * 2 * np.pi),
    "scale": 2.0 ** _restore(_ALL, LOG2_SCALE_RANGE),
    "axis": np.exp(_restore(_ALL, LOG_AXIS_RANGE)),
    "shear": _restore(_ALL, SHEAR_RANGE),
}
_PLACES = {"cos": 5, "sin": 5, "scale": 4, "axis": 6, "shear": 7}  # bytes of a frame
