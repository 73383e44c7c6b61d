"""What is kept of an image's vector: its encoding into bytes, and back.

An index compares exact queries with encoded images. `float16` keeps every number in 2 bytes; `signs`
keeps one bit a number, after a fixed rotation that spreads a vector evenly over its numbers, and two
floats that make the estimate of an inner product unbiased (RaBitQ): 4,104 bytes for 32,768 numbers.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import numpy as np

from ckn_scale.core.faiss_library import import_faiss

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
        from ckn_scale.core.rotation import Rotation  # torch: who has an index of another kind does without

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


def _check(rows: np.ndarray, width: int) -> np.ndarray:
    if rows.ndim != 2 or rows.shape[1] != width:
        raise ValueError(f"expected (N, {width}), got {rows.shape}")
    return rows
