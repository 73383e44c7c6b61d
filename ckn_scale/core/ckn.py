"""A CKN at work: uint8 patches in, descriptors out.

Layers take sub-patches at unit norm through an exponential and pool the responses. Exponentials are to
base 2, which is faster; the factor log₂e is in the weights. Maps are (B, side, side, filters). Buffers are
allocated once: a layer serves groups of one size, in one thread."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.ckn_inputs import InputSubpatches, convert_to_luma, shrink_patches
from ckn_scale.core.ckn_model import (
    Ckn,
    CknLayer,
    PoolingTaps,
    input_positions,
    input_side,
    input_window,
    layer_sides,
    make_pooling_taps,
)
from ckn_scale.core.specs import CknSpec

NORM_FLOOR = 1e-5
_ROUNDING = 1e-6  # of pixels in 0 … 1: the blur of a constant patch is not quite constant
_LOG_OF_ZERO = -1e4  # two to this power is exactly zero in every float type
# Sub-patches and responses of one group of patches (floats): near a core's cache, yet large enough
# that the cost of calling an operation does not show.
_GROUP_FLOATS = 3 << 20
_MAX_GROUP = 64  # larger ones are no faster, and the last one of an image is padded
_HALF_TYPES = (torch.float16, torch.bfloat16)


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
        rows[:] = encoder.encode_batch(batch, count=len(rows))[: len(rows)].float().cpu().numpy()
    return out


def pad_batches(rows: np.ndarray, batch_size: int) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, batch) of exactly `batch_size` rows; the last one is filled with zeros."""
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        if len(batch) < batch_size:
            padding = np.zeros((batch_size - len(batch), *rows.shape[1:]), rows.dtype)
            batch = np.concatenate([batch, padding])
        yield start, batch


def check_patches(patches: np.ndarray, ckn: Ckn) -> None:
    """ValueError unless patches are uint8 (N, S, S, 3), or for grad (N, S, S), of the size of the CKN."""
    side, channel = ckn.patch_size_px, ckn.spec.channel
    shapes = [(side, side, 3), (side, side)] if channel == "grad" else [(side, side, 3)]
    if patches.dtype != np.uint8 or patches.shape[1:] not in shapes:
        expected = " or ".join(str(("N", *shape)) for shape in shapes)
        raise ValueError(f"{channel} takes uint8 patches {expected}, got {patches.dtype} {patches.shape}")


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """`float32`, `float16` or `bfloat16`, by name or as torch's own."""
    allowed = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if dtype not in allowed and dtype not in allowed.values():
        raise ValueError(f"dtype must be one of {', '.join(allowed)}, got {dtype}")
    return allowed[dtype] if isinstance(dtype, str) else dtype


