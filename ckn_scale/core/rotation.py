"""The fixed rotation of vectors whose signs are kept, as `vector_codes.py` says."""

from __future__ import annotations

import numpy as np
import torch

from ckn_scale.core.sampling import hash_priorities

_SMALLEST_BLOCK = 256


class Rotation:
    """A fixed orthogonal map that is cheap: signs by hash, then Hadamard transforms.

    `dim` is padded with zeros to a power of two or, from 256 on, a multiple of 256; numbers that lie far
    apart share a transform, whose length is the largest power of two that divides the padded length.
    """

    def __init__(self, dim: int) -> None:
        if dim < 1:
            raise ValueError(f"dim must be ≥ 1, got {dim}")
        self.dim = dim
        power = max(8, 1 << (dim - 1).bit_length())
        self.padded_dim = power if dim <= _SMALLEST_BLOCK else -(-dim // _SMALLEST_BLOCK) * _SMALLEST_BLOCK
        length = self.padded_dim & -self.padded_dim
        half = 1 << (length.bit_length() // 2)
        self._left, self._right = _hadamard(half), _hadamard(length // half)
        self._shape = (half, length // half, self.padded_dim // length)
        odd = hash_priorities(0, np.arange(self.padded_dim)) % np.uint64(2)
        self._flips = torch.from_numpy(1 - 2 * odd.astype(np.float32))

    def apply(self, rows: np.ndarray) -> np.ndarray:
        """(N, dim) → (N, padded_dim) float32, row by row: a row depends on itself alone."""
        out = np.empty((len(rows), self.padded_dim), np.float32)
        padded = torch.zeros(self.padded_dim)
        for position, row in enumerate(np.asarray(rows, np.float32)):
            padded[: self.dim] = torch.from_numpy(row)
            out[position] = self._transform(padded * self._flips).numpy()
        return out

    def undo(self, rows: np.ndarray) -> np.ndarray:
        """(N, padded_dim) → (N, dim): the transforms are their own inverse."""
        out = np.empty((len(rows), self.dim), np.float32)
        for position, row in enumerate(np.asarray(rows, np.float32)):
            out[position] = (self._transform(torch.from_numpy(row)) * self._flips)[: self.dim].numpy()
        return out

    def _transform(self, row: torch.Tensor) -> torch.Tensor:
        mixed = torch.einsum("abc,ai,bj->ijc", row.view(self._shape), self._left, self._right)
        return mixed.reshape(self.padded_dim)


def _hadamard(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    unit: torch.Tensor = matrix / np.sqrt(size)
    return unit
