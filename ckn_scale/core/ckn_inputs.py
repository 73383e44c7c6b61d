"""What the first layer of a CKN sees: colours (raw), whitened colours (white) or gradients (grad)."""

from __future__ import annotations

import cv2
import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.ckn_model import INPUT_CHANNELS, input_positions
from ckn_scale.core.specs import CknSpec
from ckn_scale.core.whitening import Whitener

_ALIGNMENT = 16  # floats: every patch's matrix begins on a cache line, so its products are the same bits


class InputSubpatches:
    """The sub-patches that layer one sees, for groups of `group` patches; buffers are reused.

    Positions are padded to a multiple of 16. For `white` the sub-patches are given in coordinates:
    `basis` (coordinates, q) maps colours to them; None when they are the colours (or gradients) themselves.
    """

    def __init__(self, spec: CknSpec, patch_size_px: int, group: int, device: torch.device) -> None:
        self.spec, self.kernel, self.device = spec, spec.layers[0].patch_px, device
        self.positions = input_positions(spec, patch_size_px)
        side, channels = len(self.positions), INPUT_CHANNELS[spec.channel]
        self.count, self.padded = side**2, -(-(side**2) // _ALIGNMENT) * _ALIGNMENT
        self.blur: Tensor | None = None
        if spec.input_blur_px > 0:
            self.blur = torch.from_numpy(blur_matrix(patch_size_px, spec.input_blur_px)).to(device)
        self.basis: Tensor | None = None
        if spec.channel == "white":
            self.whitener = Whitener(self.kernel**2, (group, side, self.padded), device)
            self.basis = self.whitener.basis
            return
        self.subpatches = torch.zeros(group, self.kernel**2 * channels, self.padded, device=device)
        self.grid = self.subpatches[:, :, : self.count].unflatten(2, (side, side))
        self.gradients = torch.empty(group, 2, patch_size_px, patch_size_px, device=device)

    def __call__(self, patches: np.ndarray) -> Tensor:
        """uint8 (group, S, S, 3) → (group, coordinates, padded positions), not normalised."""
        planes = self.make_planes(patches)
        if self.spec.channel == "white":
            return self.whitener(self._shift(planes))
        if self.spec.channel == "grad":
            differentiate(planes[:, 0], self.gradients)
            planes = self.gradients
        channels = planes.shape[1]
        for tap, shifted in enumerate(self._shift(planes)):
            self.grid[:, tap * channels : (tap + 1) * channels] = shifted
        return self.subpatches

    def _shift(self, planes: Tensor) -> list[Tensor]:
        """One view (B, channels, side, side) for each pixel of a sub-patch."""
        step, reach = self.spec.position_step, int(self.positions[-1]) + 1
        taps = [divmod(tap, self.kernel) for tap in range(self.kernel**2)]
        return [planes[:, :, dy : dy + reach : step, dx : dx + reach : step] for dy, dx in taps]

    def make_planes(self, patches: np.ndarray) -> Tensor:
        """→ float32 in 0…1 (for `white`, 0…√½), (B, 3, S, S), or luma (B, 1, S, S) for `grad`."""
        if self.spec.channel == "grad":
            pixels = torch.from_numpy(convert_to_luma(patches)).to(self.device)[:, None]
        else:
            pixels = torch.from_numpy(split_colours(patches)).to(self.device).transpose(0, 1)
        full_scale = 255 * 2**0.5 if self.spec.channel == "white" else 255
        planes = pixels.to(torch.float32).div_(full_scale)
        return planes if self.blur is None else self.blur @ planes @ self.blur.T


def convert_to_luma(patches: np.ndarray) -> np.ndarray:
    """(N, S, S, 3) RGB or (N, S, S) grey uint8 → (N, S, S) uint8 luma (Rec. 601)."""
    if patches.ndim == 3 or len(patches) == 0:
        return patches.reshape(patches.shape[:3])
    count, side = patches.shape[:2]
    rows = np.ascontiguousarray(patches).reshape(count * side, side, 3)
    return cv2.cvtColor(rows, cv2.COLOR_RGB2GRAY).reshape(count, side, side)


def split_colours(patches: np.ndarray) -> np.ndarray:
    """(N, S, S, 3) → (3, N, S, S) uint8."""
    count, side = patches.shape[:2]
    rows = np.ascontiguousarray(patches).reshape(count * side, side, 3)
    return np.stack(cv2.split(rows)).reshape(3, count, side, side)


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
