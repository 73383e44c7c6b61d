"""What is kept of an image's vector: its encoding into bytes, and back.

An index compares exact queries with encoded images. `float16` keeps every number in 2 bytes; `signs`
keeps one bit a number, after a fixed rotation that spreads a vector evenly over its numbers, and two
floats that make the estimate of an inner product unbiased (RaBitQ): 4,104 bytes for 32,768 numbers.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from ckn_scale.core.numerics import import_faiss
from ckn_scale.core.sampling import hash_priorities

_SMALLEST_BLOCK = 256
# Two floats after the bits of a code: squared length, and what an estimate is multiplied with.
SIGN_FACTOR_BYTES = 8


class VectorCodec(Protocol):
    """Each row is encoded by itself: equal vectors have equal codes, whatever else is encoded with them."""

    name: str
    dim: int
    code_bytes: int

    def encode(self, rows: np.ndarray) -> np.ndarray:
        """(N, dim) float32 → (N, code_bytes) uint8."""

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """(N, code_bytes) uint8 → (N, dim) float32: what an index compares a query with."""


def make_codec(name: str, dim: int) -> VectorCodec:
    """The encoding by its name, float16 or signs; ValueError for another."""
    if name == "float16":
        return HalfCodec(dim)
    if name == "signs":
        return SignCodec(dim)
    raise ValueError(f"no encoding of vectors named {name!r}; there are float16 and signs")


class HalfCodec:
    """Every number in two bytes."""

    name = "float16"

    def __init__(self, dim: int) -> None:
        self.dim, self.code_bytes = dim, 2 * dim

    def encode(self, rows: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(_check(rows, self.dim), "<f2").view(np.uint8)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(_check(codes, self.code_bytes)).view("<f2").astype(np.float32)


class SignCodec:
    """The signs of the rotated vector, as `faiss.IndexRaBitQ` lays them out."""

    name = "signs"

    def __init__(self, dim: int) -> None:
        self.rotation = Rotation(dim)
        self.dim = dim
        self.code_bytes = self.rotation.padded_dim // 8 + SIGN_FACTOR_BYTES

    def encode(self, rows: np.ndarray) -> np.ndarray:
        codes: np.ndarray = self._faiss.sa_encode(self.rotation.apply(_check(rows, self.dim)))
        return codes

    def decode(self, codes: np.ndarray) -> np.ndarray:
        return self.rotation.undo(self._faiss.sa_decode(np.ascontiguousarray(_check(codes, self.code_bytes))))

    @cached_property
    def _faiss(self) -> Any:
        return empty_sign_index(self.rotation.padded_dim)


def empty_sign_index(dim: int) -> Any:
    """A `faiss.IndexRaBitQ` that subtracts nothing: the vectors are centred already."""
    faiss = import_faiss()
    index = faiss.IndexRaBitQ(dim, faiss.METRIC_INNER_PRODUCT)
    faiss.copy_array_to_vector(np.zeros(dim, np.float32), index.center)
    index.is_trained = True
    return index


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


def _check(rows: np.ndarray, width: int) -> np.ndarray:
    if rows.ndim != 2 or rows.shape[1] != width:
        raise ValueError(f"expected (N, {width}), got {rows.shape}")
    return rows
