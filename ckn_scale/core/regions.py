"""Elliptic regions of two images: carry them through a homography, measure their overlap, pair them."""

from __future__ import annotations

import numpy as np

NORMAL_RADIUS_PX = 30.0  # regions are compared at this size, or large ones would always win
NUM_CHORDS = 48


def project_frames(frames: np.ndarray, homography: np.ndarray) -> np.ndarray:
    """Frames (N, 2, 3) in the other image: the centre exactly, the shape by the homography's derivative."""
    h = homography / homography[2, 2]
    centre = np.concatenate([frames[:, :, 2], np.ones((len(frames), 1))], axis=1) @ h.T  # (N, 3)
    depth = centre[:, 2]
    position = centre[:, :2] / depth[:, None]
    derivative = (h[None, :2, :2] - position[:, :, None] * h[None, 2:, :2]) / depth[:, None, None]
    return np.concatenate([derivative @ frames[:, :, :2], position[:, :, None]], axis=2)


def centres_inside(frames: np.ndarray, height_px: int, width_px: int) -> np.ndarray:
    x, y = frames[:, 0, 2], frames[:, 1, 2]
    return (x >= 0) & (y >= 0) & (x <= width_px - 1) & (y <= height_px - 1)


def overlap_regions(first: np.ndarray, second: np.ndarray, *, normalise: bool = True) -> np.ndarray:
    """(N,) intersection over union of the ellipses of row i of both (N, 2, 3) frames.

    With `normalise`, both are enlarged by the factor that brings the first to NORMAL_RADIUS_PX around
    its own centre, the centres staying where they are (Mikolajczyk's protocol).
    """
    factor = np.ones(len(first))
    if normalise:
        factor = NORMAL_RADIUS_PX / np.sqrt(np.abs(np.linalg.det(first[:, :, :2])))
    inverse = np.linalg.inv(first[:, :, :2].astype(np.float64))
    shape = inverse @ second[:, :, :2]  # the second region where the first is the unit circle
    shift = inverse @ (second[:, :, 2] - first[:, :, 2])[:, :, None] / factor[:, None, None]
    shared = _unit_circle_intersection(shape, shift[:, :, 0])
    areas = np.pi * (1.0 + np.abs(np.linalg.det(shape)))
    return shared / (areas - shared)


def _unit_circle_intersection(shape: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Area (N,) shared by the unit circle and the ellipse shape · circle + shift, by horizontal chords."""
    angle = (np.arange(NUM_CHORDS) + 0.5) * np.pi / NUM_CHORDS - np.pi / 2
    y, half = np.sin(angle), np.cos(angle)
    inverse = np.linalg.inv(shape)
    cov = inverse.transpose(0, 2, 1) @ inverse  # the ellipse is (p − shift)ᵀ cov (p − shift) ≤ 1
    a, b, c = cov[:, 0, 0, None], cov[:, 0, 1, None], cov[:, 1, 1, None]
    dy = y[None] - shift[:, 1:]
    centre = shift[:, :1] - b / a * dy
    reach = np.sqrt(np.maximum((b * dy) ** 2 - a * (c * dy * dy - 1), 0.0)) / a
    chord = np.minimum(centre + reach, half) - np.maximum(centre - reach, -half)
    return np.maximum(chord, 0.0) @ half * (np.pi / NUM_CHORDS)


def pair_regions(
    first: np.ndarray, second: np.ndarray, *, min_overlap: float = 0.5, normalise: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Indices (i, j) of regions that overlap by `min_overlap`, one to one, the best overlaps first."""
    i, j = _near_pairs(first, second, min_overlap, normalise)
    overlap = overlap_regions(first[i], second[j], normalise=normalise)
    good = overlap >= min_overlap
    i, j = i[good], j[good]
    return take_one_to_one(i, j, np.argsort(-overlap[good], kind="stable"))


def take_one_to_one(i: np.ndarray, j: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Walk the pairs in `order`, keeping each whose two sides are both still free."""
    used_i: set[int] = set()
    used_j: set[int] = set()
    kept = []
    for pair in order.tolist():
        a, b = int(i[pair]), int(j[pair])
        if a not in used_i and b not in used_j:
            used_i.add(a)
            used_j.add(b)
            kept.append(pair)
    return i[kept], j[kept]


def _near_pairs(
    first: np.ndarray, second: np.ndarray, min_overlap: float, normalise: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs that may overlap enough: areas within the ratio, centres within reach."""
    radius_1 = np.sqrt(np.abs(np.linalg.det(first[:, :, :2])))
    radius_2 = np.sqrt(np.abs(np.linalg.det(second[:, :, :2])))
    ratio = radius_2[None] / radius_1[:, None]
    delta = second[None, :, :, 2] - first[:, None, :, 2]
    # Centres farther apart than both long half axes together cannot meet.
    long_1, long_2 = (np.linalg.norm(f[:, :, :2], 2, axis=(1, 2)) for f in (first, second))
    factor = NORMAL_RADIUS_PX / radius_1 if normalise else np.ones(len(first))
    reach = (long_1[:, None] + long_2[None]) * factor[:, None]
    near = (np.abs(delta) <= reach[..., None]).all(axis=2)
    near &= (ratio**2 >= min_overlap) & (ratio**2 <= 1 / min_overlap)
    i, j = np.nonzero(near)
    return i, j
