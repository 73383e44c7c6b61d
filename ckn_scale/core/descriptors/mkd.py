"""MKD (Mukundan, Tolias, Chum: *Understanding and improving kernel local descriptors*, IJCV 2019).

Gradients' angles and places go through explicit maps of von Mises kernels; products of both, summed over
the patch, are 238 numbers, in polar coordinates (175) and cartesian ones (63). Only the whitening after it is
learned.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ckn_scale.core.ckn_inputs import blur_matrix

MKD_SIDE, MKD_DIM = 32, 128
_RAW_DIM = 238
# Fourier coefficients of von Mises kernels: of gradients' angles, of polar and of cartesian coordinates.
_ANGLE = (0.14343168, 0.268285, 0.21979234, 0.15838885)
_POLAR = (0.14343168, 0.268285, 0.21979234)
_CARTESIAN = (0.38214156, 0.48090413)
_ATTENUATION = 0.7  # of the unsupervised whitening
_EPSILON = 1e-8


class MkdLayers(nn.Module):
    """Grey patches (B, 1, 32, 32) → (B, 128): `pca` learned without labels, attenuated; `lw` with labels."""

    def __init__(self, whitening: Literal["pca", "lw"]) -> None:
        super().__init__()
        self.liberty = nn.ModuleDict({whitening: Whitening()})
        self.whitening = whitening
        line = torch.linspace(-1, 1, MKD_SIDE)
        y, x = torch.meshgrid(line, line, indexing="ij")
        rho, phi = torch.sqrt(x**2 + y**2 + _EPSILON), torch.atan2(y, x)
        window = torch.exp(-((rho / rho.max()) ** 2))
        polar = multiply(embed(phi, _POLAR), embed(rho * math.pi / math.sqrt(2), _POLAR)) * window
        cartesian = multiply(embed(x * math.pi / 2, _CARTESIAN), embed(y * math.pi / 2, _CARTESIAN)) * window
        for name, constant in {"phi": phi, "polar": polar, "cartesian": cartesian}.items():
            self.register_buffer(name, constant, persistent=False)
        blur = torch.from_numpy(blur_matrix(MKD_SIDE, 1.4 * MKD_SIDE / 64))
        self.register_buffer("blur", blur, persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        blur = self.get_buffer("blur")
        padded = nn.functional.pad(blur @ pixels @ blur.T, (1, 1, 1, 1), mode="replicate")[:, 0]
        dx = padded[:, 1:-1, :-2] - padded[:, 1:-1, 2:]
        dy = padded[:, :-2, 1:-1] - padded[:, 2:, 1:-1]
        magnitude = torch.sqrt(torch.sqrt(dx**2 + dy**2 + _EPSILON) + _EPSILON)[:, None]
        angle = torch.atan2(dy, dx)
        parts = []
        for name, turned in {"polar": angle - self.get_buffer("phi"), "cartesian": angle}.items():
            gradients = embed(turned, _ANGLE).transpose(0, 1) * magnitude  # (B, 7, S, S)
            sums = torch.einsum("bgyx,pyx->bgp", gradients, self.get_buffer(name))
            parts.append(nn.functional.normalize(sums.flatten(1)))
        joined = nn.functional.normalize(torch.cat(parts, dim=1))
        whitened: Tensor = self.liberty[self.whitening](joined, attenuate=self.whitening == "pca")
        return whitened


class Whitening(nn.Module):
    """Mean and directions, as published for each of the three PhotoTour sets; ours are Liberty's."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {
            "mean": (_RAW_DIM,),
            "eigvecs": (_RAW_DIM, _RAW_DIM),
            "eigvals": (_RAW_DIM,),
        }.items():
            self.register_buffer(name, torch.zeros(shape))

    def forward(self, rows: Tensor, *, attenuate: bool) -> Tensor:
        directions = self.get_buffer("eigvecs")[:, :MKD_DIM]
        if attenuate:
            directions = directions * self.get_buffer("eigvals")[:MKD_DIM].pow(-0.5 * _ATTENUATION)
        return nn.functional.normalize((rows - self.get_buffer("mean")) @ directions)


def embed(angles: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """(…) → (2 n + 1, …): inner products are the kernel of differences."""
    waves = [number * angles for number in range(1, len(coefficients))]
    roots = [math.sqrt(one) for one in coefficients]
    return torch.stack(
        [
            torch.full_like(angles, roots[0]),
            *(root * torch.cos(wave) for root, wave in zip(roots[1:], waves, strict=True)),
            *(root * torch.sin(wave) for root, wave in zip(roots[1:], waves, strict=True)),
        ]
    )


def multiply(first: Tensor, second: Tensor) -> Tensor:
    """All products of two embeddings of the same places, the second's numbers fastest."""
    return (first[:, None] * second[None]).flatten(0, 1)
