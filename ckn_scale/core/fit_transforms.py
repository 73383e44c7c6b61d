"""The loops of geometric verification: the one transform that most matches of a candidate obey.

`geometry.py` says what is done. Positions are centred and of unit spread. A row of `state` is what a map
does to one match: by how much it misses (a squared distance, 1 at the limit and infinite where the transform
is not sane), where it lands (x, y), and its depth. Loops go over numbers, not arrays: numba takes seconds to
compile an expression of arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckn_scale.core.compiled import compile_loop

MAX_HYPOTHESES = 512  # more matches than this: so many of them propose, evenly spaced
NUM_REFINED = 3  # hypotheses of each candidate that are fitted
MIN_SUPPORT = 3.0  # of the best hypothesis, else nothing is fitted: most candidates show something else
MIN_HOMOGRAPHY_INLIERS = 10
MAX_STRETCH = 10.0  # of the longer to the shorter axis that a circle becomes
MAX_DEPTH_RATIO = 3.0  # by which perspective may enlarge or shrink, against the middle of the matches
# Rounds of least squares; each is the share of the limit within which a match has a weight. The first
# reach for inliers that an affine map misses, the last keep those a few pixels off from bending the map.
AFFINE_ROUNDS = np.array([1.0, 1.0])
LAST_AFFINE_ROUNDS = np.array([0.5, 0.25])
HOMOGRAPHY_ROUNDS = np.array([2.0, 2.0, 2.0, 1.0, 0.5, 0.25])
AFFINE, HOMOGRAPHY = 1, 2  # kinds; 0 is none
_RIDGE = 1e-9  # what the matches leave open (they lie on a line, say) stays as the hypothesis had it
_ONE = 1 << 12  # support is added up in whole numbers, which is fast: no order of the sum has to be kept
_STRETCH_BOUND = MAX_STRETCH + 1 / MAX_STRETCH
_OFF, _X, _Y, _DEPTH = 0, 1, 2, 3


@compile_loop
def fit_candidates(
    first: np.ndarray, second: np.ndarray, offsets: np.ndarray, limits_px: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The transform (C, 3, 3) of each candidate, its kind (C,), and which matches (N,) are its inliers.

    `first` and `second` (N, 2, 3) float64 are frames, offsets[c] … offsets[c + 1] those of candidate c;
    `limits_px` (C, 2) in the first and the second image.
    """
    num_candidates = len(offsets) - 1
    transforms, kinds = np.zeros((num_candidates, 3, 3)), np.zeros(num_candidates, np.int8)
    is_inlier = np.zeros(len(first), np.bool_)
    for candidate in range(num_candidates):
        start, end = offsets[candidate], offsets[candidate + 1]
        if start == end:
            continue
        x, mean_x, spread_x = _normalise(first, start, end)
        y, mean_y, spread_y = _normalise(second, start, end)
        limits = limits_px[candidate, 0] / spread_x, limits_px[candidate, 1] / spread_y
        shapes = _divide_shapes(first, second, start, end, spread_x / spread_y)
        model, state = np.empty((3, 3)), np.empty((end - start, 4))
        bent = _fit(x, y, shapes, limits, model, state)
        if model[2, 2] <= 0:
            continue
        for match in range(start, end):
            if state[match - start, _OFF] <= 1:
                is_inlier[match] = True
                kinds[candidate] = HOMOGRAPHY if bent else AFFINE
        _write_in_pixels(model, mean_x, spread_x, mean_y, spread_y, transforms[candidate])
    return transforms, kinds, is_inlier


@compile_loop
def _normalise(frames: np.ndarray, start: int, end: int) -> tuple[np.ndarray, tuple[float, float], float]:
    """Positions (M, 2) centred and of unit spread, their centre, and their spread."""
    count, mean_1, mean_2, total = end - start, 0.0, 0.0, 0.0
    points = np.empty((count, 2))
    for match in range(start, end):
        mean_1 += frames[match, 0, 2] / count
        mean_2 += frames[match, 1, 2] / count
    for match in range(count):
        points[match, 0] = frames[start + match, 0, 2] - mean_1
        points[match, 1] = frames[start + match, 1, 2] - mean_2
        total += points[match, 0] ** 2 + points[match, 1] ** 2
    spread = np.sqrt(total / count)
    if spread <= 1e-6:
        spread = 1.0
    for match in range(count):
        points[match, 0] /= spread
        points[match, 1] /= spread
    return points, (mean_1, mean_2), spread


@compile_loop
def _divide_shapes(first: np.ndarray, second: np.ndarray, start: int, end: int, scale: float) -> np.ndarray:
    """(M, 2, 2) linear parts of second · first⁻¹, times `scale`; zero where a frame has no area."""
    shapes = np.zeros((end - start, 2, 2))
    for match in range(start, end):
        area = first[match, 0, 0] * first[match, 1, 1] - first[match, 0, 1] * first[match, 1, 0]
        if abs(area) <= 1e-9:
            continue
        factor = scale / area
        for axis in range(2):
            left, right = second[match, axis, 0] * factor, second[match, axis, 1] * factor
            shapes[match - start, axis, 0] = left * first[match, 1, 1] - right * first[match, 1, 0]
            shapes[match - start, axis, 1] = right * first[match, 0, 0] - left * first[match, 0, 1]
    return shapes


