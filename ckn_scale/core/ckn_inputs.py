"""What the first layer of a CKN sees: colours (raw), whitened colours (white) or gradients (grad)."""

from __future__ import annotations

import cv2
import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.ckn_model import INPUT_CHANNELS
from ckn_scale.core.specs import CknSpec

# Eigenvalues below this share of the largest are noise (three are zero by construction: mean colour).
_RELATIVE_FLOOR = 1e-5
# A patch whose largest variance is below this is constant: 8-bit rounding alone gives 1e-6.
_CONSTANT_VARIANCE = 1e-10


class InputSubpatches:
    """The sub-patches that layer one sees, for groups of `group` patches; buffers are reused."""

    def __init__(self, spec: CknSpec, patch_size_px: int, group: int, device: torch.device) -> None:
        self.spec, self.kernel, self.device = spec, spec.layers[0].patch_px, device
        self.side = patch_size_px - self.kernel + 1
        shape = (group, self.kernel**2, INPUT_CHANNELS[spec.channel], self.side, self.side)
        self.grid = torch.empty(shape, device=device)
        self.whitened = torch.empty_like(self.grid) if spec.channel == "white" else None
        self.blur: Tensor | None = None
        if spec.input_blur_px > 0:
            self.blur = torch.from_numpy(blur_matrix(patch_size_px, spec.input_blur_px)).to(device)

    def __call__(self, patches: np.ndarray) -> Tensor:
        """uint8 (group, S, S, 3) → (group, q, positions), channel fastest in q, not yet normalised."""
        planes = self.make_planes(patches)
        if self.spec.channel == "grad":
            differentiate(planes[:, 0], self.grid[:, 0])
            return self.grid.flatten(3).flatten(1, 2)
        for tap in range(self.kernel**2):
            dy, dx = divmod(tap, self.kernel)
            self.grid[:, tap] = planes[:, :, dy : dy + self.side, dx : dx + self.side]
        if self.whitened is not None:
            whiten_subpatches(self.grid.flatten(3), self.whitened.flatten(3))
            return self.whitened.flatten(3).flatten(1, 2)
        return self.grid.flatten(3).flatten(1, 2)

    def make_planes(self, patches: np.ndarray) -> Tensor:
        """→ float32 in 0…1, (B, 3, S, S), or luma (B, 1, S, S) for `grad`."""
        if self.spec.channel == "grad":
            pixels = torch.from_numpy(convert_to_luma(patches)).to(self.device)[:, None]
        else:
            pixels = torch.from_numpy(patches).to(self.device).permute(0, 3, 1, 2)
        planes = pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
        return planes if self.blur is None else self.blur @ planes @ self.blur.T


def convert_to_luma(patches: np.ndarray) -> np.ndarray:
    """(N, S, S, 3) RGB or (N, S, S) grey uint8 → (N, S, S) uint8 luma (Rec. 601)."""
    if patches.ndim == 3 or len(patches) == 0:
        return patches.reshape(patches.shape[:3])
    count, side = patches.shape[:2]
    rows = np.ascontiguousarray(patches).reshape(count * side, side, 3)
    return cv2.cvtColor(rows, cv2.COLOR_RGB2GRAY).reshape(count, side, side)


def blur_matrix(side: int, sigma_px: float) -> np.ndarray:
    """(side, side) float32: a Gaussian along one axis, border pixels repeated."""
    radius = max(1, round(4 * sigma_px))
    offsets = np.arange(-radius, radius + 1)
    taps = np.exp(-0.5 * (offsets / sigma_px) ** 2)
    matrix = np.zeros((side, side))
    for offset, weight in zip(offsets, taps / taps.sum(), strict=True):
        np.add.at(matrix, (np.arange(side), np.clip(np.arange(side) + offset, 0, side - 1)), weight)
    return matrix.astype(np.float32)


def differentiate(luma: Tensor, out: Tensor) -> None:
    """Central differences of (B, S, S) into `out` (B, 2, S, S), one-sided at the border: ∂x, then ∂y."""
    dx, dy = out[:, 0], out[:, 1]
    torch.sub(luma[:, :, 2:], luma[:, :, :-2], out=dx[:, :, 1:-1])
    torch.sub(luma[:, 2:], luma[:, :-2], out=dy[:, 1:-1])
    out *= 0.5
    torch.sub(luma[:, :, 1], luma[:, :, 0], out=dx[:, :, 0])
    torch.sub(luma[:, :, -1], luma[:, :, -2], out=dx[:, :, -1])
    torch.sub(luma[:, 1], luma[:, 0], out=dy[:, 0])
    torch.sub(luma[:, -1], luma[:, -2], out=dy[:, -1])


def half_whitening(covariance: Tensor) -> Tensor:
    """A^(−1/4) of symmetric (B, q, q), zero on directions without variance and for constant patches."""
    values, vectors = torch.linalg.eigh(covariance)
    largest = values[:, -1:]
    kept = (values > _RELATIVE_FLOOR * largest) & (largest > _CONSTANT_VARIANCE)
    scales = torch.where(kept, values.clamp(min=1e-30) ** -0.25, torch.zeros_like(values))
    return (vectors * scales[:, None, :]) @ vectors.mT


def whiten_subpatches(subpatches: Tensor, out: Tensor) -> None:
    """ZCA half-whitening of the L sub-patches (B, pixels, 3, L) of each patch by their own covariance.

    Each loses its mean colour first, in place.
    """
    subpatches -= subpatches.mean(dim=1, keepdim=True)
    rows = subpatches.flatten(1, 2)
    rows -= rows.mean(dim=2, keepdim=True)
    covariance = torch.bmm(rows, rows.mT) / rows.shape[2]
    torch.bmm(half_whitening(covariance), rows, out=out.flatten(1, 2))
