"""The loops of geometric verification: the one transform that most matches of a candidate obey.

`geometry.py` says what is done, and has the constants. Positions are centred and of unit spread. A row of
`state` is what a transform does to one match: by how much it misses (a squared distance, 1 at the limit and
infinite where the transform is not sane), where it lands (x, y), and its depth.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckn_scale.core.compiled import compile_loop

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
AFFINE, HOMOGRAPHY = 1, 2  # kinds; 0 is none
_RIDGE = 1e-9  # what the matches leave open (they lie on a line, say) stays as the hypothesis had it
_ONE = 1 << 12  # support is added up in whole numbers: in any order and width the same
_STRETCH_BOUND = MAX_STRETCH + 1 / MAX_STRETCH
_MIXED = np.sqrt([2.0, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37])
_OFF, _X, _Y, _DEPTH = 0, 1, 2, 3


@compile_loop
def fit_candidates(
    first: np.ndarray,
    second: np.ndarray,
    offsets: np.ndarray,
    limits_px: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The transform (C, 3, 3) of each candidate, its kind (C,), and which matches (N,) are its inliers.

    `first` and `second` (N, 2, 3) float64 are frames, offsets[c] … offsets[c + 1] those of candidate c;
    `limits_px` (C, 2) in the first and the second image.
    """
    num_candidates = len(offsets) - 1
    transforms, kinds = np.zeros((num_candidates, 3, 3)), np.zeros(num_candidates, np.int8)
    is_inlier = np.zeros(len(first), np.bool_)
    for candidate in range(num_candidates):
        rows = _sort_matches(first, second, offsets[candidate], offsets[candidate + 1])
        if len(rows) == 0:
            continue
        x, mean_x, spread_x = _normalise(first, rows)
        y, mean_y, spread_y = _normalise(second, rows)
        limits = limits_px[candidate, 0] / spread_x, limits_px[candidate, 1] / spread_y
        shapes = _divide_shapes(first, second, rows, spread_x / spread_y)
        model, bent, state = _fit(x, y, shapes, limits)
        if model[2, 2] <= 0:
            continue
        for place in range(len(rows)):
            if state[place, _OFF] <= 1:
                is_inlier[rows[place]] = True
                kinds[candidate] = HOMOGRAPHY if bent else AFFINE
        transforms[candidate] = _to_pixels(model, mean_x, spread_x, mean_y, spread_y)
    return transforms, kinds, is_inlier


@compile_loop
def _sort_matches(first: np.ndarray, second: np.ndarray, start: int, end: int) -> np.ndarray:
    """These matches in an order that is not the caller's, so that sums are equal to the bit."""
    keys = np.zeros(end - start)
    for row in range(start, end):
        for axis in range(2):
            for column in range(3):
                place = 3 * axis + column
                keys[row - start] += first[row, axis, column] * _MIXED[place]
                keys[row - start] += second[row, axis, column] * _MIXED[6 + place]
    return np.argsort(keys, kind="mergesort") + start


