"""From extrema on the grid to points between its pixels, without those that lie on edges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckn_scale.core.scale_space import FIRST_SIGMA_PX, SCALES_PER_OCTAVE, Extrema, ScaleSpace

MAX_EDGE_RATIO = 10.0  # of the curvatures of the response surface
MAX_EDGE_SCORE = (MAX_EDGE_RATIO + 1) ** 2 / MAX_EDGE_RATIO
MAX_OFFSET = 1.5


@dataclass(frozen=True)
class Points:
    """N refined points in pixels of the image; `octaves` is where they were found."""

    octaves: np.ndarray
    x_px: np.ndarray
    y_px: np.ndarray
    sigma_px: np.ndarray
    responses: np.ndarray

    def __len__(self) -> int:
        return len(self.x_px)

    def select(self, chosen: np.ndarray) -> Points:
        return Points(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

    def strongest(self, count: int) -> Points:
        return self.select(np.argsort(-self.responses, kind="stable")[:count])


def refine_extrema(space: ScaleSpace, extrema: Extrema) -> Points:
    """One Newton step on a quadratic through the 19 nearest values; edges and runaways are dropped."""
    values = _gather_neighbours(space, extrema)
    gradient, hessian = fit_quadratic(values)
    offset = solve_symmetric(hessian, -gradient)
    keep = is_blob(hessian) & (np.abs(offset).max(axis=0, initial=0) < MAX_OFFSET)
    offset = np.clip(offset, -1.0, 1.0)
    strength = values[1, 1, 1] + 0.5 * (gradient * offset).sum(axis=0)
    step_px = np.exp2(extrema.octaves)
    sigma = FIRST_SIGMA_PX * np.exp2((extrema.levels + offset[2]) / SCALES_PER_OCTAVE) * step_px
    x, y = (extrema.columns + offset[0]) * step_px, (extrema.rows + offset[1]) * step_px
    return Points(extrema.octaves, x, y, sigma, strength.astype(np.float32)).select(keep)


def fit_quadratic(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradient (3, N) in x, y, level and Hessian (3, 3, N) at the centre of (3, 3, 3, N) values [level, y, x]."""
    c = values[1, 1, 1]
    gradient = np.stack(
        [
            0.5 * (values[1, 1, 2] - values[1, 1, 0]),
            0.5 * (values[1, 2, 1] - values[1, 0, 1]),
            0.5 * (values[2, 1, 1] - values[0, 1, 1]),
        ]
    )
    hessian = np.empty((3, 3, values.shape[-1]), values.dtype)
    hessian[0, 0] = values[1, 1, 2] + values[1, 1, 0] - 2 * c
    hessian[1, 1] = values[1, 2, 1] + values[1, 0, 1] - 2 * c
    hessian[2, 2] = values[2, 1, 1] + values[0, 1, 1] - 2 * c
    hessian[0, 1] = hessian[1, 0] = 0.25 * (
        values[1, 2, 2] + values[1, 0, 0] - values[1, 2, 0] - values[1, 0, 2]
    )
    hessian[0, 2] = hessian[2, 0] = 0.25 * (
        values[2, 1, 2] + values[0, 1, 0] - values[2, 1, 0] - values[0, 1, 2]
    )
    hessian[1, 2] = hessian[2, 1] = 0.25 * (
        values[2, 2, 1] + values[0, 0, 1] - values[2, 0, 1] - values[0, 2, 1]
    )
    return gradient, hessian


def solve_symmetric(matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
    """x (3, N) of matrix (3, 3, N) x = right (3, N) by the adjugate; huge where the matrix is singular."""
    (a, b, c), (_, d, e), (_, _, f) = matrix
    adjugate = np.array(
        [
            [d * f - e * e, c * e - b * f, b * e - c * d],
            [c * e - b * f, a * f - c * c, b * c - a * e],
            [b * e - c * d, b * c - a * e, a * d - b * b],
        ]
    )
    determinant = a * adjugate[0, 0] + b * adjugate[0, 1] + c * adjugate[0, 2]
    determinant = np.where(np.abs(determinant) < 1e-30, 1e-30, determinant)
    return np.einsum("ijn,jn->in", adjugate, right) / determinant


def is_blob(hessian: np.ndarray) -> np.ndarray:
    """(N,) bool: both curvatures in the image plane have the same sign and similar size."""
    trace = hessian[0, 0] + hessian[1, 1]
    determinant = hessian[0, 0] * hessian[1, 1] - hessian[0, 1] ** 2
    return (determinant > 0) & (trace * trace < MAX_EDGE_SCORE * determinant)


def _gather_neighbours(space: ScaleSpace, extrema: Extrema) -> np.ndarray:
    """(3, 3, 3, N) float64 responses around each extremum, the sign turned so that it is a maximum."""
    values = np.empty((3, 3, 3, len(extrema)), np.float64)
    for octave, stack in enumerate(space.responses):
        chosen = np.flatnonzero(extrema.octaves == octave)
        _, height, width = stack.shape
        centre = (extrema.levels[chosen] * height + extrema.rows[chosen]) * width + extrema.columns[chosen]
        flat = stack.reshape(-1)
        for level in range(3):
            for row in range(3):
                shift = ((level - 1) * height + (row - 1)) * width
                for column in range(3):
                    values[level, row, column, chosen] = flat[centre + shift + column - 1]
    return values * np.where(values[1, 1, 1] < 0, -1.0, 1.0)
