"""Networks of patches made of torch layers, with weights from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from ckn_scale.core.ckn import parse_dtype
from ckn_scale.core.ckn_inputs import blur_matrix, convert_to_luma
from ckn_scale.core.descriptors.network import PatchNetwork, make_network_part
from ckn_scale.core.model_parts import ModelPart

_GROUP = 16  # of rows that are projected together


@dataclass(frozen=True)
class Architecture:
    """What a network takes and gives, and its layers; their weights have the names of the published file."""

    name: str
    dim: int
    input_px: int
    grey: bool
    build: Callable[[], nn.Module]  # (B, C, input_px, input_px) → (B, dim) or maps of that many numbers
    source: str  # where its weights are to be had
    prepare: Callable[[Tensor], Tensor] = lambda pixels: pixels  # pixels in 0 … 1 → what goes in
    smoothing_px: float = 0.0
    published: str = ""  # how the sha256 or sha1 of the published file begins

    def layout(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of its weights."""
        with torch.device("meta"):
            return {name: tuple(one.shape) for name, one in self.build().state_dict().items()}

    def load(self, weights: Mapping[str, np.ndarray]) -> nn.Module:
        """Its layers with these weights; others in the mapping are left alone."""
        layers = self.build()
        layers.load_state_dict({name: torch.from_numpy(np.array(weights[name])) for name in self.layout()})
        return layers.eval().requires_grad_(False)


class ConvolutionalNetwork(PatchNetwork):
    """Smooths patches, brings them to the side that the network was learned for, and runs it."""

    def __init__(
        self,
        architecture: Architecture,
        weights: Mapping[str, np.ndarray],
        smoothing_px: float | None = None,
        batch_size: int = 64,
        device: str = "cpu",
        dtype: str | torch.dtype = torch.float32,
    ) -> None:
        self.architecture, self.batch_size = architecture, batch_size
        self.group = max(one for one in range(1, min(_GROUP, batch_size) + 1) if batch_size % one == 0)
        self.name, self.dim = architecture.name, architecture.dim
        self.like = torch.empty(0, dtype=parse_dtype(dtype), device=device)
        self.smoothing_px = architecture.smoothing_px if smoothing_px is None else smoothing_px
        self.weights = {name: weights[name] for name in architecture.layout()}
        self.layers = architecture.load(self.weights).to(self.like)

    def check(self, patches: np.ndarray) -> None:
        shapes = ((3,), ()) if self.architecture.grey else ((3,),)
        square = patches.ndim in (3, 4) and patches.shape[1] == patches.shape[2]
        if patches.dtype != np.uint8 or not square or patches.shape[3:] not in shapes:
            channels = "[, 3]" if self.architecture.grey else ", 3"
            raise ValueError(
                f"{self.name} takes uint8 patches (N, S, S{channels}), got {patches.dtype} {patches.shape}"
            )

    def encode_batch(self, patches: np.ndarray, count: int) -> Tensor:
        """On a CPU one by one: its convolutions round a patch differently by its place in a batch."""
        if self.like.device.type != "cpu":
            return self._encode(patches)
        rows = self.like.new_zeros(len(patches), self.dim)
        for one in range(count):
            rows[one] = self._encode(patches[one : one + 1])[0]
        return rows

    def _encode(self, patches: np.ndarray) -> Tensor:
        pixels = patches.reshape(len(patches), -1, *patches.shape[3:])
        blank = torch.from_numpy((pixels == pixels[:, :1]).reshape(len(patches), -1).all(axis=1))
        kind = self.architecture
        resampled = resample(patches, kind.input_px, self.smoothing_px, grey=kind.grey).to(self.like.device)
        rows: Tensor = self.layers(kind.prepare(resampled).to(self.like)).flatten(1)
        return rows.masked_fill(blank.to(rows.device)[:, None], 0)

    def to_part(self) -> ModelPart:
        return make_network_part(self.name, self.weights, self.smoothing_px)


def resample(patches: np.ndarray, side: int, smoothing_px: float = 0.0, *, grey: bool) -> Tensor:
    """uint8 (N, S, S[, 3]) → float32 (N, C, side, side) in 0 … 1."""
    planes = convert_to_luma(patches)[:, None] if grey else patches.transpose(0, 3, 1, 2)
    pixels = torch.from_numpy(np.array(planes, order="C")).float() / 255
    if side == pixels.shape[2] and smoothing_px == 0:
        return pixels
    matrix = resampling_matrix(pixels.shape[2], side, smoothing_px)
    return matrix @ pixels @ matrix.T


@lru_cache(maxsize=16)
def resampling_matrix(side: int, target: int, smoothing_px: float = 0.0) -> Tensor:
    """(target, side) float32: a blur, then linear interpolation; a smaller target averages what it covers."""
    scale = side / target
    centres = np.clip((np.arange(target) + 0.5) * scale - 0.5, 0, side - 1)
    apart = np.abs(centres[:, None] - np.arange(side)) / max(scale, 1.0)
    weights = np.maximum(0, 1 - apart)
    matrix = weights / weights.sum(axis=1, keepdims=True)
    if smoothing_px > 0:
        matrix = matrix @ blur_matrix(side, smoothing_px)
    return torch.from_numpy(matrix.astype(np.float32))
