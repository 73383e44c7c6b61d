"""A convolutional kernel network as data: its layers, the sizes of its maps, its arrays.

A layer maps a sub-patch P to ‖P‖^power · exp(W P/‖P‖ + b), then pools with a truncated Gaussian.
The fixed orientation layer of `grad` has the same form: P is the gradient, W the directions / α².
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.specs import CknSpec, LayerSpec

INPUT_CHANNELS = {"grad": 2, "white": 3, "raw": 3}


@dataclass(frozen=True)
class CknLayer:
    """Learned arrays of one layer, float32.

    `weights` (p, q) and `bias` (p,) are used on unit-norm sub-patches, channel fastest, so the scale
    1/α² is inside. `factor` (p, p) is Nyström's κ^(−1/2); it is linear, hence applied after pooling.
    """

    spec: LayerSpec
    alpha: float
    weights: np.ndarray
    bias: np.ndarray
    factor: np.ndarray | None = None


@dataclass(frozen=True)
class Ckn:
    """A network: its settings and, layer by layer, its arrays; while it is trained, the layers so far."""

    spec: CknSpec
    patch_size_px: int
    layers: tuple[CknLayer, ...]

    @property
    def dim(self) -> int:
        """Numbers of a descriptor before its projection."""
        side = layer_sides(self.spec, self.patch_size_px)[-1][1]
        return side * side * self.spec.layers[-1].num_filters

    def to_part(self) -> ModelPart:
        """Arrays `layer<i>.weights`, `.bias` and, if any, `.factor`; settings and alphas as metadata."""
        arrays: dict[str, np.ndarray] = {}
        for index, layer in enumerate(self.layers):
            arrays[f"layer{index}.weights"] = layer.weights
            arrays[f"layer{index}.bias"] = layer.bias
            if layer.factor is not None:
                arrays[f"layer{index}.factor"] = layer.factor
        alphas = [layer.alpha for layer in self.layers]
        metadata = {"spec": asdict(self.spec), "patch_size_px": self.patch_size_px, "alphas": alphas}
        return ModelPart(arrays, metadata)

    @classmethod
    def from_part(cls, part: ModelPart) -> Ckn:
        """What `to_part` gave; ValueError when arrays are missing or their shapes do not fit the settings."""
        arrays, metadata = part
        spec = ckn_spec_from_dict(metadata["spec"])
        alphas = metadata["alphas"]
        if len(alphas) != len(spec.layers):
            raise ValueError(f"a CKN of {len(spec.layers)} layers needs as many alphas, got {len(alphas)}")
        layers = []
        for index, (layer_spec, alpha) in enumerate(zip(spec.layers, alphas, strict=True)):
            missing = {f"layer{index}.weights", f"layer{index}.bias"} - set(arrays)
            if missing:
                raise ValueError(f"arrays of the CKN are missing: {', '.join(sorted(missing))}")
            weights, bias = arrays[f"layer{index}.weights"], arrays[f"layer{index}.bias"]
            factor = arrays.get(f"layer{index}.factor")
            shape = (layer_spec.num_filters, subpatch_dim(spec, index))
            if weights.shape != shape:
                raise ValueError(f"weights of layer {index} must be {shape}, got {weights.shape}")
            if bias.shape != shape[:1]:
                raise ValueError(f"bias of layer {index} must be {shape[:1]}, got {bias.shape}")
            if factor is not None and factor.shape != (shape[0], shape[0]):
                raise ValueError(f"factor of layer {index} must be square in {shape[0]}, got {factor.shape}")
            layers.append(CknLayer(layer_spec, float(alpha), weights, bias, factor))
        return cls(spec, int(metadata["patch_size_px"]), tuple(layers))


def ckn_spec_from_dict(settings: Mapping[str, Any]) -> CknSpec:
    """The spec whose `asdict` this is."""
    layers = tuple(LayerSpec(**layer) for layer in settings["layers"])
    return CknSpec(**{**settings, "layers": layers})


def truncate_spec(spec: CknSpec, num_layers: int) -> CknSpec:
    """The network up to a layer; the power of the descriptor belongs to the whole one only."""
    power = spec.descriptor_power if num_layers >= len(spec.layers) else 1.0
    return replace(spec, layers=spec.layers[:num_layers], descriptor_power=power)


def subpatch_dim(spec: CknSpec, index: int) -> int:
    """Numbers of one sub-patch as layer `index` sees it: pixels × channels."""
    channels = spec.layers[index - 1].num_filters if index else INPUT_CHANNELS[spec.channel]
    return spec.layers[index].patch_px ** 2 * channels


def pooled_side(side: int, subsampling: int) -> int:
    """Centres at o, o + s, … below `side`, with o = ⌈s/2⌉ − 1."""
    offset = math.ceil(subsampling / 2) - 1
    return max(0, math.ceil((side - offset) / subsampling))


def layer_sides(spec: CknSpec, patch_size_px: int) -> list[tuple[int, int]]:
    """For each layer the side of its map before and after pooling."""
    sides, side = [], input_side(spec, patch_size_px)
    for layer in spec.layers:
        before = side - layer.patch_px + 1
        side = pooled_side(before, layer.subsampling) if before > 0 else 0
        if side < 1:
            raise ValueError(f"patches of {patch_size_px} px leave nothing after {layer}")
        sides.append((before, side))
    return sides


def count_flops(spec: CknSpec, patch_size_px: int) -> int:
    """Multiplications and additions of one patch's matrix products: filters, inner factors, whitening.

    Pooling and exponentials are left out, and so is the orientation layer of `grad`, which is a table.
    """
    flops, last = 0, len(spec.layers) - 1
    for index, (layer, (side, pooled)) in enumerate(
        zip(spec.layers, layer_sides(spec, patch_size_px), strict=True)
    ):
        positions = side**2 if index else len(input_positions(spec, patch_size_px)) ** 2
        if index or spec.channel != "grad":
            flops += 2 * positions * subpatch_dim(spec, index) * layer.num_filters
            flops += 2 * pooled**2 * layer.num_filters**2 if index < last else 0
        if index == 0 and spec.channel == "white":
            flops += 4 * positions * subpatch_dim(spec, 0) ** 2  # covariance, and its application
    return flops


@dataclass(frozen=True)
class PoolingTaps:
    """Pooling along one axis as a strided correlation of a map that is padded with zeros on both sides."""

    weights: np.ndarray  # (taps,) float64
    stride: int
    padding: int
    count: int  # of outputs; more may come out at the end


def make_pooling_taps(side: int, subsampling: int, step: int = 1) -> PoolingTaps:
    """exp(−t²/s²) for |t| ≤ s, sum 1, about the centres o + i s; taps outside the map are dropped.

    When only every `step`-th of the `side` positions is there, each stands for `step` of them.
    """
    offset, count = math.ceil(subsampling / 2) - 1, pooled_side(side, subsampling)
    first, last = -((subsampling - offset) // step), (offset + subsampling) // step
    distances = step * np.arange(first, last + 1) - offset
    total = np.exp(-((np.arange(-subsampling, subsampling + 1) / subsampling) ** 2)).sum()
    weights = step * np.exp(-((distances / subsampling) ** 2)) / total
    stride = subsampling // step
    num_positions = -(-side // step)
    beyond = last + (count - 1) * stride - (num_positions - 1)  # taps of the last centre outside the map
    padding = max(-first, beyond)
    return PoolingTaps(np.concatenate([np.zeros(padding + first), weights]), stride, padding, count)


def input_side(spec: CknSpec, patch_size_px: int) -> int:
    """Pixels along one axis of the patch as layer one sees it."""
    return patch_size_px // spec.shrink


def input_positions(spec: CknSpec, patch_size_px: int) -> np.ndarray:
    """The positions along one axis where layer one is evaluated."""
    return np.arange(0, input_side(spec, patch_size_px) - spec.layers[0].patch_px + 1, spec.position_step)


def input_window(spec: CknSpec, patch_size_px: int) -> np.ndarray | None:
    """(positions, positions) float32: the Gaussian weight on the responses of layer one."""
    if spec.window_sigma is None:
        return None
    seen = input_side(spec, patch_size_px)
    side = seen - spec.layers[0].patch_px + 1
    weights = window_weights(side, seen, spec.window_sigma)[:: spec.position_step]
    return np.outer(weights, weights)


def window_weights(side: int, patch_size_px: int, window_sigma: float) -> np.ndarray:
    """(side,) float32 Gaussian about the centre, standard deviation `window_sigma` × the patch's side."""
    distances = np.arange(side) - (side - 1) / 2
    weights: np.ndarray = np.exp(-0.5 * (distances / (window_sigma * patch_size_px)) ** 2).astype(np.float32)
    return weights


def orientation_layer(spec: LayerSpec) -> CknLayer:
    """The first layer of `grad`: p₁ directions, α₁ = 2 sin(π/p₁), nothing to learn."""
    if spec.num_filters < 2:
        raise ValueError(f"num_filters of the orientation layer must be ≥ 2, got {spec.num_filters}")
    angles_rad = 2 * np.pi * np.arange(spec.num_filters) / spec.num_filters
    alpha = 2 * math.sin(math.pi / spec.num_filters)
    directions = np.stack([np.cos(angles_rad), np.sin(angles_rad)], 1) / alpha**2
    bias = np.full(spec.num_filters, -1 / alpha**2, np.float32)
    return CknLayer(spec, alpha, directions.astype(np.float32), bias)
