"""What layer one of a CKN sees of a patch: colours (raw), half-whitened colours (white), gradients (grad).

Local half-whitening decorrelates the sub-patches of one patch by their own covariance: each loses its mean
colour; then y = A^(−1/4) (x − mean), A being the covariance of all sub-patches of the same patch. Dividing
by the fourth root leaves the strong directions somewhat stronger: half of a whitening (A^(−1/2) would be
the whole)."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.ckn_model import INPUT_CHANNELS, input_positions, input_side
from ckn_scale.core.images import to_luma
from ckn_scale.core.specs import CknSpec

_ALIGNMENT = 16  # floats: every patch's matrix begins on a cache line, so its products are the same bits
# Directions below this share of the largest variance are rounding, not texture. That they are cut off, not
# clamped, does no harm: of 480 patches of photographs 7 % have one; with half a grey level of noise the
# cosine of whitened patches is 0.9633 either way, and 0.9754 against 0.9755 where one lies near the floor.
_RELATIVE_FLOOR = 1e-5
# A patch whose largest variance is below this is constant: 8-bit rounding alone gives 1e-6.
_CONSTANT_VARIANCE = 1e-10


class InputSubpatches:
    """The sub-patches that layer one sees, for groups of `group` patches; buffers are reused.

    Positions are padded to a multiple of 16. For `white` the sub-patches are given in coordinates:
    `basis` (coordinates, q) maps colours to them; None when they are the colours (or gradients) themselves.
    """

    def __init__(self, spec: CknSpec, patch_size_px: int, group: int, device: torch.device) -> None:
        self.spec, self.kernel, self.device = spec, spec.layers[0].patch_px, device
        self.positions, seen = input_positions(spec, patch_size_px), input_side(spec, patch_size_px)
        side, channels = len(self.positions), INPUT_CHANNELS[spec.channel]
        self.count, self.padded = side**2, -(-(side**2) // _ALIGNMENT) * _ALIGNMENT
        self.blur: Tensor | None = None
        if spec.input_blur_px > 0:
            self.blur = torch.from_numpy(blur_matrix(seen, spec.input_blur_px)).to(device)
        self.basis: Tensor | None = None
        if spec.channel == "white":
            self.whitener = Whitener(self.kernel**2, (group, side, self.padded), device)
            self.basis = self.whitener.basis
            return
        self.subpatches = torch.zeros(group, self.kernel**2 * channels, self.padded, device=device)
        self.grid = self.subpatches[:, :, : self.count].view(group, -1, side, side)
        self.gradients = torch.empty(group, 2, seen, seen, device=device)

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
        patches = shrink_patches(patches, self.spec.shrink)
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
    return to_luma(rows).reshape(count, side, side)


def shrink_patches(patches: np.ndarray, factor: int) -> np.ndarray:
    """(N, S, S[, 3]) uint8 → (N, S // factor, …): the means of squares; what is left over is cut off."""
    count, side = len(patches), patches.shape[1] // factor
    if factor == 1 or count == 0:
        return patches[:, :side, :side]
    used = np.ascontiguousarray(patches[:, : side * factor, : side * factor])
    rows = used.reshape(count * side * factor, side * factor, *patches.shape[3:])
    if factor % 2:  # the same bytes, sooner: OpenCV's resize by areas is fast for squares of 2 only
        middle = factor // 2
        small = cv2.blur(rows, (factor, factor))[middle::factor, middle::factor]
    else:
        small = cv2.resize(rows, (side, count * side), interpolation=cv2.INTER_AREA)
    return small.reshape(count, side, side, *patches.shape[3:])


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


class Whitener:
    """Half-whitening of sub-patches of k² = `num_pixels` colours; buffers are reused.

    The result lives in 3 (k² − 1) coordinates: `basis` maps colours, channel fastest, to them. They are
    differences and sums of opposite pixels, which cost less than products with an arbitrary basis.
    """

    def __init__(self, num_pixels: int, shape: tuple[int, int, int], device: torch.device) -> None:
        """`shape`: patches in a group, side of the square of positions, positions with padding."""
        group, self.side, padded = shape
        self.basis = torch.from_numpy(opposite_basis(num_pixels)).to(device)
        self.split = 3 * (num_pixels // 2)  # differences come first
        self.mixing = torch.from_numpy(mix_sums(num_pixels)).to(device)
        self.coordinates = torch.zeros(group, len(self.basis), padded, device=device)
        self.sums = torch.zeros(group, self.mixing.shape[1], padded, device=device)
        self.out = torch.zeros_like(self.coordinates)

    def __call__(self, pixels: Sequence[Tensor]) -> Tensor:
        """k² maps (B, 3, side, side), one for each pixel of a sub-patch → (B, 3 (k² − 1), padded)."""
        self._combine(pixels)
        rows, count = self.coordinates, self.side**2
        rows[:, :, :count] -= rows.sum(dim=2, keepdim=True) / count
        matrix = half_whitening(torch.bmm(rows, rows.mT) / count)
        return torch.bmm(matrix, rows, out=self.out)

    def _combine(self, pixels: Sequence[Tensor]) -> None:
        """Differences are coordinates already; sums go through `mixing`, which removes the mean colour."""
        half, last = len(pixels) // 2, len(pixels) - 1
        differences = self._as_grid(self.coordinates[:, : self.split])
        sums = self._as_grid(self.sums)
        for index in range(half):
            torch.sub(pixels[index], pixels[last - index], out=differences[:, index])
            torch.add(pixels[index], pixels[last - index], out=sums[:, index])
        if len(pixels) % 2:
            sums[:, half] = pixels[half]
        mixing = self.mixing.expand(len(self.sums), -1, -1)
        torch.bmm(mixing, self.sums, out=self.coordinates[:, self.split :])

    def _as_grid(self, rows: Tensor) -> Tensor:
        """(B, 3n, padded) → a view (B, n, 3, side, side)."""
        return rows[:, :, : self.side**2].view(len(rows), -1, 3, self.side, self.side)


def opposite_basis(num_pixels: int) -> np.ndarray:
    """(3 (n − 1), 3n) float32: orthonormal coordinates of n colours without their mean, channel fastest.

    First the differences of pixel i and pixel n − 1 − i, then mixtures of their sums.
    """
    half, eye = num_pixels // 2, np.eye(num_pixels)
    differences, sums = (eye - eye[::-1])[:half], (eye + eye[::-1])[:half]
    even = np.concatenate([sums, eye[half : num_pixels - half]])
    spread = np.eye(len(even))
    spread[:, 0] = even.sum(axis=1) / np.linalg.norm(even, axis=1)
    without_mean = np.linalg.qr(spread)[0][:, 1:].T @ (even / np.linalg.norm(even, axis=1, keepdims=True))
    basis = np.concatenate([differences / np.sqrt(2), without_mean])
    return np.kron(basis, np.eye(3)).astype(np.float32)


def mix_sums(num_pixels: int) -> np.ndarray:
    """What turns sums of opposite pixels (and the middle pixel) into the second half of `opposite_basis`.

    For pixels that were divided by √2: then differences need no factor at all.
    """
    half = num_pixels // 2
    mixing: np.ndarray = np.sqrt(2) * opposite_basis(num_pixels)[3 * half :, : 3 * (num_pixels - half)]
    return mixing.astype(np.float32)


def half_whitening(covariance: Tensor) -> Tensor:
    """A^(−1/4) of symmetric (B, q, q), zero on directions without variance and for constant patches."""
    values, vectors = torch.linalg.eigh(covariance)
    largest = values[:, -1:]
    kept = (values > _RELATIVE_FLOOR * largest) & (largest > _CONSTANT_VARIANCE)
    scales = values.clamp_(min=1e-30).pow_(-0.25).masked_fill_(~kept, 0)
    whitening: Tensor = (vectors * scales[:, None, :]) @ vectors.mT
    return whitening