@compile_loop
def _fit(
    x: np.ndarray,
    y: np.ndarray,
    shapes: np.ndarray,
    limits: tuple[float, float],
    model: np.ndarray,
    state: np.ndarray,
) -> bool:
    """Writes the best map (3, 3) of x to y and what it does to each match; whether it is a homography."""
    models, support = _score_hypotheses(x, y, shapes, limits)
    best = _find_best(support)
    _copy(models[best[0]], model)
    if support[best[0]] < MIN_SUPPORT:
        _measure(model, x, y, limits, state)
        return False
    moved, tried, most = np.empty_like(state), np.empty((3, 3)), -1.0
    for one in best:
        _copy(models[one], tried)
        explained = _refine(tried, AFFINE_ROUNDS, False, x, y, limits, state, moved)
        if explained > most:
            most = explained
            _copy(tried, model)
    _measure(model, x, y, limits, state)
    if _count_within(state, 2.0) < MIN_HOMOGRAPHY_INLIERS:
        _refine(model, LAST_AFFINE_ROUNDS, False, x, y, limits, state, moved)
        return False
    _copy(model, tried)
    bent_state = np.empty_like(state)
    support_bent = _refine(tried, HOMOGRAPHY_ROUNDS, True, x, y, limits, bent_state, moved)
    support_affine = _refine(model, LAST_AFFINE_ROUNDS, False, x, y, limits, state, moved)
    needed = max(_count_within(state, 1.0), MIN_HOMOGRAPHY_INLIERS)
    if support_bent > support_affine and _count_within(bent_state, 1.0) >= needed:
        _copy(tried, model)
        _copy(bent_state, state)
        return True
    return False


@compile_loop
def _score_hypotheses(
    x: np.ndarray, y: np.ndarray, shapes: np.ndarray, limits: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """The map (H, 3, 3) that each match proposes, and how much of all matches it explains (H,)."""
    length = len(x)
    number = min(length, MAX_HYPOTHESES)
    models, support = np.zeros((number, 3, 3)), np.empty(number)
    columns = np.empty((4, length), np.float32)  # contiguous, for loops over all matches
    for match in range(length):
        columns[0, match], columns[1, match] = x[match, 0], x[match, 1]
        columns[2, match], columns[3, match] = y[match, 0], y[match, 1]
    for one in range(number):
        match, norm, support[one] = one * length // number, 0.0, -1.0
        for axis in range(2):
            norm += shapes[match, axis, 0] ** 2 + shapes[match, axis, 1] ** 2
        area = shapes[match, 0, 0] * shapes[match, 1, 1] - shapes[match, 0, 1] * shapes[match, 1, 0]
        if not (area > 1e-12 and norm <= _STRETCH_BOUND * area):
            continue
        models[one, 2, 2] = 1
        for axis in range(2):
            left, right = shapes[match, axis, 0], shapes[match, axis, 1]
            models[one, axis, 0], models[one, axis, 1] = left, right
            models[one, axis, 2] = y[match, axis] - left * x[match, 0] - right * x[match, 1]
        scale = np.float32(-_ONE / min(limits[1] ** 2, area * limits[0] ** 2))
        support[one] = _add_up_hypothesis(models[one], columns, scale) / _ONE
    return models, support


@compile_loop
def _add_up_hypothesis(model: np.ndarray, columns: np.ndarray, scale: float) -> Any:
    """Support of an affine map: a match counts `_ONE` where it is met, nothing at the limit and beyond."""
    a, b, c = np.float32(model[0, 0]), np.float32(model[0, 1]), np.float32(model[0, 2])
    d, e, f = np.float32(model[1, 0]), np.float32(model[1, 1]), np.float32(model[1, 2])
    x1, x2, y1, y2 = columns[0], columns[1], columns[2], columns[3]
    one, zero, total = np.float32(_ONE), np.float32(0), np.int32(0)
    for match in range(len(x1)):
        off_1 = a * x1[match] + b * x2[match] + c - y1[match]
        off_2 = d * x1[match] + e * x2[match] + f - y2[match]
        total += np.int32(max(one + scale * (off_1 * off_1 + off_2 * off_2), zero))
    return total


@compile_loop
def _find_best(support: np.ndarray) -> np.ndarray:
    """At most `NUM_REFINED` hypotheses, most support first, of equals the first one."""
    best = np.empty(min(len(support), NUM_REFINED), np.int64)
    for place in range(len(best)):
        best[place] = -1
        for one in range(len(support)):
            if best[place] >= 0 and support[one] <= support[best[place]]:
                continue
            taken = False
            for before in range(place):
                taken |= best[before] == one
            if not taken:
                best[place] = one
    return best


@compile_loop
def _measure(
    model: np.ndarray, x: np.ndarray, y: np.ndarray, limits: tuple[float, float], state: np.ndarray
) -> None:
    """Writes what a map (3, 3) does to each match."""
    a, b, c = model[0, 0], model[0, 1], model[0, 2]
    d, e, f = model[1, 0], model[1, 1], model[1, 2]
    g, h, i = model[2, 0], model[2, 1], model[2, 2]
    determinant = a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)
    for match in range(len(x)):
        x1, x2 = x[match, 0], x[match, 1]
        depth = g * x1 + h * x2 + i
        if abs(depth) <= 1e-6:
            depth = 1e-6
        there_1, there_2 = (a * x1 + b * x2 + c) / depth, (d * x1 + e * x2 + f) / depth
        norm = (a - there_1 * g) ** 2 + (b - there_1 * h) ** 2
        norm += (d - there_2 * g) ** 2 + (e - there_2 * h) ** 2
        area = determinant / depth  # of what a unit square becomes there, times depth²
        off = np.inf
        if 1 / MAX_DEPTH_RATIO < depth < MAX_DEPTH_RATIO and area > 1e-12 and norm <= _STRETCH_BOUND * area:
            reach = min(limits[1] ** 2, area / depth**2 * limits[0] ** 2)
            off = ((y[match, 0] - there_1) ** 2 + (y[match, 1] - there_2) ** 2) / reach
        state[match, _OFF], state[match, _DEPTH] = off, depth
        state[match, _X], state[match, _Y] = there_1, there_2


