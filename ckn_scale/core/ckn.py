"""Encode patches with a convolutional kernel network."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.ckn_layers import DeepLayer, FirstLayer
from ckn_scale.core.ckn_model import Ckn, CknLayer, input_positions, layer_sides
from ckn_scale.core.orientation_table import TabulatedOrientations

__all__ = ["Ckn", "CknEncoder", "CknLayer", "encode_patches", "pad_batches"]

# Sub-patches and responses of one group of patches (floats): near a core's cache, yet large enough
# that the cost of calling an operation does not show.
_GROUP_FLOATS = 3 << 20
_HALF_TYPES = (torch.float16, torch.bfloat16)


class CknEncoder:
    """A CKN ready to run: weights on their device, buffers for batches of one size."""

    def __init__(
        self, ckn: Ckn, *, batch_size: int, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be ≥ 1, got {batch_size}")
        _check_dtype(ckn, dtype)
        self.ckn, self.device = ckn, torch.device(device)
        self.group = batch_size if self.device.type != "cpu" else _choose_group(ckn, batch_size)
        self.batch_size = batch_size
        like = torch.empty(0, dtype=dtype, device=self.device)
        self._build_layers(like)
        self.out = like.new_empty(batch_size, ckn.dim)
        self._lock = threading.Lock()

    def _build_layers(self, like: Tensor) -> None:
        ckn = self.ckn
        sides = layer_sides(ckn.spec, ckn.patch_size_px)
        self.first = _build_first(ckn, self.group, like)
        self.deep = [
            DeepLayer(layer, below.spec.num_filters, side, like)
            for below, layer, (_, side) in zip(ckn.layers, ckn.layers[1:], sides, strict=False)
        ]

    def encode_group(self, patches: np.ndarray, *, last_factor: bool = True) -> Tensor:
        """`group` patches → maps (B, side, side, filters) of the last layer."""
        maps = self.first(patches, apply_factor=last_factor or bool(self.deep))
        for layer in self.deep:
            maps = layer(maps, apply_factor=last_factor or layer is not self.deep[-1])
        return maps

    def encode_batch(self, patches: np.ndarray, *, last_factor: bool = True) -> Tensor:
        """`batch_size` patches → (batch_size, dim), to the power the spec asks for."""
        with torch.inference_mode(), self._lock, _exact_convolutions(self.device):
            for start in range(0, self.batch_size, self.group):
                rows = slice(start, start + self.group)
                self.out[rows] = self.encode_group(patches[rows], last_factor=last_factor).flatten(1)
            return raise_to_power(self.out, self.ckn.spec.descriptor_power)


def encode_patches(
    ckn: Ckn,
    patches: np.ndarray,
    *,
    batch_size: int = 64,
    device: str = "cpu",
    dtype: str | torch.dtype = torch.float32,
) -> np.ndarray:
    """Descriptors (N, dim) float32 of uint8 patches (N, S, S, 3), before any projection.

    Batches have one shape, the last one padded, so that a row depends on its patch alone.
    """
    check_patches(patches, ckn)
    encoder = CknEncoder(ckn, batch_size=batch_size, device=device, dtype=parse_dtype(dtype))
    out = np.empty((len(patches), ckn.dim), np.float32)
    for start, batch in pad_batches(patches, encoder.batch_size):
        rows = out[start : start + encoder.batch_size]
        rows[:] = encoder.encode_batch(batch)[: len(rows)].float().cpu().numpy()
    return out


def pad_batches(rows: np.ndarray, batch_size: int) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, batch) of exactly `batch_size` rows; the last one is filled with zeros."""
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        if len(batch) < batch_size:
            padding = np.zeros((batch_size - len(batch), *rows.shape[1:]), rows.dtype)
            batch = np.concatenate([batch, padding])
        yield start, batch


def raise_to_power(values: Tensor, power: float) -> Tensor:
    """sign(x) |x|^power, as a new tensor."""
    return values.clone() if power == 1 else torch.copysign(values.abs().pow_(power), values)


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """`float32`, `float16` or `bfloat16`, by name or as torch's own."""
    allowed = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if dtype not in allowed and dtype not in allowed.values():
        raise ValueError(f"dtype must be one of {', '.join(allowed)}, got {dtype}")
    return allowed[dtype] if isinstance(dtype, str) else dtype


def check_patches(patches: np.ndarray, ckn: Ckn) -> None:
    side, channel = ckn.patch_size_px, ckn.spec.channel
    shapes = [(side, side, 3), (side, side)] if channel == "grad" else [(side, side, 3)]
    if patches.dtype != np.uint8 or patches.shape[1:] not in shapes:
        expected = " or ".join(str(("N", *shape)) for shape in shapes)
        raise ValueError(f"{channel} takes uint8 patches {expected}, got {patches.dtype} {patches.shape}")


def _exact_convolutions(device: torch.device) -> AbstractContextManager[None]:
    """On a GPU, float32 means float32 (not TF32), and the same algorithm every time."""
    if device.type != "cuda":
        return nullcontext()
    return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)


def _build_first(ckn: Ckn, group: int, like: Tensor) -> FirstLayer | TabulatedOrientations:
    spec, layer = ckn.spec, ckn.layers[0]
    if spec.channel == "grad" and spec.input_blur_px == 0 and like.device.type == "cpu":
        return TabulatedOrientations(spec, layer, ckn.patch_size_px, group)
    return FirstLayer(spec, layer, ckn.patch_size_px, group, like)


def _check_dtype(ckn: Ckn, dtype: torch.dtype) -> None:
    """A narrow kernel multiplies the rounding of a half-precision product by 1/α²."""
    narrowest = min(layer.alpha for layer in ckn.layers)
    if dtype in _HALF_TYPES and narrowest < 0.2:
        raise ValueError(f"α = {narrowest:.3g} is too small for {dtype}: use float32 for {ckn.spec.channel}")


def _choose_group(ckn: Ckn, batch_size: int) -> int:
    """Patches that go through the layers together: a divisor of the batch that fits the cache."""
    sides = [before for before, _ in layer_sides(ckn.spec, ckn.patch_size_px)]
    sides[0] = len(input_positions(ckn.spec, ckn.patch_size_px))
    widths = [layer.weights.shape[1] + len(layer.weights) for layer in ckn.layers]
    largest = max(side**2 * width for side, width in zip(sides, widths, strict=True))
    limit = max(1, _GROUP_FLOATS // largest)
    return max(divisor for divisor in range(1, limit + 1) if batch_size % divisor == 0)
