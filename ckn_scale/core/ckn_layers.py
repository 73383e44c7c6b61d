"""The layers of a CKN on tensors: sub-patches, unit norm, exponential, pooling.

The exponent W x/‖x‖ + b + power · log‖x‖ comes out of one matrix product: every sub-patch carries
two more entries, 1 and power · log‖x‖. What follows is one in-place exponential and the pooling.
Buffers are allocated once: a layer serves batches of one size, in one thread.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.ckn_inputs import InputSubpatches
from ckn_scale.core.ckn_model import CknLayer, pooling_matrix, window_weights
from ckn_scale.core.specs import CknSpec

NORM_FLOOR = 1e-5
_LOG_OF_ZERO = -1e4  # its exponential is exactly zero in every float type


class FirstLayer:
    """Layer one, on planes: maps are large and have few channels."""

    def __init__(self, spec: CknSpec, layer: CknLayer, patch_size_px: int, group: int, like: Tensor) -> None:
        self.inputs = InputSubpatches(spec, patch_size_px, group, like.device)
        self.side, self.power = self.inputs.side, spec.norm_power
        self.weights = stack_exponent_weights(layer, 0).to(like)
        window = window_weights(self.side, patch_size_px, spec.window_sigma)
        pooling = pooling_matrix(self.side, layer.spec.subsampling) * window
        self.pooling = torch.from_numpy(pooling).to(like)
        self.factor = None if layer.factor is None else torch.from_numpy(layer.factor).to(like)
        self.features = like.new_ones(group, self.weights.shape[1], self.side**2)
        self.responses = like.new_empty(group, len(self.weights), self.side**2)

    def __call__(self, patches: np.ndarray, apply_factor: bool = True) -> Tensor:
        """uint8 (group, S, S, 3) → (group, pooled side, pooled side, filters)."""
        subpatches = self.inputs(patches)
        norms = torch.linalg.vector_norm(subpatches, dim=1)
        torch.mul(subpatches, norms.clamp(min=NORM_FLOOR).reciprocal_()[:, None], out=self.features[:, :-2])
        self.features[:, -1] = log_power(norms, self.power)
        torch.matmul(self.weights, self.features, out=self.responses).exp_()
        return self._pool(self.responses, apply_factor)

    def _pool(self, responses: Tensor, apply_factor: bool) -> Tensor:
        batch, filters = responses.shape[:2]
        rows = self.pooling @ responses.view(batch * filters, self.side, self.side)
        pooled = (rows @ self.pooling.T).view(batch, filters, -1)
        if apply_factor and self.factor is not None:
            pooled = self.factor @ pooled
        side = len(self.pooling)
        return pooled.view(batch, filters, side, side).permute(0, 2, 3, 1).contiguous()


class DeepLayer:
    """A layer above the first, channel fastest: maps are small and have many channels."""

    def __init__(self, layer: CknLayer, channels: int, side: int, batch: int, like: Tensor) -> None:
        self.kernel, self.channels = layer.spec.patch_px, channels
        self.side = side - self.kernel + 1
        q = self.kernel**2 * channels
        width = -(-(q + 2) // 16) * 16  # rows begin on a cache line
        self.weights = stack_exponent_weights(layer, width - q - 2).to(like)
        self.pooling = torch.from_numpy(pooling_matrix(self.side, layer.spec.subsampling)).to(like)
        self.factor = None if layer.factor is None else torch.from_numpy(layer.factor).to(like)
        self.features = like.new_zeros(batch, self.side, self.side, width)
        self.features[..., q] = 1
        self.responses = like.new_empty(batch * self.side**2, layer.spec.num_filters)

    def __call__(self, maps: Tensor, apply_factor: bool = True) -> Tensor:
        """→ (B, pooled side, pooled side, filters)."""
        norms = measure_norms(maps, self.kernel)
        q = self.kernel**2 * self.channels
        scales = norms.clamp(min=NORM_FLOOR).reciprocal_()[..., None, None]
        unit = self.features[..., :q].unflatten(-1, (self.kernel, -1))
        torch.mul(unfold_maps(maps, self.kernel), scales, out=unit)
        self.features[..., q + 1] = log_power(norms, 1.0)
        torch.mm(self.features.flatten(0, 2), self.weights.T, out=self.responses).exp_()
        return self._pool(self.responses, len(maps), apply_factor)

    def _pool(self, responses: Tensor, batch: int, apply_factor: bool) -> Tensor:
        side, filters = len(self.pooling), responses.shape[1]
        rows = self.pooling @ responses.view(batch, self.side, self.side * filters)
        pooled = self.pooling @ rows.view(batch * side, self.side, filters)
        if apply_factor and self.factor is not None:
            pooled = pooled @ self.factor.T
        return pooled.view(batch, side, side, filters)


def unfold_maps(maps: Tensor, kernel: int) -> Tensor:
    """Sub-patches of contiguous maps (B, n, n, c) as a view (B, m, m, k, k · c)."""
    batch, side, _, channels = maps.shape
    image, row, column, _ = maps.stride()
    shape = (batch, side - kernel + 1, side - kernel + 1, kernel, kernel * channels)
    return maps.as_strided(shape, (image, row, column, row, 1))


def measure_norms(maps: Tensor, kernel: int) -> Tensor:
    """‖sub-patch‖ (B, m, m) of maps (B, n, n, c), from sums of squares: exactly zero where all is zero."""
    squares = torch.linalg.vector_norm(maps, dim=-1, dtype=torch.float32).square_()
    rows = squares.unfold(1, kernel, 1).sum(-1)
    return rows.unfold(2, kernel, 1).sum(-1).sqrt_()


def log_power(norms: Tensor, power: float) -> Tensor:
    return norms.log().mul_(power).clamp_(min=_LOG_OF_ZERO)


def stack_exponent_weights(layer: CknLayer, padding: int) -> Tensor:
    """(p, q + 2 + padding): filters, their bias, and 1 for the logarithm of the norm."""
    ones, zeros = np.ones_like(layer.bias), np.zeros((len(layer.bias), padding), np.float32)
    return torch.from_numpy(np.column_stack([layer.weights, layer.bias, ones, zeros]).astype(np.float32))
