"""Flattening: a few strong directions common to most images are shrunk, all others are kept.

y = c + D (f − 1) Dᵀ c at unit length, where c = x − mean and D holds the first m principal directions,
each shrunk to the size of the one after the last. What is common to many images says little about which
place they show. It is learned on images that are apart from each other (or weighted as if they were):
in a collection of few places the strong directions *are* the places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.pca import (
    compare_rows,
    find_principal,
    split_columns,
    weigh_by_similarity,
)

MAX_DIRECTIONS = 128
# How many images one direction takes. Photographs of other things carry no place of the collection; its
# own images do, whatever their weights, so few directions are learned from them.
BACKGROUND_IMAGES_PER_DIRECTION = 4
SAMPLE_IMAGES_PER_DIRECTION = 32
# Rows that share more than this of their squared length are one image many times.
MAX_COMMON = 0.5


@dataclass(frozen=True)
class Flattening:
    """`mean` (D,), orthonormal `directions` (m, D) and `factors` (m,) in 0…1, float32; m may be 0."""

    mean: np.ndarray
    directions: np.ndarray
    factors: np.ndarray

    @property
    def dim(self) -> int:
        return len(self.mean)

    @property
    def input_dim(self) -> int:
        return len(self.mean)

    def apply(self, rows: np.ndarray) -> np.ndarray:
        """(N, D) → (N, D) float32 with unit rows; the length of a row does not count, a zero row stays zero.

        Row by row: a row depends on itself alone, and a single query does not pay for a padded block
        (32,768 × 128: 1.4 ms; in blocks of 16 a query takes 9 ms, a row of many 0.6 ms).
        """
        if rows.ndim != 2 or rows.shape[1] != self.dim:
            raise ValueError(f"rows must be (N, {self.dim}), got {rows.shape}")
        mean, directions = torch.from_numpy(self.mean), torch.from_numpy(self.directions)
        shrink = torch.from_numpy(self.factors) - 1
        out = np.empty(rows.shape, np.float32)
        for position, row in enumerate(np.asarray(rows, np.float32)):
            whole = torch.from_numpy(row)[None]
            length = torch.linalg.vector_norm(whole)
            centred = whole - length * mean
            flat = torch.addmm(centred, (centred @ directions.T) * shrink, directions)
            out[position] = (torch.nn.functional.normalize(flat, eps=1e-20) * (length > 0)).numpy()
        return out

    def to_part(self) -> ModelPart:
        """Its arrays by name; the sizes as metadata."""
        arrays = {"mean": self.mean, "directions": self.directions, "factors": self.factors}
        return ModelPart(arrays, {"method": "flatten", "dim": self.dim, "num_directions": len(self.factors)})

    @classmethod
    def from_part(cls, part: ModelPart) -> Flattening:
        """What `to_part` gave; ValueError when the shapes are others than the metadata say."""
        arrays, metadata = part
        dim, count = int(metadata["dim"]), int(metadata["num_directions"])
        wanted = {"mean": (dim,), "directions": (count, dim), "factors": (count,)}
        found = {name: arrays[name].shape for name in wanted}
        if found != wanted:
            raise ValueError(f"a flattening needs arrays of shapes {wanted}, got {found}")
        return cls(*(np.ascontiguousarray(arrays[name], np.float32) for name in wanted))


def fit_flattening(
    vlads: np.ndarray | Sequence[np.ndarray], num_directions: int, weights: np.ndarray | None = None
) -> Flattening:
    """Learn from rows (N, D), or their blocks of columns; fewer directions where the rank is less."""
    columns = split_columns(vlads) if isinstance(vlads, np.ndarray) else vlads
    return _flatten(columns, *compare_rows(columns), num_directions, weights)


def learn_flattening(
    vlads: np.ndarray | Sequence[np.ndarray], *, background: bool, min_images: int
) -> Flattening:
    """Learn as much as the images support; nothing from fewer than `min_images`.

    `background`: other photographs than those that are indexed, all with the same weight. Otherwise the
    images are a sample of the collection itself, and similar ones weigh less (`weigh_by_similarity`).
    """
    columns = split_columns(vlads) if isinstance(vlads, np.ndarray) else vlads
    if len(columns[0]) < min_images:
        return keep_as_is(sum(block.shape[1] for block in columns))
    cosines, lengths = compare_rows(columns)
    weights = None if background else weigh_by_similarity(cosines)
    count = supported_directions(len(lengths), background=background)
    return _flatten(columns, cosines, lengths, count, weights)


def supported_directions(num_images: int, *, background: bool) -> int:
    """How many directions so many images can teach; fewer when they are a sample of the collection itself."""
    per_direction = BACKGROUND_IMAGES_PER_DIRECTION if background else SAMPLE_IMAGES_PER_DIRECTION
    return min(MAX_DIRECTIONS, num_images // per_direction)


def _flatten(
    columns: Sequence[np.ndarray],
    cosines: torch.Tensor,
    lengths: torch.Tensor,
    num_directions: int,
    weights: np.ndarray | None,
) -> Flattening:
    dim = sum(block.shape[1] for block in columns)
    if int((lengths > 0).sum()) < 2:
        return keep_as_is(dim)
    found = find_principal(columns, cosines, lengths, num_directions, weights)
    if found.mean @ found.mean > MAX_COMMON:
        return keep_as_is(dim)
    count = max(0, min(num_directions, len(found.singular) - 1))  # the one after the last must be known
    factors = found.singular[count : count + 1] / found.singular[:count]
    directions = np.ascontiguousarray(found.directions[:count])
    return Flattening(found.mean.astype(np.float32), directions, factors.astype(np.float32))


def keep_as_is(dim: int) -> Flattening:
    """What is applied when there is too little to learn from: nothing but unit length."""
    return Flattening(np.zeros(dim, np.float32), np.zeros((0, dim), np.float32), np.zeros(0, np.float32))
