"""PCA of descriptors with no, half or full whitening: L2, centre, project, divide, L2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.principal import (
    RANK_TOLERANCE,
    compare_rows,
    find_principal,
    fix_signs,
    largest_eigenpairs,
    split_columns,
)
from ckn_scale.core.specs import ProjectionSpec

BLOCK_ROWS = 16


@dataclass(frozen=True)
class Projection:
    """y = matrix · x − ‖x‖ · offset, then unit length: parallel to S^(−γ) Vᵀ (x/‖x‖ − mean).

    `matrix` (d, D) float32 and `offset` (d,) float32 = matrix · mean. A zero row stays zero.
    """

    matrix: np.ndarray
    offset: np.ndarray

    @property
    def dim(self) -> int:
        return len(self.matrix)

    @property
    def input_dim(self) -> int:
        return self.matrix.shape[1]

    def apply(self, rows: np.ndarray) -> np.ndarray:
        """(N, D) → (N, d) float32 with unit rows, in blocks of one shape: a row depends on itself alone."""
        if rows.ndim != 2 or rows.shape[1] != self.input_dim:
            raise ValueError(f"rows must be (N, {self.input_dim}), got {rows.shape}")
        matrix, offset = torch.from_numpy(self.matrix), torch.from_numpy(self.offset)
        out = np.empty((len(rows), self.dim), np.float32)
        block = torch.zeros(BLOCK_ROWS, self.input_dim)
        for start in range(0, len(rows), BLOCK_ROWS):
            part = rows[start : start + BLOCK_ROWS]
            block[: len(part)] = torch.from_numpy(np.ascontiguousarray(part, np.float32))
            out[start : start + len(part)] = project_rows(block, matrix, offset)[: len(part)].numpy()
        return out

    def to_arrays(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        facts = {"method": "pca", "dim": self.dim, "input_dim": self.input_dim}
        return {"matrix": self.matrix, "offset": self.offset}, facts

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> Projection:
        shape = (int(meta["dim"]), int(meta["input_dim"]))
        if arrays["matrix"].shape != shape or arrays["offset"].shape != shape[:1]:
            found = arrays["matrix"].shape, arrays["offset"].shape
            raise ValueError(f"a projection {shape} needs matrix and offset of that size, got {found}")
        return cls(arrays["matrix"], arrays["offset"])


def project_rows(rows: Tensor, matrix: Tensor, offset: Tensor, norms: Tensor | None = None) -> Tensor:
    """Unit rows (N, d) of (N, D); `norms` (N,) when the length of a row is known otherwise."""
    if norms is None:
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    projected = (rows @ matrix.T).float() - norms[:, None] * offset
    return torch.nn.functional.normalize(projected, eps=1e-20)


def fit_projection(descriptors: np.ndarray, spec: ProjectionSpec) -> Projection:
    """Learn a projection from rows (N, D); zero rows are left out.

    `dim` falls to the rank of the data. The smaller of the moment matrix (D, D) and the Gram matrix
    (N, N) is decomposed.
    """
    if descriptors.ndim != 2:
        raise ValueError(f"descriptors must be (N, D), got {descriptors.shape}")
    if descriptors.shape[1] <= len(descriptors):
        return _scale_directions(*_fit_by_moments(descriptors, spec.dim), spec.whitening)
    return fit_projection_of_columns(split_columns(descriptors), spec)


def fit_projection_of_columns(columns: Sequence[np.ndarray], spec: ProjectionSpec) -> Projection:
    """The same from blocks of columns (N, d) of few and very long rows, each block read twice."""
    found = find_principal(columns, *compare_rows(columns), spec.dim)
    if len(found.singular) == 0:
        raise ValueError("all rows are equal: there is no direction to project on")
    return _scale_directions(found.mean, found.directions, found.singular, spec.whitening)


def _scale_directions(
    mean: np.ndarray, directions: np.ndarray, singular: np.ndarray, whitening: float
) -> Projection:
    matrix = directions * (singular[: len(directions), None] / singular[0]) ** -whitening
    return Projection(matrix.astype(np.float32), (matrix @ mean).astype(np.float32))


def _fit_by_moments(descriptors: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean (D,), orthonormal directions (d, D) and their singular values, float64, largest first."""
    rows = torch.from_numpy(np.array(descriptors, np.float32))  # a copy, the only large one
    norms = torch.linalg.vector_norm(rows, dim=1)
    if not norms.all():
        rows, norms = rows[norms > 0], norms[norms > 0]
    if len(rows) < 2:
        raise ValueError(f"directions need at least two rows that are not zero, got {len(rows)}")
    rows /= norms[:, None]
    mean = rows.numpy().mean(axis=0, dtype=np.float64)
    rows -= torch.from_numpy(mean).float()
    values, vectors = largest_eigenpairs(rows.T @ rows, dim)
    singular = values.clamp(min=0).sqrt()
    count = int((singular > RANK_TOLERANCE * singular[0]).sum()) if singular[0] > 0 else 0
    if count == 0:
        raise ValueError("all rows are equal: there is no direction to project on")
    return mean, fix_signs(vectors.T)[:count].numpy(), singular[:count].numpy()
