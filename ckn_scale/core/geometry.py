"""Geometric verification: which tentative matches of two images one affine map or homography explains.

A point has an affine frame, so a single match already is a hypothesis: second · first⁻¹. Every match proposes
one and is judged by all (a match counts by how near it lands: MSAC), the best few are fitted to their inliers
by least squares, and the winner is offered the two more numbers of a homography. There is no chance in it:
the same matches in any order, alone or among other candidates, give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

INLIER_SHARE = 0.02  # of an image's longer side
MAX_HYPOTHESES = 128  # more matches than this: so many of them propose, spread over the image
NUM_REFINED = 3  # hypotheses of each candidate that are fitted
MIN_SUPPORT = 3.0  # of the best hypothesis, else nothing is fitted: most candidates show something else
MIN_HOMOGRAPHY_INLIERS = 10
MAX_STRETCH = 10.0  # of the longer to the shorter axis that a circle becomes
MAX_DEPTH_RATIO = 3.0  # by which perspective may enlarge or shrink, against the middle of the matches
# Rounds of least squares; each is the share of the limit within which a match has a weight. The first
# reach for inliers that an affine map misses, the last keep those a few pixels off from bending the map.
AFFINE_ROUNDS = (1.0, 1.0)
LAST_AFFINE_ROUNDS = (0.5, 0.25)
HOMOGRAPHY_ROUNDS = (2.0, 2.0, 2.0, 1.0, 0.5, 0.25)
_RIDGE = 1e-9  # what the matches leave open (they lie on a line, say) stays as the hypothesis had it
_FAR = 1e6  # where matches lie that only fill up a row
_BLOCK_CELLS = 2**16  # hypotheses · matches that are scored at once: more would leave the cache
_GROUP_MATCHES = 2**13  # of candidates that are fitted at once


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
    limits_px = inlier_share * np.stack(
        [np.full(len(sizes), max(first_size_px)), sizes.max(axis=1, initial=0)]
    )
    order = _sort_matches(first, second, offsets)
    found = [Verification(np.empty(0, np.int64))] * len(sizes)
    for chosen, length in _group_candidates(np.diff(offsets)):
        counts = np.diff(offsets)[chosen]
        present = np.arange(length) < counts[:, None]
        rows = order[
            np.where(present, offsets[chosen][:, None] + np.arange(length), offsets[chosen][:, None])
        ]
        group = _normalise(first[rows], second[rows], present, limits_px[:, chosen])
        models, inliers, bent = _fit_group(group, counts)
        transforms = group.to_pixels(models)
        for position, candidate in enumerate(chosen.tolist()):
            matches = np.sort(rows[position, inliers[position]])
            if len(matches) == 0:
                continue
            points = second[matches, :, 2].astype(np.float64)
            (x1, y1), (x2, y2) = points.min(axis=0).tolist(), points.max(axis=0).tolist()
            found[candidate] = Verification(
                matches - offsets[candidate],
                transforms[position],
                "homography" if bent[position] else "affine",
                (x1, y1, x2, y2),
            )
    return found


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


def _sort_matches(first: np.ndarray, second: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """An order (N,) within each candidate that is not the caller's, so that sums are equal to the bit."""
    numbers = np.concatenate([first.reshape(-1, 6), second.reshape(-1, 6)], axis=1)
    mixed = np.sum(numbers * np.sqrt([2.0, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37]), axis=1)
    return np.lexsort((mixed, np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))))


