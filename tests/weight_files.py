"""Files in the layouts in which weights are published, with random numbers in them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from ckn_scale.core.descriptors.architectures import CAFFE_WIDTHS, TORCHVISION_WIDTHS, find_architectures

Layout = Mapping[str, tuple[int, ...]]


def draw_state(layout: Layout, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights, scaled so that signals keep their size on their way through the layers."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) / max(1, torch.Size(shape[1:]).numel()) ** 0.5
        for name, shape in layout.items()
    }


def write_tfeat(path: Path, seed: int = 0) -> Path:
    """As the authors' `tfeat-liberty.params`: a state dict of torch before its zip files."""
    state = draw_state(find_architectures("tfeat")[0].layout(), seed)
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path


def write_mkd(path: Path) -> Path:
    """As the authors' `mkd-concat-64.pth`: whitenings learned on three sets, with and without labels."""
    generator = torch.Generator().manual_seed(0)
    tree = {
        photos: {
            kind: {
                "mean": 0.01 * torch.randn(238, generator=generator),
                "eigvecs": torch.linalg.qr(torch.randn(238, 238, generator=generator))[0],
                "eigvals": torch.linspace(1, 0.01, 238),
            }
            for kind in ("pca", "lw")
        }
        for photos in ("liberty", "notredame", "yosemite")
    }
    torch.save(tree, path, _use_new_zipfile_serialization=False)
    return path


def torchvision_layout(hidden: int = 4096, num_classes: int = 1000) -> dict[str, tuple[int, ...]]:
    """Of torchvision's `alexnet-owt-7be5be79.pth`; the linear layers may be narrower."""
    kernels, inputs = (11, 5, 3, 3, 3), (3, *TORCHVISION_WIDTHS[:-1])
    shapes: dict[str, tuple[int, ...]] = {}
    for number, width, channels, side in zip(
        (0, 3, 6, 8, 10), TORCHVISION_WIDTHS, inputs, kernels, strict=True
    ):
        shapes |= {f"features.{number}.weight": (width, channels, side, side)}
        shapes |= {f"features.{number}.bias": (width,)}
    linear = {1: (hidden, 256 * 6 * 6), 4: (hidden, hidden), 6: (num_classes, hidden)}
    for number, shape in linear.items():
        shapes |= {f"classifier.{number}.weight": shape, f"classifier.{number}.bias": shape[:1]}
    return shapes


def caffe_layout(hidden: int = 4096, num_classes: int = 1000) -> dict[str, tuple[int, ...]]:
    """Of `bvlc_alexnet.caffemodel`; the linear layers may be narrower."""
    kernels, inputs = (11, 5, 3, 3, 3), (3, 48, 256, 192, 192)
    shapes: dict[str, tuple[int, ...]] = {}
    for number, (width, channels, side) in enumerate(
        zip(CAFFE_WIDTHS, inputs, kernels, strict=True), start=1
    ):
        shapes |= {f"conv{number}.weight": (width, channels, side, side), f"conv{number}.bias": (width,)}
    linear = {6: (hidden, 256 * 6 * 6), 7: (hidden, hidden), 8: (num_classes, hidden)}
    for number, shape in linear.items():
        shapes |= {f"fc{number}.weight": shape, f"fc{number}.bias": shape[:1]}
    return shapes


def encode_caffemodel(state: Mapping[str, np.ndarray], *, old: bool) -> bytes:
    """A NetParameter: of the old form (`layers`, num … width), as BVLC's files are, or of today's."""
    names = list(dict.fromkeys(key.rpartition(".")[0] for key in state))
    found = _field(1, b"AlexNet")
    for name in names:
        blobs = [_blob(state[f"{name}.{kind}"], old=old) for kind in ("weight", "bias")]
        number, name_field, blobs_field = (2, 4, 6) if old else (100, 1, 7)
        typed = _varint(5 << 3) + _varint(4) if old else _field(2, b"Convolution")
        content = (
            _field(name_field, name.encode()) + typed + b"".join(_field(blobs_field, one) for one in blobs)
        )
        found += _field(number, content)
    return found


def _blob(array: np.ndarray, *, old: bool) -> bytes:
    data = _field(5, np.asarray(array, "<f4").tobytes())
    if old:
        sizes = (1,) * (4 - array.ndim) + array.shape
        return b"".join(_varint(one << 3) + _varint(size) for one, size in enumerate(sizes, start=1)) + data
    return data + _field(7, _field(1, b"".join(_varint(size) for size in array.shape)))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    found = b""
    while value > 0x7F:
        found += struct.pack("B", value & 0x7F | 0x80)
        value >>= 7
    return found + struct.pack("B", value)
