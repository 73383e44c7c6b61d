"""From extrema on the grid to points between its pixels, without those that lie on edges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckn_scale.core.scale_space import (
    FIRST_SIGMA_PX,
    LEVEL_SIGMAS_PX,
    NUM_LEVELS,
    SCALES_PER_OCTAVE,
    Extrema,
    ScaleSpace,
)

MAX_EDGE_RATIO = 10.0  # of the two curvatures of the response surface
MAX_EDGE_SCORE = (MAX_EDGE_RATIO + 1) ** 2 / MAX_EDGE_RATIO
MAX_OFFSET = 1.5  # a quadratic whose peak is farther away does not describe this extremum
SPARE_FACTOR, SPARE = 1.25, 64  # so many more extrema are refined than asked for, as some are dropped


@dataclass(frozen=True)
class Points:
    """N refined points in pixels of the image, strongest first; `octaves` is where they were found."""

    octaves: np.ndarray
    x_px: np.ndarray
    y_px: np.ndarray
    sigma_px: np.ndarray
    responses: np.ndarray

    def __len__(self) -> int:
        return len(self.x_px)

    def select(self, chosen: np.ndarray | slice) -> Points:
        return Points(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


def choose_points(space: ScaleSpace, count: int, scale_weight: float) -> Points:
    """The `count` best refined points by strength · scale^`scale_weight`; that product is their response."""
    extrema = space.extrema
    sigma_px = LEVEL_SIGMAS_PX[extrema.levels] * np.exp2(extrema.octaves)
    ranks = extrema.strengths * sigma_px.astype(np.float32) ** scale_weight
    spare = largest(ranks, int(SPARE_FACTOR * count) + SPARE)
    points = refine_extrema(space, extrema.select(spare))
    responses = points.responses * points.sigma_px**scale_weight
    best = largest(responses, count)
    return Points(points.octaves, points.x_px, points.y_px, points.sigma_px, responses).select(best)


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest values, largest first, ties by index."""
    chosen = np.arange(len(values))
    if 0 < count < len(values):
        # Only the value at the cut is taken from `partition`: the order of its ties is not defined.
        chosen = np.flatnonzero(values >= np.partition(values, -count)[-count])
    return chosen[np.argsort(-values[chosen], kind="stable")][:count]


def refine_extrema(space: ScaleSpace, extrema: Extrema) -> Points:
    """One Newton step on a quadratic through the nearest 19 values; edges and runaways are dropped."""
    values = _gather_neighbours(space, extrema)
    gradient, hessian = fit_quadratic(values)
    offset = solve_symmetric(hessian, -gradient)
    keep = is_blob(hessian) & (np.abs(offset) < MAX_OFFSET).all(axis=0)
    offset = np.clip(offset, -1.0, 1.0)
    strength = values[1, 1, 1] + 0.5 * (gradient * offset).sum(axis=0)
    step_px = np.exp2(extrema.octaves).astype(np.float32)
    sigma_px = FIRST_SIGMA_PX * np.exp2((extrema.levels + offset[2]) / SCALES_PER_OCTAVE) * step_px
    x_px, y_px = (extrema.columns + offset[0]) * step_px, (extrema.rows + offset[1]) * step_px
    columns = (x_px, y_px, sigma_px, strength)
    return Points(extrema.octaves, *(c.astype(np.float32) for c in columns)).select(keep)


def fit_quadratic(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradient (3, N) and Hessian (3, 3, N) in (x, y, level) of values (3, 3, 3, N) at [level, y, x]."""
    v = {(x, y, z): values[z + 1, y + 1, x + 1] for z in (-1, 0, 1) for y in (-1, 0, 1) for x in (-1, 0, 1)}
    axes = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    gradient = np.empty((3, values.shape[-1]), values.dtype)
    hessian = np.empty((3, *gradient.shape), values.dtype)
    for i, (x, y, z) in enumerate(axes):
        ahead, behind = v[x, y, z], v[-x, -y, -z]
        gradient[i] = 0.5 * (ahead - behind)
        hessian[i, i] = ahead + behind - 2 * v[0, 0, 0]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        (ax, ay, az), (bx, by, bz) = axes[i], axes[j]
        same = v[ax + bx, ay + by, az + bz] + v[-ax - bx, -ay - by, -az - bz]
        opposite = v[ax - bx, ay - by, az - bz] + v[bx - ax, by - ay, bz - az]
        hessian[i, j] = hessian[j, i] = 0.25 * (same - opposite)
    return gradient, hessian


def solve_symmetric(matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
    """x (3, N) of matrix (3, 3, N) · x = right (3, N) by the adjugate; huge where the matrix is singular."""
    (a, b, c), (_, d, e), (_, _, f) = matrix
    p, q, r, s, t, u = (
        d * f - e * e,
        c * e - b * f,
        b * e - c * d,
        a * f - c * c,
        b * c - a * e,
        a * d - b * b,
    )
    determinant = a * p + b * q + c * r
    determinant = np.where(np.abs(determinant) < 1e-30, 1e-30, determinant)
    x, y, z = right
    return np.stack([p * x + q * y + r * z, q * x + s * y + t * z, r * x + t * y + u * z]) / determinant


def is_blob(hessian: np.ndarray) -> np.ndarray:
    """(N,) bool: the two curvatures in the image plane have the same sign and similar size."""
    trace = hessian[0, 0] + hessian[1, 1]
    determinant = hessian[0, 0] * hessian[1, 1] - hessian[0, 1] ** 2
    return (determinant > 0) & (trace * trace < MAX_EDGE_SCORE * determinant)


def _gather_neighbours(space: ScaleSpace, extrema: Extrema) -> np.ndarray:
    """(3, 3, 3, N) float64 strengths around each extremum."""
    octave = extrema.octaves
    height, width = space.layout.heights[octave], space.layout.widths[octave]
    centre = (extrema.levels * height + extrema.rows) * width + extrema.columns
    centre += NUM_LEVELS * space.layout.starts[octave]
    step = np.arange(-1, 2)[:, None]
    level, row, column = (
        (step * height * width)[:, None, None],
        (step * width)[None, :, None],
        step[None, None],
    )
    return space.strengths.take(centre + level + row + column).astype(np.float64)
