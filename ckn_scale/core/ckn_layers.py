"""The layers of a CKN on tensors: sub-patches, unit norm, exponential, pooling.

Exponentials are to base 2, which is faster; the factor log₂e is in the weights. Maps are
(B, side, side, filters). Buffers are allocated once: a layer serves groups of one size, in one thread.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.ckn_inputs import InputSubpatches
from ckn_scale.core.ckn_model import CknLayer, PoolingTaps, input_window, make_pooling_taps
from ckn_scale.core.specs import CknSpec

NORM_FLOOR = 1e-5
_ROUNDING = 1e-6  # of pixels in 0 … 1: the blur of a constant patch is not quite constant
_LOG_OF_ZERO = -1e4  # two to this power is exactly zero in every float type


class Pooling:
    """Pooling of maps (B, m, m, p), each filter by itself, then the layer's factor, if any."""

    def __init__(self, taps: PoolingTaps, layer: CknLayer, like: Tensor) -> None:
        self.taps = taps
        kernel = torch.from_numpy(np.outer(taps.weights, taps.weights)).to(like)
        shape = (layer.spec.num_filters, 1, *kernel.shape)
        self.kernel = kernel.expand(shape).contiguous(memory_format=torch.channels_last)
        self.factor = None if layer.factor is None else torch.from_numpy(layer.factor).to(like)

    def __call__(self, maps: Tensor, apply_factor: bool) -> Tensor:
        """→ (B, pooled side, pooled side, p) contiguous."""
        taps, filters = self.taps, maps.shape[-1]
        planes = maps.permute(0, 3, 1, 2)
        pooled = torch.nn.functional.conv2d(
            planes, self.kernel, stride=taps.stride, padding=taps.padding, groups=filters
        )
        pooled = pooled[:, :, : taps.count, : taps.count].permute(0, 2, 3, 1).contiguous()
        return pooled @ self.factor.T if apply_factor and self.factor is not None else pooled


class FirstLayer:
    """Layer one: few channels, so sub-patches are kept as planes (B, q + 2, positions).

    Every sub-patch carries two more entries, 1 and power · log‖x‖, so that the whole exponent
    W x/‖x‖ + b + power · log‖x‖ comes out of one matrix product.
    """

    def __init__(self, spec: CknSpec, layer: CknLayer, patch_size_px: int, group: int, like: Tensor) -> None:
        self.inputs = InputSubpatches(spec, patch_size_px, group, like.device)
        self.side, self.power = len(self.inputs.positions), spec.norm_power
        self.weights = stack_exponent_weights(layer, like, self.inputs.basis)
        taps = make_pooling_taps(
            patch_size_px - layer.spec.patch_px + 1, layer.spec.subsampling, spec.position_step
        )
        self.pooling = Pooling(taps, layer, like)
        self.log_window = log_window(spec, patch_size_px, self.inputs.padded).to(like.device)
        padded = self.inputs.padded
        self.features = like.new_ones(group, self.weights.shape[1], padded)
        self.responses = like.new_empty(group, self.inputs.count, len(self.weights))
        self.squares = self.features[:, :-2]  # written before the features themselves
        if like.dtype != torch.float32:
            self.squares = torch.empty_like(self.squares, dtype=torch.float32)

    def __call__(self, patches: np.ndarray, apply_factor: bool = True) -> Tensor:
        """uint8 (group, S, S, 3) → pooled maps."""
        subpatches = self.inputs(patches)
        squared_norms = torch.mul(subpatches, subpatches, out=self.squares).sum(dim=1)
        scales = invert_norms(squared_norms)
        torch.mul(subpatches, scales[:, None], out=self.features[:, :-2])
        torch.add(log_power(squared_norms, self.power), self.log_window, out=self.features[:, -1])
        filters = self.weights.T.expand(len(subpatches), -1, -1)
        positions = self.features[:, :, : self.inputs.count].mT
        torch.bmm(positions, filters, out=self.responses).exp2_()
        return self.pooling(self.responses.unflatten(1, (self.side, self.side)), apply_factor)


class DeepLayer:
    """A layer above the first: many channels, so filters are a convolution and norms come after it."""

    def __init__(self, layer: CknLayer, channels: int, side: int, like: Tensor) -> None:
        self.kernel = layer.spec.patch_px
        shape = (len(layer.weights), self.kernel, self.kernel, channels)
        filters = torch.from_numpy(layer.weights * np.float32(math.log2(math.e))).reshape(shape)
        self.filters = filters.to(like).permute(0, 3, 1, 2)  # a view: channels stay fastest in memory
        self.bias = torch.from_numpy(layer.bias * np.float32(math.log2(math.e))).to(like)
        taps = make_pooling_taps(side - self.kernel + 1, layer.spec.subsampling)
        self.pooling = Pooling(taps, layer, like)

    def __call__(self, maps: Tensor, apply_factor: bool = True) -> Tensor:
        """(B, n, n, c) contiguous → pooled maps: ‖x‖ · 2^(W x/‖x‖ + b)."""
        maps = maps.to(self.filters.dtype)
        norms = sum_squares(maps, self.kernel).sqrt_()[..., None]
        scales = norms.clamp(min=NORM_FLOOR).reciprocal_().to(maps.dtype)
        products = torch.nn.functional.conv2d(maps.permute(0, 3, 1, 2), self.filters).permute(0, 2, 3, 1)
        responses = torch.addcmul(self.bias, products, scales, out=products).exp2_()
        return self.pooling(responses.mul_(norms.to(maps.dtype)), apply_factor)


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


def log_window(spec: CknSpec, patch_size_px: int, padded: int) -> Tensor:
    """(padded positions,) log₂ of the Gaussian weight of each position of layer one."""
    logs, window = torch.zeros(padded), input_window(spec, patch_size_px)
    if window is not None:
        logs[: window.size] = torch.from_numpy(np.log2(window)).flatten()
    return logs


def log_power(squared_norms: Tensor, power: float) -> Tensor:
    """log₂ ‖x‖^power; what is not more than rounding counts as zero."""
    logs = squared_norms.log2().mul_(power / 2)
    return logs.masked_fill_(squared_norms < _ROUNDING**2, _LOG_OF_ZERO)


def stack_exponent_weights(layer: CknLayer, like: Tensor, basis: Tensor | None = None) -> Tensor:
    """(p, q + 2) for base 2: filters (in the coordinates of `basis`), their bias, and 1 for the logarithm."""
    filters = layer.weights.astype(np.float64)
    if basis is not None:
        filters = filters @ basis.cpu().double().numpy().T
    scaled = np.column_stack([filters, layer.bias]) * math.log2(math.e)
    stacked = np.column_stack([scaled, np.ones(len(scaled))])
    return torch.from_numpy(stacked.astype(np.float32)).to(like)
