"""Geometric verification: which tentative matches of two images one affine map or homography explains.

A point has an affine frame, so a single match already is a hypothesis: second · first⁻¹. Every match proposes
one and is judged by all (a match counts by how near it lands: MSAC), the best few are fitted to their inliers
by least squares, and the winner is offered the two more numbers of a homography. There is no chance in it:
the same matches, alone or among other candidates, give the same bits. The loops are in `fit_transforms.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

INLIER_SHARE = 0.02  # of an image's longer side
_KINDS: tuple[Literal["none", "affine", "homography"], ...] = ("none", "affine", "homography")


@dataclass(frozen=True)
class Verification:
    """What the matches of two images have in common; without an inlier there is no transform and no box."""

    inliers: np.ndarray  # (K,) int64 positions among the tentative matches, ascending
    transform: np.ndarray | None = None  # (3, 3) float64: a pixel of the first image → the second
    kind: Literal["none", "affine", "homography"] = "none"
    box: tuple[float, float, float, float] | None = None  # x1, y1, x2, y2 around them in the second image


def verify_matches(
    first: np.ndarray,
    second: np.ndarray,
    first_size_px: tuple[int, int],
    second_size_px: tuple[int, int],
    *,
    inlier_share: float = INLIER_SHARE,
) -> Verification:
    """Row i of `first` and of `second` (N, 2, 3) are the frames of match i; sizes are (width, height)."""
    offsets = np.array([0, len(first)])
    sizes = np.array([second_size_px])
    return verify_candidates(first, second, offsets, first_size_px, sizes, inlier_share=inlier_share)[0]


def verify_candidates(
    first: np.ndarray,
    second: np.ndarray,
    offsets: np.ndarray,
    first_size_px: tuple[int, int],
    second_sizes_px: np.ndarray,
    *,
    inlier_share: float = INLIER_SHARE,
) -> list[Verification]:
    """The same for one image against C candidates: matches offsets[c] … offsets[c + 1] are candidate c's.

    `first` and `second` (N, 2, 3) are frames as in `Keypoints`, `offsets` (C + 1,), `second_sizes_px` (C, 2).
    An inlier lands within `inlier_share` of the longer side, in both images. A result depends on its own
    candidate's matches alone. ValueError when shapes do not fit or a frame is not finite.
    """
    first, second, offsets = (np.asarray(one) for one in (first, second, offsets))
    sizes = np.asarray(second_sizes_px, np.float64)
    _check_input(first, second, offsets, sizes, inlier_share)
    from ckn_scale.core.fit_transforms import fit_candidates

    limits_px = inlier_share * np.stack(
        [np.full(len(sizes), max(first_size_px)), sizes.max(axis=1, initial=0)], axis=1
    )
    first, second = first.astype(np.float64), second.astype(np.float64)
    offsets = offsets.astype(np.int64)
    transforms, kinds, is_inlier = fit_candidates(first, second, offsets, limits_px)
    return [
        _make_verification(is_inlier[start:end], second[start:end, :, 2], transform, _KINDS[kind])
        for start, end, transform, kind in zip(offsets[:-1], offsets[1:], transforms, kinds, strict=True)
    ]


def _make_verification(
    is_inlier: np.ndarray,
    points: np.ndarray,
    transform: np.ndarray,
    kind: Literal["none", "affine", "homography"],
) -> Verification:
    inliers = np.flatnonzero(is_inlier)
    if len(inliers) == 0:
        return Verification(inliers)
    x1, y1 = points[inliers].min(axis=0).tolist()
    x2, y2 = points[inliers].max(axis=0).tolist()
    return Verification(inliers, transform, kind, (x1, y1, x2, y2))


def _check_input(
    first: np.ndarray, second: np.ndarray, offsets: np.ndarray, sizes: np.ndarray, inlier_share: float
) -> None:
    if first.ndim != 3 or first.shape[1:] != (2, 3) or first.shape != second.shape:
        raise ValueError(f"frames of matches must be (N, 2, 3) twice, got {first.shape} and {second.shape}")
    if offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(first):
        raise ValueError(f"offsets must go from 0 to the {len(first)} matches, got {offsets}")
    if (np.diff(offsets) < 0).any():
        raise ValueError(f"offsets must not decrease, got {offsets}")
    if sizes.shape != (len(offsets) - 1, 2):
        raise ValueError(f"{len(offsets) - 1} candidates need as many sizes (C, 2), got {sizes.shape}")
    if not 0 < inlier_share < 1:
        raise ValueError(f"inlier_share must lie between 0 and 1, got {inlier_share}")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ValueError("frames must be finite")
