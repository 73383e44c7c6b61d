"""PCA of descriptors with no, half or full whitening: L2, centre, project, divide, L2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.specs import ProjectionSpec

# Directions below this share of the largest singular value are rounding (of float32 products), not data.
_RANK_TOLERANCE = 1e-3
_BLOCK_ROWS = 16
_EXACT_SIZE = 3000  # a larger matrix, of which a third or less is wanted, is decomposed iteratively
_POWERS = 8


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
        block = torch.zeros(_BLOCK_ROWS, self.input_dim)
        for start in range(0, len(rows), _BLOCK_ROWS):
            part = rows[start : start + _BLOCK_ROWS]
            block[: len(part)] = torch.from_numpy(np.ascontiguousarray(part, np.float32))
            out[start : start + len(part)] = project_rows(block, matrix, offset)[: len(part)].numpy()
        return out

    def to_arrays(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        return {"matrix": self.matrix, "offset": self.offset}, {"dim": self.dim, "input_dim": self.input_dim}

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
    rows = torch.from_numpy(np.array(descriptors, np.float32))  # a copy, the only large one
    norms = torch.linalg.vector_norm(rows, dim=1)
    if not norms.all():
        rows, norms = rows[norms > 0], norms[norms > 0]
    rows /= norms[:, None]
    if len(rows) < 2:
        raise ValueError(f"a projection needs at least two rows that are not zero, got {len(rows)}")
    mean = torch.from_numpy(rows.numpy().mean(axis=0, dtype=np.float64))
    rows -= mean.float()
    fit = _fit_by_moments if rows.shape[1] <= len(rows) else _fit_by_gram
    directions, singular = fit(rows, spec.dim)
    matrix = directions * (singular[:, None] / singular[0]) ** -spec.whitening
    return Projection(matrix.float().numpy(), (matrix @ mean).float().numpy())


def _fit_by_moments(rows: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(d, D) orthonormal directions and their singular values, float64, largest first."""
    singular, vectors = _decompose(rows.T @ rows, dim)
    return _fix_signs(vectors.T), singular


def _fit_by_gram(rows: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    singular, vectors = _decompose(rows @ rows.T, dim)
    directions = (rows.T @ (vectors / singular).float()).double().T
    return _fix_signs(directions / torch.linalg.vector_norm(directions, dim=1, keepdim=True)), singular


def _decompose(matrix: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The largest roots of eigenvalues (d,) and their eigenvectors (n, d), float64, within the rank."""
    few = len(matrix) > _EXACT_SIZE and len(matrix) > 3 * dim
    values, vectors = _iterate_subspace(matrix, dim) if few else torch.linalg.eigh(matrix.double())
    singular = values.clamp(min=0).sqrt().flip(0)
    rank = int((singular > _RANK_TOLERANCE * singular[0]).sum())
    if rank == 0:
        raise ValueError("all rows are equal: there is no direction to project on")
    count = min(dim, rank)
    return singular[:count], vectors.flip(1)[:, :count]


def _iterate_subspace(matrix: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The largest eigenpairs by powers of the matrix on a block of vectors: products instead of eigh.

    A quarter more vectors than asked for, so that those at the end are settled too.
    """
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(len(matrix), dim + dim // 4 + 16, generator=generator)
    for _ in range(_POWERS):
        block = torch.linalg.qr(matrix @ block)[0]
    values, rotation = torch.linalg.eigh((block.T @ (matrix @ block)).double())
    return values, block.double() @ rotation


def _fix_signs(directions: Tensor) -> Tensor:
    """The largest entry of each direction is positive: an eigenvector's sign is otherwise arbitrary."""
    largest = directions.abs().argmax(dim=1, keepdim=True)
    return directions * directions.gather(1, largest).sign()
