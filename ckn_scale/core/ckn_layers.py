"""The layers of a CKN on tensors: sub-patches, unit norm, exponential, pooling.

The exponent W x/‖x‖ + b + power · log‖x‖ comes out of one matrix product: every sub-patch carries
two more entries, 1 and power · log‖x‖. What follows is one in-place exponential (base 2, which is
faster; the factor log₂e is in the weights) and the pooling. Maps are (B, side, side, filters).
Buffers are allocated once: a layer serves groups of one size, in one thread.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.ckn_inputs import InputSubpatches
from ckn_scale.core.ckn_model import CknLayer, first_pooling_matrix, pooling_matrix
from ckn_scale.core.specs import CknSpec

NORM_FLOOR = 1e-5
_ROUNDING = 1e-6  # of pixels in 0 … 1: the blur of a constant patch is not quite constant
_LOG_OF_ZERO = -1e4  # two to this power is exactly zero in every float type


class Pooling:
    """Separable pooling of maps (B, m, m, p), then the layer's factor, if any."""

    def __init__(self, matrix: np.ndarray, layer: CknLayer, group: int, like: Tensor) -> None:
        self.matrix = torch.from_numpy(matrix).to(like)
        self.factor = None if layer.factor is None else torch.from_numpy(layer.factor).to(like)
        side, wide = matrix.shape
        self.rows = like.new_empty(group, side, wide * layer.spec.num_filters)
        self.pooled = like.new_empty(group * side, side, layer.spec.num_filters)

    def __call__(self, maps: Tensor, apply_factor: bool) -> Tensor:
        group, wide, filters = len(maps), self.matrix.shape[1], maps.shape[-1]
        side = len(self.matrix)
        torch.bmm(self.matrix.expand(group, -1, -1), maps.reshape(group, wide, wide * filters), out=self.rows)
        columns = self.rows.view(group * side, wide, filters)
        torch.bmm(self.matrix.expand(group * side, -1, -1), columns, out=self.pooled)
        pooled = self.pooled
        if apply_factor and self.factor is not None:
            pooled = pooled @ self.factor.T
        return pooled.view(group, side, side, filters)


class FirstLayer:
    """Layer one: few channels, so sub-patches are kept as planes (B, q + 2, positions)."""

    def __init__(self, spec: CknSpec, layer: CknLayer, patch_size_px: int, group: int, like: Tensor) -> None:
        self.inputs = InputSubpatches(spec, patch_size_px, group, like.device)
        self.side, self.power = len(self.inputs.positions), spec.norm_power
        self.weights = stack_exponent_weights(layer, like)
        self.pooling = Pooling(first_pooling_matrix(spec, patch_size_px), layer, group, like)
        padded = self.inputs.subpatches.shape[2]
        self.features = like.new_ones(group, self.weights.shape[1], padded)
        self.responses = like.new_empty(group, padded, len(self.weights))
        self.squares = self.features[:, :-2]  # written before the features themselves
        if like.dtype != torch.float32:
            self.squares = torch.empty_like(self.squares, dtype=torch.float32)

    def __call__(self, patches: np.ndarray, apply_factor: bool = True) -> Tensor:
        """uint8 (group, S, S, 3) → pooled maps."""
        subpatches = self.inputs(patches)
        squared_norms = torch.mul(subpatches, subpatches, out=self.squares).sum(dim=1)
        scales = invert_norms(squared_norms)
        torch.mul(subpatches, scales[:, None], out=self.features[:, :-2])
        self.features[:, -1] = log_power(squared_norms, self.power)
        filters = self.weights.T.expand(len(subpatches), -1, -1)
        torch.bmm(self.features.mT, filters, out=self.responses).exp2_()
        maps = self.responses[:, : self.side**2].unflatten(1, (self.side, self.side))
        return self.pooling(maps, apply_factor)


class DeepLayer:
    """A layer above the first: many channels, sub-patches as rows (B · positions, q + 2)."""

    def __init__(self, layer: CknLayer, channels: int, side: int, group: int, like: Tensor) -> None:
        self.kernel, self.side = layer.spec.patch_px, side - layer.spec.patch_px + 1
        self.weights = stack_exponent_weights(layer, like)
        matrix = pooling_matrix(self.side, layer.spec.subsampling)
        self.pooling = Pooling(matrix, layer, group, like)
        self.features = like.new_ones(group, self.side, self.side, self.weights.shape[1])
        self.unit = self.features[..., :-2].unflatten(-1, (self.kernel, self.kernel * channels))
        self.responses = like.new_empty(group * self.side**2, len(self.weights))

    def __call__(self, maps: Tensor, apply_factor: bool = True) -> Tensor:
        """(group, n, n, c) contiguous → pooled maps."""
        squared_norms = sum_squares(maps, self.kernel)
        torch.mul(unfold_maps(maps, self.kernel), invert_norms(squared_norms)[..., None, None], out=self.unit)
        self.features[..., -1] = log_power(squared_norms, 1.0)
        torch.mm(self.features.flatten(0, 2), self.weights.T, out=self.responses).exp2_()
        return self.pooling(self.responses.view(len(maps), self.side, self.side, -1), apply_factor)


def unfold_maps(maps: Tensor, kernel: int) -> Tensor:
    """Sub-patches of contiguous maps (B, n, n, c) as a view (B, m, m, k, k · c)."""
    batch, side, _, channels = maps.shape
    image, row, column, _ = maps.stride()
    shape = (batch, side - kernel + 1, side - kernel + 1, kernel, kernel * channels)
    return maps.as_strided(shape, (image, row, column, row, 1))


def sum_squares(maps: Tensor, kernel: int) -> Tensor:
    """‖sub-patch‖² (B, m, m) of maps (B, n, n, c): sums, so exactly zero where all is zero."""
    squares = torch.linalg.vector_norm(maps, dim=-1, dtype=torch.float32).square_()
    rows = squares.unfold(1, kernel, 1).sum(-1)
    return rows.unfold(2, kernel, 1).sum(-1)


def invert_norms(squared_norms: Tensor) -> Tensor:
    return squared_norms.clamp(min=NORM_FLOOR**2).rsqrt_()


def log_power(squared_norms: Tensor, power: float) -> Tensor:
    """log₂ ‖x‖^power; what is not more than rounding counts as zero."""
    logs = squared_norms.log2().mul_(power / 2)
    return logs.masked_fill_(squared_norms < _ROUNDING**2, _LOG_OF_ZERO)


def stack_exponent_weights(layer: CknLayer, like: Tensor) -> Tensor:
    """(p, q + 2) for base 2: filters, their bias, and 1 for the logarithm of the norm."""
    scaled = np.column_stack([layer.weights, layer.bias]) * math.log2(math.e)
    stacked = np.column_stack([scaled, np.ones(len(scaled))])
    return torch.from_numpy(stacked.astype(np.float32)).to(like)
