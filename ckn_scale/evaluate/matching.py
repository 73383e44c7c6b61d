"""Mikolajczyk's protocol for one pair of images: match regions by descriptor, judge them by overlap.

The choices, fixed once (README.md says why):
* a region is the ellipse of 3√3 detection scales, whatever square a descriptor looks at;
* all regions are matched one to one, greedily by Euclidean distance, and ranked by it;
* a match is right when the ellipses overlap by half (intersection over union);
* recall is counted against the one-to-one correspondences there are, greedily by overlap, among
  regions whose centre is seen in both images;
* the score is the area under the precision-recall curve, by trapezoids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckn_scale.core.regions import centres_inside, overlap_regions, pair_regions, project_frames
from ckn_scale.core.sampling import hash_priorities, smallest
from ckn_scale.evaluate.metrics import average_precision
from ckn_scale.evaluate.regions import Detected

REGION_SCALES = 3 * 3**0.5
MIN_OVERLAP = 0.5


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
    enlarged = frames.copy()
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
    return squares - 2 * (first @ second.T)


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
