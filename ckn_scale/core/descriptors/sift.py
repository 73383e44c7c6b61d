"""SIFT and RootSIFT of whole patches: the baseline of every table, on the very same pixels."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.ckn_inputs import blur_matrix, convert_to_luma, differentiate
from ckn_scale.core.ckn_model import window_weights
from ckn_scale.core.descriptors.network import PatchNetwork, make_network_part
from ckn_scale.core.model_parts import ModelPart

_CELLS = 4
_ORIENTATIONS = 8
_CLIP = 0.2
_ROUNDING = 1e-3  # grey levels: the blur of a constant patch is not quite constant
_GROUP = 16  # patches that go through together: they fit the cache


class SiftNetwork(PatchNetwork):
    """4 × 4 cells over the whole patch, 8 orientations, both interpolated linearly: 128 numbers, unit length.

    `window_sigma` is the Gaussian weight's standard deviation as a share of the side, `smoothing_px`
    a blur of the patch before its gradients; both are worth points (core/PAPER.md), so a
    comparison should give SIFT its best.
    """

    def __init__(self, *, root: bool = False, window_sigma: float = 0.25, smoothing_px: float = 2.0) -> None:
        if window_sigma <= 0:
            raise ValueError(f"window_sigma must be > 0, got {window_sigma}")
        if smoothing_px < 0:
            raise ValueError(f"smoothing_px must be ≥ 0, got {smoothing_px}")
        self.root, self.window_sigma, self.smoothing_px = root, window_sigma, smoothing_px
        self.name, self.dim = "rootsift" if root else "sift", _CELLS**2 * _ORIENTATIONS
        self.batch_size = self.group = _GROUP
        self.like = torch.empty(0)

    def check(self, patches: np.ndarray) -> None:
        """Colour or grey, of any size."""
        if patches.dtype != np.uint8 or patches.ndim not in (3, 4) or patches.shape[1] != patches.shape[2]:
            raise ValueError(f"SIFT takes uint8 patches (N, S, S[, 3]), got {patches.dtype} {patches.shape}")

    def encode_batch(self, patches: np.ndarray, count: int) -> Tensor:
        luma = torch.from_numpy(convert_to_luma(patches)).float()
        pooling, blur = make_matrices(luma.shape[1], self.window_sigma, self.smoothing_px)
        return normalise_histograms(make_histograms(blur @ luma @ blur.T, pooling), root=self.root)

    def to_part(self) -> ModelPart:
        return make_network_part(self.name, {}, self.smoothing_px)


@lru_cache(maxsize=8)
def make_matrices(side: int, window_sigma: float, smoothing_px: float) -> tuple[Tensor, Tensor]:
    """(4, side) that pools into weighted cells, (side, side) that blurs."""
    pooling = cell_matrix(side) * window_weights(side, side, window_sigma)
    blur = blur_matrix(side, smoothing_px) if smoothing_px > 0 else np.eye(side, dtype=np.float32)
    return torch.from_numpy(pooling), torch.from_numpy(blur)


def cell_matrix(side: int) -> np.ndarray:
    """(4, side) float32: the share of each pixel that falls to each cell, linear between centres."""
    positions = (np.arange(side) + 0.5) * _CELLS / side - 0.5
    shares: np.ndarray = np.maximum(0, 1 - np.abs(positions - np.arange(_CELLS)[:, None])).astype(np.float32)
    return shares


def make_histograms(luma: Tensor, pooling: Tensor) -> Tensor:
    """(B, S, S) → (B, 128): cells row by row, orientations fastest."""
    gradients = luma.new_empty(len(luma), 2, *luma.shape[1:])
    differentiate(luma, gradients)
    magnitudes = gradients.square().sum(dim=1).sqrt_()
    magnitudes[magnitudes < _ROUNDING] = 0
    turns = torch.atan2(gradients[:, 1], gradients[:, 0]) * (_ORIENTATIONS / (2 * torch.pi))
    bins = torch.arange(_ORIENTATIONS).view(1, -1, 1, 1)
    apart = torch.remainder(turns[:, None] - bins, _ORIENTATIONS)  # 0 … 8, 8 being as near as 0
    shares = (1 - torch.minimum(apart, _ORIENTATIONS - apart)).clamp_(min=0)
    cells = pooling @ (shares * magnitudes[:, None]) @ pooling.T
    return cells.permute(0, 2, 3, 1).flatten(1)


def normalise_histograms(histograms: Tensor, *, root: bool) -> Tensor:
    """Unit length, entries clipped, unit length again; RootSIFT: square roots of the shares."""
    unit = torch.nn.functional.normalize(histograms, eps=1e-20)
    clipped = torch.nn.functional.normalize(unit.clamp(max=_CLIP), eps=1e-20)
    return torch.nn.functional.normalize(clipped, p=1, eps=1e-20).sqrt() if root else clipped