class CknEncoder:
    """A CKN ready to run: weights on their device, buffers for batches of one size."""

    def __init__(
        self, ckn: Ckn, *, batch_size: int, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be ≥ 1, got {batch_size}")
        narrowest = min(layer.alpha for layer in ckn.layers)
        if dtype in _HALF_TYPES and narrowest < 0.2:
            # A narrow kernel multiplies the rounding of a half-precision product by 1/α².
            raise ValueError(
                f"α = {narrowest:.3g} is too small for {dtype}: use float32 for {ckn.spec.channel}"
            )
        self.ckn, self.device = ckn, torch.device(device)
        self.group = batch_size if self.device.type != "cpu" else _choose_group(ckn, batch_size)
        self.batch_size = batch_size
        like = torch.empty(0, dtype=dtype, device=self.device)
        spec, size_px = ckn.spec, ckn.patch_size_px
        self.first: FirstLayer | TabulatedOrientations
        if spec.channel == "grad" and spec.input_blur_px == 0 and self.device.type == "cpu":
            self.first = TabulatedOrientations(spec, ckn.layers[0], size_px, self.group)
        else:
            self.first = FirstLayer(spec, ckn.layers[0], size_px, self.group, like)
        self.deep = [
            DeepLayer(layer, below.spec.num_filters, side, like)
            for below, layer, (_, side) in zip(
                ckn.layers, ckn.layers[1:], layer_sides(spec, size_px), strict=False
            )
        ]
        self.out = like.new_zeros(batch_size, ckn.dim)
        self._lock = threading.Lock()

    def duplicate(self) -> CknEncoder:
        """One that shares the weights and has buffers of its own, for another thread."""
        twin = copy.copy(self)
        twin.first, twin.out, twin._lock = self.first.duplicate(), self.out.clone(), threading.Lock()
        return twin

    def encode_group(self, patches: np.ndarray, *, last_factor: bool = True) -> Tensor:
        """`group` patches → maps (B, side, side, filters) of the last layer."""
        maps = self.first(patches, apply_factor=last_factor or bool(self.deep))
        for layer in self.deep:
            maps = layer(maps, apply_factor=last_factor or layer is not self.deep[-1])
        return maps

    def encode_batch(
        self, patches: np.ndarray, *, last_factor: bool = True, count: int | None = None
    ) -> Tensor:
        """`batch_size` patches → (batch_size, dim), to the power the spec asks for.

        Only the first `count` rows mean anything: groups that are padding alone are left out.
        """
        used = self.batch_size if count is None else -(-count // self.group) * self.group
        with torch.inference_mode(), self._lock, _exact_convolutions(self.device):
            for start in range(0, used, self.group):
                rows = slice(start, start + self.group)
                self.out[rows] = self.encode_group(patches[rows], last_factor=last_factor).flatten(1)
            return raise_to_power(self.out[:used], self.ckn.spec.descriptor_power)


def _choose_group(ckn: Ckn, batch_size: int) -> int:
    """Patches that go through the layers together: a divisor of the batch that fits the cache."""
    sides = [before for before, _ in layer_sides(ckn.spec, ckn.patch_size_px)]
    sides[0] = len(input_positions(ckn.spec, ckn.patch_size_px))
    widths = [layer.weights.shape[1] + len(layer.weights) for layer in ckn.layers]
    largest = max(side**2 * width for side, width in zip(sides, widths, strict=True))
    limit = max(1, _GROUP_FLOATS // largest)
    return max(divisor for divisor in range(1, min(limit, _MAX_GROUP) + 1) if batch_size % divisor == 0)


def _exact_convolutions(device: torch.device) -> AbstractContextManager[None]:
    """On a GPU, float32 means float32 (not TF32), and the same algorithm every time."""
    if device.type != "cuda":
        return nullcontext()
    return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)


def raise_to_power(values: Tensor, power: float) -> Tensor:
    """sign(x) |x|^power, as a new tensor."""
    return values.clone() if power == 1 else torch.copysign(values.abs().pow_(power), values)


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
            layer_sides(spec, patch_size_px)[0][0], layer.spec.subsampling, spec.position_step
        )
        self.pooling = Pooling(taps, layer, like)
        self.log_window = log_window(spec, patch_size_px, self.inputs.padded).to(like.device)
        padded = self.inputs.padded
        self.features = like.new_ones(group, self.weights.shape[1], padded)
        self.responses = like.new_empty(group, self.inputs.count, len(self.weights))
        self.squares = self.features[:, :-2]  # written before the features themselves
        if like.dtype != torch.float32:
            self.squares = torch.empty_like(self.squares, dtype=torch.float32)

    def duplicate(self) -> FirstLayer:
        return copy.deepcopy(self)

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
        return self.pooling(self.responses.view(-1, self.side, self.side, len(self.weights)), apply_factor)


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
    sums: Tensor = rows.unfold(2, kernel, 1).sum(-1)
    return sums


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


_REACH = 510  # twice the gradient of 8-bit pixels is an integer in −510 … 510 (one-sided at the border)
_WIDTH = 2 * _REACH + 1


class TabulatedOrientations:
    """Does what FirstLayer does for `grad`, on a CPU, when patches are not blurred first."""

    def __init__(self, spec: CknSpec, layer: CknLayer, patch_size_px: int, group: int) -> None:
        self.step, self.shrink = spec.position_step, spec.shrink
        seen = input_side(spec, patch_size_px)
        self.table = tabulate_responses(layer, spec.norm_power)
        taps = make_pooling_taps(seen, layer.spec.subsampling, self.step)
        self.pooling = Pooling(taps, layer, torch.empty(0))
        window = input_window(spec, patch_size_px)
        self.window = None if window is None else torch.from_numpy(window)[:, :, None]
        side = len(input_positions(spec, patch_size_px))
        self.padded = np.empty((group, seen + 2, seen + 2), np.int16)
        self.differences = np.empty((2, group, side, side), np.int16)
        self.entries = np.empty((group, side, side), np.int64)
        self.maps = np.empty((group, side, side, layer.spec.num_filters), np.float32)

    def duplicate(self) -> TabulatedOrientations:
        return copy.deepcopy(self, {id(self.table): self.table})  # the table is large, and only read

    def __call__(self, patches: np.ndarray, apply_factor: bool = True) -> Tensor:
        """uint8 (group, S, S, 3) → pooled maps."""
        entries = self._find_entries(convert_to_luma(shrink_patches(patches, self.shrink)))
        np.take(self.table, entries, axis=0, out=self.maps, mode="clip")  # faster than "raise"
        maps = torch.from_numpy(self.maps)
        if self.window is not None:
            maps *= self.window
        return self.pooling(maps, apply_factor)

    def _find_entries(self, luma: np.ndarray) -> np.ndarray:
        """Rows of the table: twice the differences along x times the table's width, plus those along y."""
        padded, step = self.padded, self.step
        padded[:, 1:-1, 1:-1] = luma
        for line, neighbour, next_one in ((0, 1, 2), (-1, -2, -3)):  # extrapolated: one-sided differences
            padded[:, line] = 2 * padded[:, neighbour] - padded[:, next_one]
            padded[:, :, line] = 2 * padded[:, :, neighbour] - padded[:, :, next_one]
        along_x, along_y = self.differences
        np.subtract(padded[:, 1:-1:step, 2::step], padded[:, 1:-1:step, :-2:step], out=along_x)
        np.subtract(padded[:, 2::step, 1:-1:step], padded[:, :-2:step, 1:-1:step], out=along_y)
        np.multiply(along_x, _WIDTH, out=self.entries, dtype=np.int64)
        along_y += _REACH
        self.entries += along_y
        self.entries += _REACH * _WIDTH
        return self.entries


def tabulate_responses(layer: CknLayer, power: float) -> np.ndarray:
    """(1021², p) float32: row 1021 (510 x + 510) + 510 y + 510 holds the responses to the gradient (x, y)."""
    axis = np.arange(-_REACH, _REACH + 1, dtype=np.float32) / (2 * 255)
    table = np.empty((_WIDTH, _WIDTH, len(layer.bias)), np.float32)
    for row, x in enumerate(axis):
        norms = np.hypot(x, axis)
        unit = np.stack([np.full_like(axis, x), axis], 1) / np.where(norms > 0, norms, 1)[:, None]
        table[row] = (
            np.exp(unit @ layer.weights.T + layer.bias) * np.where(norms > 0, norms**power, 0)[:, None]
        )
    return table.reshape(_WIDTH**2, -1)
