"""Local half-whitening: the sub-patches of one patch, decorrelated by their own covariance.

Each sub-patch of colours loses its mean colour; then y = A^(−1/4) (x − mean), A being the covariance
of all sub-patches of the same patch. Dividing by the fourth root leaves the strong directions somewhat
stronger: half of a whitening (A^(−1/2) would be the whole).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Directions below this share of the largest variance are rounding, not texture.
_RELATIVE_FLOOR = 1e-5
# A patch whose largest variance is below this is constant: 8-bit rounding alone gives 1e-6.
_CONSTANT_VARIANCE = 1e-10


class Whitener:
    """Half-whitening of sub-patches (B, pixels · 3, positions) with buffers that are reused.

    Columns from `count` on are padding: they must be zero and mean nothing in the result.
    """

    def __init__(self, like: Tensor, count: int) -> None:
        self.count = count
        self.basis = torch.from_numpy(colour_free_basis(like.shape[1] // 3)).to(like.device)
        self.out = torch.empty_like(like)

    def __call__(self, subpatches: Tensor) -> Tensor:
        mean = subpatches.sum(dim=2, keepdim=True) / self.count
        moments = torch.bmm(subpatches, subpatches.mT) / self.count
        covariance = moments - mean * mean.mT
        inner = half_whitening(self.basis @ covariance @ self.basis.T)
        matrix = self.basis.T @ inner @ self.basis
        return torch.baddbmm(-matrix @ mean, matrix, subpatches, out=self.out)


def colour_free_basis(num_pixels: int) -> np.ndarray:
    """((pixels − 1) · 3, pixels · 3) float32: orthonormal, blind to the mean colour, channel fastest."""
    spread = np.eye(num_pixels)
    spread[:, 0] = 1
    directions = np.linalg.qr(spread)[0][:, 1:].T
    return np.kron(directions, np.eye(3)).astype(np.float32)


def half_whitening(covariance: Tensor) -> Tensor:
    """A^(−1/4) of symmetric (B, q, q), zero on directions without variance and for constant patches."""
    values, vectors = torch.linalg.eigh(covariance)
    largest = values[:, -1:]
    kept = (values > _RELATIVE_FLOOR * largest) & (largest > _CONSTANT_VARIANCE)
    scales = torch.where(kept, values.clamp(min=1e-30) ** -0.25, torch.zeros_like(values))
    return (vectors * scales[:, None, :]) @ vectors.mT