@compile_loop
def _normalise(frames: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Positions (M, 2) centred and of unit spread, the centre (2,) and the spread."""
    points, mean, total = np.empty((len(rows), 2)), np.zeros(2), 0.0
    for row in rows:
        mean += frames[row, :, 2]
    mean /= len(rows)
    for place, row in enumerate(rows):
        points[place] = frames[row, :, 2] - mean
        total += points[place, 0] ** 2 + points[place, 1] ** 2
    spread = np.sqrt(total / len(rows))
    if spread <= 1e-6:
        spread = 1.0
    points /= spread
    return points, mean, spread


@compile_loop
def _divide_shapes(first: np.ndarray, second: np.ndarray, rows: np.ndarray, scale: float) -> np.ndarray:
    """(M, 2, 2) linear parts of second · first⁻¹, times `scale`; zero where a frame has no area."""
    shapes = np.zeros((len(rows), 2, 2))
    for place, row in enumerate(rows):
        one, other = first[row], second[row]
        area = one[0, 0] * one[1, 1] - one[0, 1] * one[1, 0]
        if abs(area) <= 1e-9:
            continue
        factor = scale / area
        for axis in range(2):
            shapes[place, axis, 0] = (other[axis, 0] * one[1, 1] - other[axis, 1] * one[1, 0]) * factor
            shapes[place, axis, 1] = (other[axis, 1] * one[0, 0] - other[axis, 0] * one[0, 1]) * factor
    return shapes


@compile_loop
def _fit(
    x: np.ndarray, y: np.ndarray, shapes: np.ndarray, limits: tuple[float, float]
) -> tuple[np.ndarray, bool, np.ndarray]:
    """The best map (3, 3) of x to y, whether it is a homography, and what it does to each match (M, 4)."""
    models, support = _score_hypotheses(x, y, shapes, limits)
    state, moved = np.empty((len(x), 4)), np.empty((len(x), 4))
    best = _find_best(support)
    if support[best[0]] < MIN_SUPPORT:
        _measure(models[best[0]], x, y, limits, state)
        return models[best[0]], False, state
    winner, most = models[best[0]].copy(), -1.0
    for one in best:
        model = models[one].copy()
        explained = _refine(model, AFFINE_ROUNDS, False, x, y, limits, state, moved)
        if explained > most:
            winner, most = model, explained
    affine = winner.copy()
    _measure(winner, x, y, limits, state)
    near = _count_within(state, 2.0)
    support_affine = _refine(affine, LAST_AFFINE_ROUNDS, False, x, y, limits, state, moved)
    if near < MIN_HOMOGRAPHY_INLIERS:
        return affine, False, state
    bent, bent_state = winner.copy(), np.empty((len(x), 4))
    support_bent = _refine(bent, HOMOGRAPHY_ROUNDS, True, x, y, limits, bent_state, moved)
    needed = max(_count_within(state, 1.0), MIN_HOMOGRAPHY_INLIERS)
    if support_bent > support_affine and _count_within(bent_state, 1.0) >= needed:
        return bent, True, bent_state
    return affine, False, state


@compile_loop
def _score_hypotheses(
    x: np.ndarray, y: np.ndarray, shapes: np.ndarray, limits: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """The map (H, 3, 3) that each match proposes, and how much of all matches it explains (H,)."""
    length = len(x)
    number = min(length, MAX_HYPOTHESES)
    models, support = np.zeros((number, 3, 3)), np.full(number, -1.0)
    columns = np.empty((4, length), np.float32)  # contiguous, for loops over all matches
    for axis in range(2):
        columns[axis], columns[2 + axis] = x[:, axis], y[:, axis]
    for one in range(number):
        match = one * length // number
        shape, model = shapes[match], models[one]
        area = shape[0, 0] * shape[1, 1] - shape[0, 1] * shape[1, 0]
        norm = shape[0, 0] ** 2 + shape[0, 1] ** 2 + shape[1, 0] ** 2 + shape[1, 1] ** 2
        if not (area > 1e-12 and norm <= _STRETCH_BOUND * area):
            continue
        model[:2, :2], model[2, 2] = shape, 1
        for axis in range(2):
            model[axis, 2] = y[match, axis] - shape[axis, 0] * x[match, 0] - shape[axis, 1] * x[match, 1]
        scale = np.float32(-_ONE / min(limits[1] ** 2, area * limits[0] ** 2))
        support[one] = _add_up_hypothesis(model.astype(np.float32), columns, scale) / _ONE
    return models, support


@compile_loop
def _add_up_hypothesis(model: np.ndarray, columns: np.ndarray, scale: float) -> Any:
    """Support of an affine map: a match counts `_ONE` where it is met, nothing at the limit and beyond."""
    a, b, c = model[0]
    d, e, f = model[1]
    x1, x2, y1, y2 = columns[0], columns[1], columns[2], columns[3]
    one, zero, total = np.float32(_ONE), np.float32(0), np.int32(0)
    for match in range(len(x1)):
        off_1 = a * x1[match] + b * x2[match] + c - y1[match]
        off_2 = d * x1[match] + e * x2[match] + f - y2[match]
        total += np.int32(max(one + scale * (off_1 * off_1 + off_2 * off_2), zero))
    return total


@compile_loop
def _find_best(support: np.ndarray) -> np.ndarray:
    """The `NUM_REFINED` hypotheses of most support, the first of equals first."""
    return np.argsort(-support, kind="mergesort")[:NUM_REFINED]


@compile_loop
def _measure(
    model: np.ndarray, x: np.ndarray, y: np.ndarray, limits: tuple[float, float], state: np.ndarray
) -> None:
    """Writes what a map (3, 3) does to each match."""
    minors = (
        model[1, 1] * model[2, 2] - model[1, 2] * model[2, 1],
        model[1, 0] * model[2, 2] - model[1, 2] * model[2, 0],
        model[1, 0] * model[2, 1] - model[1, 1] * model[2, 0],
    )
    determinant = model[0, 0] * minors[0] - model[0, 1] * minors[1] + model[0, 2] * minors[2]
    reach_1, reach_2 = limits[0] ** 2, limits[1] ** 2
    for match in range(len(x)):
        x1, x2 = x[match]
        depth = model[2, 0] * x1 + model[2, 1] * x2 + model[2, 2]
        if abs(depth) <= 1e-6:
            depth = 1e-6
        there_1 = (model[0, 0] * x1 + model[0, 1] * x2 + model[0, 2]) / depth
        there_2 = (model[1, 0] * x1 + model[1, 1] * x2 + model[1, 2]) / depth
        norm = 0.0
        for column in range(2):
            norm += (model[0, column] - there_1 * model[2, column]) ** 2
            norm += (model[1, column] - there_2 * model[2, column]) ** 2
        scaled = determinant / depth  # the area of a small square there, times depth²
        off = np.inf
        if (
            1 / MAX_DEPTH_RATIO < depth < MAX_DEPTH_RATIO
            and scaled > 1e-12
            and norm <= _STRETCH_BOUND * scaled
        ):
            reach = min(reach_2, scaled / depth**2 * reach_1)
            off = ((y[match, 0] - there_1) ** 2 + (y[match, 1] - there_2) ** 2) / reach
        state[match, _OFF], state[match, _X], state[match, _Y] = off, there_1, there_2
        state[match, _DEPTH] = depth


@compile_loop
def _refine(
    model: np.ndarray,
    rounds: tuple[float, ...],
    perspective: bool,
    x: np.ndarray,
    y: np.ndarray,
    limits: tuple[float, float],
    state: np.ndarray,
    moved: np.ndarray,
) -> float:
    """Weighted least squares in rounds, in place; the map's support, and in `state` what it does.

    A step that explains less than the map before it is not taken.
    """
    _measure(model, x, y, limits, state)
    for share in rounds:
        step = _step(x, y, state, share, perspective)
        _measure(model + step, x, y, limits, moved)
        if _add_up(moved, share) > _add_up(state, share):
            model += step
            state[:] = moved
    return _add_up(state, 1.0)


@compile_loop
def _step(x: np.ndarray, y: np.ndarray, state: np.ndarray, share: float, perspective: bool) -> np.ndarray:
    """The change (3, 3) of a map that minimises the weighted squares: a step of Gauss and Newton."""
    size = 8 if perspective else 6
    normal, right = np.zeros((size, size)), np.zeros(size)
    row_1, row_2 = np.zeros(size), np.zeros(size)
    for match in range(len(x)):
        nearness = 1 - state[match, _OFF] / share**2
        if nearness <= 0:
            continue
        weight, depth = nearness**2, state[match, _DEPTH]
        there_1, there_2 = state[match, _X], state[match, _Y]
        for column in range(3):
            value = (x[match, column] if column < 2 else 1.0) / depth
            row_1[column] = row_2[3 + column] = value
            if perspective and column < 2:
                row_1[6 + column], row_2[6 + column] = -value * there_1, -value * there_2
        off_1, off_2 = y[match, 0] - there_1, y[match, 1] - there_2
        for i in range(size):
            right[i] += weight * (row_1[i] * off_1 + row_2[i] * off_2)
            for j in range(i + 1):
                normal[i, j] += weight * (row_1[i] * row_1[j] + row_2[i] * row_2[j])
    change = np.zeros(9)
    change[:size] = _solve(normal, right)
    return change.reshape(3, 3)


@compile_loop
def _solve(normal: np.ndarray, right: np.ndarray) -> np.ndarray:
    """By Cholesky, of the lower half of a matrix without negative directions."""
    size, trace = len(right), 0.0
    for i in range(size):
        trace += normal[i, i]
    ridge = _RIDGE * trace / size + 1e-12
    for i in range(size):
        normal[i, i] += ridge
        for j in range(i + 1):
            total = normal[i, j]
            for k in range(j):
                total -= normal[i, k] * normal[j, k]
            normal[i, j] = np.sqrt(max(total, 1e-300)) if i == j else total / normal[j, j]
    for i in range(size):
        for k in range(i):
            right[i] -= normal[i, k] * right[k]
        right[i] /= normal[i, i]
    for i in range(size - 1, -1, -1):
        for k in range(i + 1, size):
            right[i] -= normal[k, i] * right[k]
        right[i] /= normal[i, i]
    return right


@compile_loop
def _add_up(state: np.ndarray, share: float) -> float:
    """Support: a match counts 1 where it is met and nothing from `share` of the limit on."""
    total = 0.0
    for match in range(len(state)):
        total += max(1 - state[match, _OFF] / share**2, 0.0)
    return total


@compile_loop
def _count_within(state: np.ndarray, share: float) -> int:
    """Matches that land within this share of the limit."""
    count = 0
    for match in range(len(state)):
        count += state[match, _OFF] <= share**2
    return count


@compile_loop
def _to_pixels(
    model: np.ndarray, mean_x: np.ndarray, spread_x: float, mean_y: np.ndarray, spread_y: float
) -> np.ndarray:
    """The map of x to y as one of pixels, with 1 in the corner where that is possible."""
    from_first, to_second = np.eye(3), np.eye(3)
    for axis in range(2):
        from_first[axis, axis], from_first[axis, 2] = 1 / spread_x, -mean_x[axis] / spread_x
        to_second[axis, axis], to_second[axis, 2] = spread_y, mean_y[axis]
    transform = np.zeros((3, 3))
    for i in range(3):
        for j in range(3):
            for k in range(3):
                for m in range(3):
                    transform[i, j] += to_second[i, k] * model[k, m] * from_first[m, j]
    corner = transform[2, 2]
    if abs(corner) > 1e-12:
        transform /= corner
    return transform
