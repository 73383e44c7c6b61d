"""PCA: projections, and the principal directions of many long rows in memory that does not grow with them.

The rows come as blocks of columns, each (N, d) in any float type and read once a pass: the first pass
sums the similarities of all pairs (N, N), the second turns their eigenvectors into directions. Nothing
of N × D is ever held in float32. Few dimensions of many rows go through their moments (D, D) instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.specs import ProjectionSpec

COLUMNS_PER_BLOCK = 4096
# Directions below this share of the largest singular value are rounding (of float32 products), not data.
RANK_TOLERANCE = 1e-3
# An eigenpair (λ, v) has converged when ‖Av − λv‖ ≤ this share of λ, or of the largest λ (float32).
_RESIDUAL, _RESIDUAL_OF_LARGEST = 1e-3, 1e-5
_EXACT_SIZE = 512  # a larger matrix, of which a quarter or less is wanted, is decomposed iteratively
_MAX_ROUNDS = 2000
_ROWS_PER_TILE = 1024
_DIRECTIONS_PER_TILE = 16
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
        return int(self.matrix.shape[1])

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

    def to_part(self) -> ModelPart:
        """Its arrays by name; the sizes as metadata."""
        metadata = {"method": "pca", "dim": self.dim, "input_dim": self.input_dim}
        return ModelPart({"matrix": self.matrix, "offset": self.offset}, metadata)

    @classmethod
    def from_part(cls, part: ModelPart) -> Projection:
        """What `to_part` gave; ValueError when the shapes are others than the metadata say."""
        arrays, metadata = part
        shape = (int(metadata["dim"]), int(metadata["input_dim"]))
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


def learn_projection(descriptors: np.ndarray, spec: ProjectionSpec | None) -> Projection:
    """What `spec` asks for from rows (N, D); without one they stay as they are, at unit length."""
    if spec is not None:
        return fit_projection(descriptors, spec)
    dim = descriptors.shape[1]
    return Projection(np.eye(dim, dtype=np.float32), np.zeros(dim, np.float32))


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


@dataclass(frozen=True)
class Principal:
    """The weighted mean of rows, and their directions from the strongest to the weakest."""

    mean: np.ndarray  # (D,) float64
    directions: np.ndarray  # (m, D) float32, orthonormal
    singular: np.ndarray  # (m,) or, with one value more than directions, (m + 1,) float64, descending


def find_principal(
    columns: Sequence[np.ndarray],
    cosines: Tensor,
    lengths: Tensor,
    num_directions: int,
    weights: np.ndarray | None = None,
) -> Principal:
    """Mean and strongest directions of the rows at unit length; `cosines` is overwritten.

    `singular` has one value more than there are directions, where the rows have such a direction. All
    rows that are not zero have equal weight unless `weights` (N,) says otherwise.
    """
    given = torch.ones(len(lengths), dtype=torch.float64) if weights is None else torch.from_numpy(weights)
    weight = torch.where(lengths > 0, given.double(), 0.0)
    if int((weight > 0).sum()) < 2:
        raise ValueError(
            f"directions need at least two rows that are not zero, got {int((weight > 0).sum())}"
        )
    weight /= weight.sum()
    values, vectors = largest_eigenpairs(_centre(cosines, weight.float()), num_directions + 1)
    singular = values.clamp(min=0).sqrt()
    rank = int((singular > RANK_TOLERANCE * singular[0]).sum()) if singular[0] > 0 else 0
    count = min(num_directions, rank)
    inverse = torch.where(lengths > 0, 1 / lengths, 0.0).double()
    mixing = weight.sqrt()[:, None] * vectors[:, :count] / singular[:count]
    mean, directions = _combine_rows(columns, weight, mixing, inverse)
    return Principal(mean, directions, singular[: min(count + 1, rank)].numpy())


def split_columns(rows: np.ndarray, width: int = COLUMNS_PER_BLOCK) -> list[np.ndarray]:
    """(N, D) as views of `width` columns each."""
    if rows.ndim != 2:
        raise ValueError(f"rows must be (N, D), got {rows.shape}")
    return [rows[:, start : start + width] for start in range(0, rows.shape[1], width)]


def compare_rows(columns: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Cosines of all pairs of rows (N, N) float32, and the rows' lengths (N,). A zero row is like nothing."""
    count = len(columns[0])
    matrix = torch.zeros(count, count)
    for block in columns:
        part = torch.from_numpy(np.ascontiguousarray(block, np.float32))
        for start in range(0, count, _ROWS_PER_TILE):
            stop = min(start + _ROWS_PER_TILE, count)
            matrix[start:stop, :stop].addmm_(part[start:stop], part[:stop].T)
    _mirror_lower(matrix)
    lengths = matrix.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(lengths > 0, 1 / lengths, 0.0)
    matrix.mul_(inverse[:, None]).mul_(inverse)
    return matrix, lengths