def _group_candidates(counts: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Candidates (G,) whose matches are padded to one length, and that length.

    The length follows from a candidate's own count (a quarter more at most), because the rounding of a sum
    depends on it. Candidates without matches are left out.
    """
    steps = 2 ** np.maximum(np.floor(np.log2(np.maximum(counts, 1))).astype(np.int64) - 2, 3)
    lengths = np.where(counts > 0, -(-counts // steps) * steps, 0)
    for length in np.unique(lengths[lengths > 0]).tolist():
        members = np.flatnonzero(lengths == length)
        size = max(1, _GROUP_MATCHES // length)
        for start in range(0, len(members), size):
            yield members[start : start + size], length


@dataclass(frozen=True)
class _Group:
    """G candidates with M matches each, positions centred and of unit spread; unused matches are far away."""

    x: np.ndarray  # (2, G, M) positions in the first image
    y: np.ndarray  # (2, G, M) in the second
    limits: np.ndarray  # (2, G) how far off a match may land, in either image
    shapes: np.ndarray  # (G, M, 2, 2) linear parts of second · first⁻¹; zero where a frame has no area
    from_first: np.ndarray  # (G, 3, 3) pixels → x
    to_second: np.ndarray  # (G, 3, 3) y → pixels

    def take(self, rows: np.ndarray) -> _Matches:
        """The matches of some candidates, as often as they are named."""
        return _Matches(self.x[:, rows], self.y[:, rows], self.limits[:, rows, None])

    def to_pixels(self, models: np.ndarray) -> np.ndarray:
        """(G, 3, 3) maps of x to y → the same of pixels, with 1 in the corner where that is possible."""
        transforms: np.ndarray = self.to_second @ models @ self.from_first
        corner = transforms[:, 2:, 2:]
        return transforms / np.where(np.abs(corner) > 1e-12, corner, 1.0)


def _normalise(first: np.ndarray, second: np.ndarray, present: np.ndarray, limits_px: np.ndarray) -> _Group:
    """`first` and `second` (G, M, 2, 3), `present` (G, M) bool, `limits_px` (2, G)."""
    weights = present / present.sum(axis=1, keepdims=True)
    centred, spreads, matrices = [], [], []
    for frames in (first, second):
        points = np.ascontiguousarray(np.moveaxis(frames[..., 2], 2, 0), np.float64)  # (2, G, M)
        mean = np.sum(points * weights, axis=2)  # (2, G)
        offset = points - mean[..., None]
        spread = np.sqrt(np.sum((offset[0] ** 2 + offset[1] ** 2) * weights, axis=1))
        spread = np.where(spread > 1e-6, spread, 1.0)
        matrix = np.zeros((len(frames), 3, 3))
        matrix[:, 0, 0] = matrix[:, 1, 1] = spread
        matrix[:, :2, 2], matrix[:, 2, 2] = mean.T, 1
        centred.append(offset / spread[:, None])
        spreads.append(spread)
        matrices.append(matrix)
    shapes = _divide(second[..., :2].astype(np.float64), first[..., :2].astype(np.float64))
    return _Group(
        x=np.where(present, centred[0], 0.0),
        y=np.where(present, centred[1], _FAR),
        limits=limits_px / np.stack(spreads),
        shapes=shapes * (spreads[0] / spreads[1])[:, None, None, None],
        from_first=np.linalg.inv(matrices[0]),
        to_second=matrices[1],
    )


def _divide(second: np.ndarray, first: np.ndarray) -> np.ndarray:
    """second · first⁻¹ of (…, 2, 2), zero where `first` has no inverse."""
    a, b, c, d = first[..., 0, 0], first[..., 0, 1], first[..., 1, 0], first[..., 1, 1]
    area = a * d - b * c
    factor = np.where(np.abs(area) > 1e-9, 1 / np.where(area == 0, 1, area), 0)
    left = second[..., 0] * (d * factor)[..., None] - second[..., 1] * (c * factor)[..., None]
    right = second[..., 1] * (a * factor)[..., None] - second[..., 0] * (b * factor)[..., None]
    return np.stack([left, right], axis=-1)


def _fit_group(group: _Group, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Maps (G, 3, 3) of x to y, their inliers (G, M), and whether each is a homography (G,)."""
    models, support = _score_hypotheses(group, counts)
    best = np.argsort(-support, axis=1, kind="stable")[:, :NUM_REFINED]
    models = np.take_along_axis(models, best[..., None, None], axis=1)
    found, bent = models[:, 0].copy(), np.zeros(len(counts), bool)
    promising = np.flatnonzero(support.max(axis=1) >= MIN_SUPPORT)
    if len(promising):
        found[promising], bent[promising] = _refine(group, models[promising], promising)
    sane = found[:, 2, 2] > 0
    inliers = sane[:, None] & (group.take(np.arange(len(counts))).measure(found)[0] <= 1)
    return found, inliers, bent


def _refine(group: _Group, models: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best map (G, 3, 3) that hypotheses (G, R, 3, 3) of some candidates lead to, and if it is bent."""
    size, number = models.shape[:2]
    repeated = group.take(np.repeat(chosen, number))
    refined, support = repeated.refine(models.reshape(-1, 3, 3), AFFINE_ROUNDS, perspective=False)
    winner = np.arange(size) * number + support.reshape(size, -1).argmax(axis=1)

    matches = group.take(chosen)
    affine, support = matches.refine(refined[winner], LAST_AFFINE_ROUNDS, perspective=False)
    bent, bent_support = matches.refine(refined[winner], HOMOGRAPHY_ROUNDS, perspective=True)
    inliers, bent_inliers = (matches.measure(one)[0] <= 1 for one in (affine, bent))
    use_bent = bent_inliers.sum(axis=1) >= np.maximum(inliers.sum(axis=1), MIN_HOMOGRAPHY_INLIERS)
    use_bent &= bent_support > support
    return np.where(use_bent[:, None, None], bent, affine), use_bent


def _score_hypotheses(group: _Group, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The map (G, H, 3, 3) that each match proposes, and how much of all matches it explains (G, H)."""
    size, length = group.x.shape[1:]
    number = min(length, MAX_HYPOTHESES)
    proposing = np.arange(number) * np.maximum(counts, number)[:, None] // number  # (G, H)
    shapes = np.take_along_axis(group.shapes, proposing[..., None, None], axis=1)
    x, y = (np.take_along_axis(one, proposing[None], axis=2) for one in (group.x, group.y))
    models = np.zeros((size, number, 3, 3))
    models[..., :2, :2] = shapes
    for axis in range(2):
        models[..., axis, 2] = y[axis] - shapes[..., axis, 0] * x[0] - shapes[..., axis, 1] * x[1]
    models[..., 2, 2] = 1
    area = shapes[..., 0, 0] * shapes[..., 1, 1] - shapes[..., 0, 1] * shapes[..., 1, 0]
    sane = (proposing < counts[:, None]) & _is_sane(area, np.sum(shapes**2, axis=(-1, -2)))
    models[~sane] = 0  # explains nothing
    limit_1, limit_2 = group.limits[..., None] ** 2
    scales = (-1 / np.minimum(limit_2, np.where(sane, area, 1) * limit_1)).astype(np.float32)

    rows, support = models[..., :2, :].astype(np.float32)[..., None], np.empty((size, number), np.float32)
    x_all, y_all = group.x.astype(np.float32)[:, :, None], group.y.astype(np.float32)[:, :, None]
    step = max(1, _BLOCK_CELLS // (number * length))
    for start in range(0, size, step):
        block = slice(start, start + step)
        off = np.zeros((), np.float32)
        for axis in range(2):
            delta = rows[block, :, axis, 0] * x_all[0, block]  # (candidates, hypotheses, matches)
            delta += rows[block, :, axis, 1] * x_all[1, block]
            delta += rows[block, :, axis, 2]
            delta -= y_all[axis, block]
            off = np.square(delta, out=delta) + off
        off *= scales[block, :, None]
        off += 1
        support[block] = np.maximum(off, 0, out=off).sum(axis=2)
    return models, np.where(sane, support, -1)


def _is_sane(area: np.ndarray, square_norm: np.ndarray) -> np.ndarray:
    """Whether linear maps of this determinant and squared norm keep the orientation and stretch little."""
    bound = MAX_STRETCH + 1 / MAX_STRETCH
    sane: np.ndarray = (area > 1e-12) & (square_norm <= bound * area)
    return sane


@dataclass(frozen=True)
class _Matches:
    """What B maps (B, 3, 3) are fitted to, each to its own M matches."""

    x: np.ndarray  # (2, B, M)
    y: np.ndarray  # (2, B, M)
    limits: np.ndarray  # (2, B, 1)

    def measure(self, models: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """By how much each match misses (B, M), where it lands (2, B, M), and its depth.

        The miss is a squared distance, 1 at the limit and infinite where the map is not sane. The depth is
        (B, M), or (B, 1) when all maps are affine.
        """
        h = models.transpose(1, 2, 0)[..., None]  # (3, 3, B, 1)
        x, y = self.x
        bent = bool(models[:, 2, :2].any())
        depths = h[2, 0] * x + h[2, 1] * y + h[2, 2] if bent else h[2, 2]
        depths = np.where(np.abs(depths) > 1e-6, depths, 1e-6)
        there = np.stack([(h[row, 0] * x + h[row, 1] * y + h[row, 2]) / depths for row in range(2)])
        area = np.linalg.det(models)[:, None] / depths**3
        slopes = (
            h[row, column] - (there[row] * h[2, column] if bent else 0) for row, column in np.ndindex(2, 2)
        )
        sane = (depths > 1 / MAX_DEPTH_RATIO) & (depths < MAX_DEPTH_RATIO)
        sane &= _is_sane(area * depths**2, sum(slope**2 for slope in slopes))
        reach = np.minimum(self.limits[1] ** 2, np.where(sane, area, 1) * self.limits[0] ** 2)
        squares = (self.y[0] - there[0]) ** 2 + (self.y[1] - there[1]) ** 2
        return np.where(sane, squares / reach, np.inf), there, depths

    def refine(
        self, models: np.ndarray, rounds: Sequence[float], *, perspective: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Maps after weighted least squares in rounds, and their support (B,).

        A step that explains less than the map before it is not taken.
        """
        off, there, depths = self.measure(models)
        for share in rounds:
            weights = np.maximum(1 - off / share**2, 0) ** 2
            residuals = np.where(weights > 0, self.y - there, 0)
            if perspective:
                moved = models + self._step_homography(there, depths, residuals, weights)
            else:
                moved = models + self._step_affine(residuals, weights)
            off_moved, there_moved, depths_moved = self.measure(moved)
            better = _add_up(off_moved, share) > _add_up(off, share)
            models = np.where(better[:, None, None], moved, models)
            off, there, depths = (
                np.where(better[:, None], new, old)
                for new, old in ((off_moved, off), (there_moved, there), (depths_moved, depths))
            )
        return models, _add_up(off)

    def _step_affine(self, residuals: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """The change (B, 3, 3) of affine maps that minimises the weighted squares."""
        points = np.stack([*self.x, np.ones_like(self.x[0])], axis=1)  # (B, 3, M)
        weighted = points * weights[:, None]
        change = np.zeros((len(weights), 3, 3))
        right = weighted @ residuals.transpose(1, 2, 0)
        change[:, :2] = _solve(weighted @ points.transpose(0, 2, 1), right).transpose(0, 2, 1)
        return change

    def _step_homography(
        self, there: np.ndarray, depths: np.ndarray, residuals: np.ndarray, weights: np.ndarray
    ) -> np.ndarray:
        """The same for homographies, linearised where they are: a step of Gauss and Newton."""
        size, length = weights.shape
        points = np.stack([*self.x, np.ones_like(self.x[0])], axis=1) / depths[:, None]  # (B, 3, M)
        jacobian = np.zeros((size, 8, 2, length))
        jacobian[:, :3, 0] = jacobian[:, 3:6, 1] = points
        jacobian[:, 6:] = -points[:, :2, None] * there.transpose(1, 0, 2)[:, None]
        weighted = (jacobian * weights[:, None, None]).reshape(size, 8, -1)
        normal = weighted @ jacobian.reshape(size, 8, -1).transpose(0, 2, 1)
        right = weighted @ residuals.transpose(1, 0, 2).reshape(size, -1, 1)
        change = np.zeros((size, 9))
        change[:, :8] = _solve(normal, right)[..., 0]
        return change.reshape(size, 3, 3)


def _add_up(off: np.ndarray, share: float = 1.0) -> np.ndarray:
    """(B,) support: a match counts 1 where it is met and nothing from `share` of the limit on."""
    support: np.ndarray = np.maximum(1 - off / share**2, 0).sum(axis=1)
    return support


def _solve(normal: np.ndarray, right: np.ndarray) -> np.ndarray:
    size = normal.shape[-1]
    ridge = _RIDGE * np.trace(normal, axis1=1, axis2=2) / size + 1e-12
    solution: np.ndarray = np.linalg.solve(normal + ridge[:, None, None] * np.eye(size), right)
    return solution
