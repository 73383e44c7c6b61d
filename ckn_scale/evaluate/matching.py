"""Mikolajczyk's protocol for one pair of images: match regions by descriptor, judge them by overlap.

The choices, fixed once (README.md says why):
* a region is the ellipse of 3√3 detection scales, whatever square a descriptor looks at;
* all regions are matched one to one, greedily by Euclidean distance, and ranked by it;
* a match is right when the ellipses overlap by half (intersection over union);
* recall is counted against the one-to-one correspondences there are, greedily by overlap, among
  regions whose centre is seen in both images;
* the score is the area under the precision-recall curve, by trapezoids.

The geometry is below: regions carried through a homography, their overlap, their pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckn_scale.core.sampling import hash_priorities, smallest
from ckn_scale.evaluate.metrics import average_precision
from ckn_scale.evaluate.regions import Detected

REGION_SCALES = 3 * 3**0.5
MIN_OVERLAP = 0.5
NORMAL_RADIUS_PX = 30.0  # regions are compared at this size, or large ones would always win
NUM_CHORDS = 48


@dataclass(frozen=True)
class PairTruth:
    """What the homography says about two images: `first` are the regions of image 1 carried to image 2."""

    first: np.ndarray  # (N, 2, 3), in image 2
    second: np.ndarray  # (M, 2, 3)
    seen_first: np.ndarray  # (N,) whether image 2 shows its centre
    seen_second: np.ndarray  # (M,)
    rows_first: np.ndarray  # (N,) which of image 1's regions these are
    num_correspondences: int
    num_normalised: int  # with regions rescaled to one radius, as the VGG code does


@dataclass(frozen=True)
class PairScore:
    """How well one descriptor matched one pair of images."""

    ap: float
    ap_normalised: float
    right: int
    matches: int
    correspondences: int


def find_truth(
    first: Detected, second: Detected, homography: np.ndarray, *, max_regions: int | None = None
) -> PairTruth:
    """At most `max_regions` of the first image take part, drawn by hash: a dense grid has no strongest."""
    rows_first = np.arange(len(first.keypoints))
    if max_regions is not None:
        rows_first = np.sort(smallest(hash_priorities(0, rows_first), max_regions))
    forward = project_frames(first.keypoints.frames[rows_first].astype(np.float64), homography)
    there = second.keypoints.frames.astype(np.float64)
    backward = project_frames(there, np.linalg.inv(homography))
    seen_first = centres_inside(forward, second.height_px, second.width_px)
    seen_second = centres_inside(backward, first.height_px, first.width_px)
    carried, there = enlarge(forward, REGION_SCALES), enlarge(there, REGION_SCALES)
    counts = [
        len(pair_regions(carried[seen_first], there[seen_second], min_overlap=MIN_OVERLAP, normalise=one)[0])
        for one in (False, True)
    ]
    return PairTruth(carried, there, seen_first, seen_second, rows_first, *counts)


def enlarge(frames: np.ndarray, factor: float) -> np.ndarray:
    """Frames (N, 2, 3) of regions `factor` times as large."""
    enlarged: np.ndarray = frames.copy()
    enlarged[:, :, :2] *= factor
    return enlarged


def score_pair(truth: PairTruth, rows_first: np.ndarray, rows_second: np.ndarray) -> PairScore:
    """`rows` are the descriptors (N, D) of all regions of either image."""
    i, j = match_greedily(measure_distances(rows_first[truth.rows_first], rows_second))
    seen = truth.seen_first[i] & truth.seen_second[j]
    right, right_normalised = (
        seen & (overlap_regions(truth.first[i], truth.second[j], normalise=one) >= MIN_OVERLAP)
        for one in (False, True)
    )
    return PairScore(
        ap=average_precision(right, truth.num_correspondences),
        ap_normalised=average_precision(right_normalised, truth.num_normalised),
        right=int(right.sum()),
        matches=len(i),
        correspondences=truth.num_correspondences,
    )


def measure_distances(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Squared Euclidean distances (N, M)."""
    squares = np.sum(first**2, axis=1)[:, None] + np.sum(second**2, axis=1)
    distances: np.ndarray = squares - 2 * (first @ second.T)
    return distances


def match_greedily(distances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One-to-one matches (i, j), nearest first: always the smallest distance between two that are free.

    In rounds: two that are each other's nearest are what greedy matching would take, in any order.
    """
    if distances.size == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    rows, columns, rest = np.arange(distances.shape[0]), np.arange(distances.shape[1]), distances
    taken = []
    while rest.size:
        nearest, back = rest.argmin(axis=1), rest.argmin(axis=0)
        mutual = np.flatnonzero(back[nearest] == np.arange(len(nearest)))
        taken.append(np.stack([rows[mutual], columns[nearest[mutual]]], axis=1))
        keep_columns = np.setdiff1d(np.arange(len(columns)), nearest[mutual])
        keep_rows = np.setdiff1d(np.arange(len(rows)), mutual)
        rows, columns, rest = rows[keep_rows], columns[keep_columns], rest[np.ix_(keep_rows, keep_columns)]
    i, j = np.concatenate(taken).T
    order = np.argsort(distances[i, j], kind="stable")
    return i[order], j[order]


def project_frames(frames: np.ndarray, homography: np.ndarray) -> np.ndarray:
    """Frames (N, 2, 3) in the other image: the centre exactly, the shape by the homography's derivative."""
    h = homography / homography[2, 2]
    centre = np.concatenate([frames[:, :, 2], np.ones((len(frames), 1))], axis=1) @ h.T  # (N, 3)
    depth = centre[:, 2]
    position = centre[:, :2] / depth[:, None]
    derivative = (h[None, :2, :2] - position[:, :, None] * h[None, 2:, :2]) / depth[:, None, None]
    return np.concatenate([derivative @ frames[:, :, :2], position[:, :, None]], axis=2)


def centres_inside(frames: np.ndarray, height_px: int, width_px: int) -> np.ndarray:
    """(N,) bool: whether the image shows the centre of each frame."""
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
    ratio: np.ndarray = shared / (areas - shared)
    return ratio


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
    area: np.ndarray = np.maximum(chord, 0.0) @ half * (np.pi / NUM_CHORDS)
    return area


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