@compile_loop
def _refine(
    model: np.ndarray,
    rounds: np.ndarray,
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
    changed = np.empty((3, 3))
    _measure(model, x, y, limits, state)
    for share in rounds:
        change = _find_change(x, y, state, share, perspective)
        for place in range(9):
            changed[place // 3, place % 3] = model[place // 3, place % 3] + change[place]
        _measure(changed, x, y, limits, moved)
        if _add_up(moved, share) > _add_up(state, share):
            _copy(changed, model)
            _copy(moved, state)
    return _add_up(state, 1.0)


@compile_loop
def _find_change(
    x: np.ndarray, y: np.ndarray, state: np.ndarray, share: float, perspective: bool
) -> np.ndarray:
    """The change (9,) of a map that minimises the weighted squares: a step of Gauss and Newton."""
    size = 8 if perspective else 6
    normal, right = np.zeros((size, size)), np.zeros(9)
    row_1, row_2 = np.zeros(size), np.zeros(size)
    for match in range(len(x)):
        nearness = 1 - state[match, _OFF] / share**2
        if nearness <= 0:
            continue
        weight, depth = nearness**2, state[match, _DEPTH]
        there_1, there_2 = state[match, _X], state[match, _Y]
        for column in range(3):
            value = (x[match, column] if column < 2 else 1.0) / depth
            row_1[column] = value
            row_2[3 + column] = value
            if perspective and column < 2:
                row_1[6 + column] = -value * there_1
                row_2[6 + column] = -value * there_2
        off_1, off_2 = y[match, 0] - there_1, y[match, 1] - there_2
        for i in range(size):
            right[i] += weight * (row_1[i] * off_1 + row_2[i] * off_2)
            for j in range(i + 1):
                normal[i, j] += weight * (row_1[i] * row_1[j] + row_2[i] * row_2[j])
    _solve(normal, right)
    return right


@compile_loop
def _solve(normal: np.ndarray, right: np.ndarray) -> None:
    """In place, by Cholesky, of the lower half of a matrix without negative directions."""
    size, trace = len(normal), 0.0
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
        if state[match, _OFF] <= share**2:
            count += 1
    return count


@compile_loop
def _copy(source: np.ndarray, target: np.ndarray) -> None:
    for i in range(source.shape[0]):
        for j in range(source.shape[1]):
            target[i, j] = source[i, j]


@compile_loop
def _write_in_pixels(
    model: np.ndarray,
    mean_x: tuple[float, float],
    spread_x: float,
    mean_y: tuple[float, float],
    spread_y: float,
    transform: np.ndarray,
) -> None:
    """Writes the map of x to y as one of pixels, with 1 in the corner where that is possible."""
    for row in range(3):  # model · (pixels → x)
        left, right = model[row, 0] / spread_x, model[row, 1] / spread_x
        transform[row, 0], transform[row, 1] = left, right
        transform[row, 2] = model[row, 2] - left * mean_x[0] - right * mean_x[1]
    for column in range(3):  # (y → pixels) · that
        last = transform[2, column]
        transform[0, column] = spread_y * transform[0, column] + mean_y[0] * last
        transform[1, column] = spread_y * transform[1, column] + mean_y[1] * last
    corner = transform[2, 2]
    if abs(corner) > 1e-12:
        for row in range(3):
            for column in range(3):
                transform[row, column] /= corner