def _mirror_lower(matrix: Tensor) -> None:
    """Tiles on the diagonal are whole already; those below it are copied above it."""
    for start in range(0, len(matrix), _ROWS_PER_TILE):
        stop = min(start + _ROWS_PER_TILE, len(matrix))
        matrix[:start, start:stop] = matrix[start:stop, :start].T


def weigh_by_similarity(cosines: Tensor, deviations: float = 3.0) -> np.ndarray:
    """(N,) weights: 1 / √ of the number of rows similar to this one, itself included; 0 for a zero row.

    Similar means more than `deviations` robust deviations above the median of all pairs. So four hundred
    photographs of one place weigh as much as twenty of other places. (1 / the number gives all say to
    outliers, equal weights to the largest place: `benchmarks/reduction.py`.)
    """
    known = cosines.diagonal() > 0
    step = max(1, cosines.numel() // 2**22)  # the median of some millions of pairs is that of all
    pairs = cosines[::step].clone()
    pairs[torch.arange(len(pairs)), torch.arange(0, len(cosines), step)] = torch.nan
    pairs[:, ~known] = torch.nan
    pairs[~known[::step]] = torch.nan
    values = pairs[~pairs.isnan()].numpy()
    if len(values) == 0:
        return known.numpy().astype(np.float64)
    centre = np.median(values)
    level = float(centre + deviations * 1.4826 * np.median(np.abs(values - centre)))
    similar = torch.cat([(tile > level).sum(dim=1) for tile in torch.split(cosines, _ROWS_PER_TILE)])
    itself = (cosines.diagonal() <= level) & known
    return torch.where(known, (similar + itself).clamp(min=1).double().rsqrt(), 0.0).numpy()


def _centre(cosines: Tensor, weight: Tensor) -> Tensor:
    """√wᵢ √wⱼ ⟨xᵢ − mean, xⱼ − mean⟩ from ⟨xᵢ, xⱼ⟩, in place."""
    towards_mean = cosines @ weight
    cosines.sub_(towards_mean[:, None]).sub_(towards_mean).add_(weight @ towards_mean)
    root = weight.sqrt()
    return cosines.mul_(root[:, None]).mul_(root)


def _combine_rows(
    columns: Sequence[np.ndarray], weight: Tensor, mixing: Tensor, inverse: Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Σ wᵢ uᵢ (D,) and Σ mᵢ (uᵢ − mean) (k, D) at unit length, of rows u at unit length.

    k × D numbers are most of what a fit to many directions takes: they are held in float32 and once in
    float64, never more (`runs/estimate.py` counts on it).
    """
    both = (torch.cat([weight[:, None], mixing], dim=1) * inverse[:, None]).float()
    sums = [torch.from_numpy(np.ascontiguousarray(block, np.float32)).T @ both for block in columns]
    mean = torch.cat([part[:, 0] for part in sums]).double()
    by_number, shift = torch.empty(len(mean), mixing.shape[1], dtype=torch.float64), mixing.sum(dim=0)
    start = 0
    while sums:
        part = sums.pop(0).double()  # (d, 1 + k)
        by_number[start : start + len(part)] = part[:, 1:] - part[:, :1] * shift
        start += len(part)
    directions = by_number.T
    directions /= torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    return mean.numpy(), fix_signs(directions).float().numpy()


def largest_eigenpairs(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues of a symmetric matrix, descending, and their vectors (n, count), float64."""
    count = min(count, len(matrix))
    if len(matrix) <= _EXACT_SIZE or len(matrix) < 4 * count:
        values, vectors = torch.linalg.eigh(matrix.double())
    else:
        values, vectors = _iterate_subspace(matrix, count)
    return values.flip(0)[:count], vectors.flip(1)[:, :count]


def _iterate_subspace(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Powers of the matrix on a block of vectors until each wanted pair has converged by its residual.

    Half as many vectors again as asked for: what is wanted converges the sooner the further the last of
    the block is below it.
    """
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(len(matrix), count + count // 2 + 16, generator=generator)
    for _ in range(_MAX_ROUNDS):
        block = torch.linalg.qr(block)[0]
        product = matrix @ block
        values, rotation = torch.linalg.eigh((block.T @ product).double())
        vectors, product = block @ rotation.float(), product @ rotation.float()
        residuals = torch.linalg.vector_norm(product - vectors * values.float(), dim=0)[-count:]
        if bool((residuals <= _RESIDUAL * values[-count:] + _RESIDUAL_OF_LARGEST * values[-1]).all()):
            return values, vectors.double()
        block = product
    raise ValueError(
        f"the {count} largest directions of {len(matrix)} rows did not converge: NaN among them?"
    )


def fix_signs(directions: Tensor) -> Tensor:
    """Turned in place so that the largest entry of each is positive: a sign is otherwise arbitrary."""
    for tile in torch.split(directions, _DIRECTIONS_PER_TILE):
        largest = tile.abs().argmax(dim=1, keepdim=True)
        tile *= tile.gather(1, largest).sign()
    return directions
