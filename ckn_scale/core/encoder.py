"""The path of one image: bytes → pixels → keypoints → patches → descriptors → VLAD → vector.

What is kept of a point for matching is made here too: its frame in 9 bytes, its word, and a 128-bit code.
A frame is x, y (uint16 each, over the image's extent), log scale, angle, two numbers of the upright
shape, and the rank of its strength. A code is the signs of the descriptor's residual to its word, so that
the Hamming distance of two codes under one word estimates their angle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ckn_scale.core.descriptors.ckn import CknDescriptor
from ckn_scale.core.flattening import Flattening
from ckn_scale.core.keypoints import Keypoints
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.pca import Projection
from ckn_scale.core.preprocessor import PreparedImage, Preprocessor
from ckn_scale.core.specs import ImageSpec, KeypointSpec, PatchSpec
from ckn_scale.core.vlad import aggregate_vlad, assign_words

Reduction = Flattening | Projection


@dataclass(frozen=True)
class EncodedImage:
    """What is stored of an image: its vector, its size at working resolution, its points."""

    vector: np.ndarray  # (D,) float32, unit norm
    width_px: int
    height_px: int
    frames: np.ndarray  # (N, 9) uint8, see pack_frames
    words: np.ndarray  # (N,) uint16
    codes: np.ndarray  # (N, 16) uint8


@dataclass(frozen=True)
class Channel:
    """One learned description of patches and its VLAD words."""

    descriptor: CknDescriptor
    centroids: np.ndarray  # (K, D)
    weight: float  # of its similarities in the mix


@dataclass(frozen=True)
class ImageEncoder:
    """All learned models of a run, ready to turn images into vectors."""

    preprocessor: Preprocessor
    channels: tuple[Channel, ...]
    intra_normalise: bool
    reduction: Reduction | None  # none: the VLAD is the vector

    @staticmethod
    def from_parts(parts: Mapping[str, ModelPart], *, with_reduction: bool = True) -> ImageEncoder:
        """`parts` as written by the training steps: encoder, ckn-*, projection-*, codebook-*, reduction."""
        metadata = parts["encoder"].metadata
        preprocessor = Preprocessor(
            ImageSpec(**metadata["images"]),
            KeypointSpec(**metadata["keypoints"]),
            PatchSpec(**metadata["patches"]),
        )
        channels = []
        for name, weight in zip(metadata["channels"], metadata["weights"], strict=True):
            words = np.ascontiguousarray(parts[f"codebook-{name}"].arrays["centroids"], dtype=np.float32)
            channels.append(Channel(load_descriptor(parts, name, metadata["numerics"]), words, weight))
        reduction = load_reduction(parts["reduction"]) if with_reduction else None
        return ImageEncoder(preprocessor, tuple(channels), metadata["intra_normalise"], reduction)

    @property
    def dim(self) -> int:
        """Numbers of an image's vector."""
        if self.reduction is not None:
            return self.reduction.dim
        return sum(channel.centroids.size for channel in self.channels)

    def encode_bytes(self, data: bytes, box: Sequence[float] | None = None) -> EncodedImage:
        return self.encode_prepared([self.preprocessor.prepare(data, box)])[0]

    def encode_prepared(
        self, prepared: Sequence[PreparedImage], *, max_points: int | None = None
    ) -> list[EncodedImage]:
        """The images' vectors and points; an image's result does not depend on the others."""
        described = self.describe_prepared(prepared, max_points=max_points)
        if not described:
            return []
        vectors = self.reduce(np.stack([one.vector for one in described]))
        return [replace(one, vector=vector) for one, vector in zip(described, vectors, strict=True)]

    def describe_prepared(
        self, prepared: Sequence[PreparedImage], *, max_points: int | None = None
    ) -> list[EncodedImage]:
        """The same before the reduction: each vector is a VLAD. Patches of all images share batches.

        Whoever has many images reduces the VLADs of many groups at once, in full blocks.
        """
        if not prepared:
            return []
        patches = np.concatenate([one.patches for one in prepared])
        borders = np.cumsum([len(one.patches) for one in prepared])[:-1]
        described = [np.split(channel.descriptor.describe(patches), borders) for channel in self.channels]
        return [
            self._finish(one, [channel[position] for channel in described], max_points)
            for position, one in enumerate(prepared)
        ]

    def reduce(self, vlads: np.ndarray) -> np.ndarray:
        """(N, K · D) VLADs → (N, dim) vectors."""
        return vlads if self.reduction is None else self.reduction.apply(vlads)

    def _finish(
        self, prepared: PreparedImage, described: Sequence[np.ndarray], max_points: int | None
    ) -> EncodedImage:
        height_px, width_px = prepared.image.shape[:2]
        words = assign_words(described[0], self.channels[0].centroids)[:max_points]
        return EncodedImage(
            vector=self._aggregate(described),
            width_px=width_px,
            height_px=height_px,
            frames=pack_frames(prepared.keypoints, width_px, height_px)[:max_points],
            words=words.astype(np.uint16),
            codes=pack_codes(described[0][:max_points], words, self.channels[0].centroids),
        )

    def _aggregate(self, described: Sequence[np.ndarray]) -> np.ndarray:
        blocks = [
            aggregate_vlad(rows, channel.centroids, intra_normalise=self.intra_normalise)
            * np.float32(np.sqrt(channel.weight))
            for rows, channel in zip(described, self.channels, strict=True)
        ]
        total = sum(channel.weight for channel in self.channels)
        mixed: np.ndarray = (np.concatenate(blocks) / np.sqrt(total)).astype(np.float32)
        return mixed


def encoder_metadata(
    preprocessor: Preprocessor,
    weights: Mapping[str, float],
    *,
    intra_normalise: bool,
    numerics: Mapping[str, Any],
) -> dict[str, Any]:
    """The `encoder` part: everything an encoder needs besides the learned arrays.

    `weights` has a channel's weight in the mix under its name.
    """
    return {
        **asdict(preprocessor),
        "channels": list(weights),
        "weights": list(weights.values()),
        "intra_normalise": intra_normalise,
        "numerics": dict(numerics),
    }


def load_descriptor(
    parts: Mapping[str, ModelPart], channel: str, numerics: Mapping[str, Any]
) -> CknDescriptor:
    """The descriptor of one channel from the parts `ckn-<channel>` and `projection-<channel>`."""
    return CknDescriptor.from_parts(
        parts[f"ckn-{channel}"],
        parts[f"projection-{channel}"],
        batch_size=numerics["batch_patches"],
        device=numerics["device"],
        dtype=numerics["dtype"],
    )


def load_reduction(part: ModelPart) -> Reduction | None:
    """The reduction of the part `reduction`; none where the VLAD is kept as it is."""
    kinds: dict[str, type[Flattening] | type[Projection]] = {"flatten": Flattening, "pca": Projection}
    method = part.metadata["method"]
    return None if method == "none" else kinds[method].from_part(part)


NUM_CODE_BITS = 128
LOG2_SCALE_RANGE = (-1.0, 8.0)
LOG_AXIS_RANGE = (-2.0, 2.0)
SHEAR_RANGE = (-4.0, 4.0)


def pack_frames(keypoints: Keypoints, width_px: int, height_px: int) -> np.ndarray:
    """(N, 9) uint8. `unpack_frames` gives the frames back within the quantisation."""
    linear = keypoints.frames[:, :, :2].astype(np.float64)
    scale, angle_rad, axis, shear = _split_linear(linear)
    xy = keypoints.frames[:, :, 2] / np.array([max(width_px - 1, 1), max(height_px - 1, 1)])
    packed = np.empty((len(keypoints), 9), np.uint8)
    packed[:, :4] = np.round(np.clip(xy, 0, 1) * 65535).astype("<u2").view(np.uint8).reshape(-1, 4)
    packed[:, 4] = _quantise(np.log2(scale), LOG2_SCALE_RANGE)
    packed[:, 5] = np.round(angle_rad / (2 * np.pi) * 256).astype(np.int64) % 256
    packed[:, 6] = _quantise(np.log(axis), LOG_AXIS_RANGE)
    packed[:, 7] = _quantise(shear, SHEAR_RANGE)
    packed[:, 8] = np.linspace(255, 0, len(keypoints)).astype(np.uint8)
    return packed


def unpack_frames(packed: np.ndarray, width_px: int, height_px: int) -> Keypoints:
    """(N, 9) uint8 → keypoints; responses are the ranks of the strengths, 255 for the strongest."""
    xy = np.ascontiguousarray(packed[:, :4]).view("<u2").astype(np.float64) / 65535
    scale = 2.0 ** _restore(packed[:, 4], LOG2_SCALE_RANGE)
    angle_rad = packed[:, 5] / 256 * 2 * np.pi
    axis = np.exp(_restore(packed[:, 6], LOG_AXIS_RANGE))
    shear = _restore(packed[:, 7], SHEAR_RANGE)
    frames = np.empty((len(packed), 2, 3), np.float32)
    frames[:, :, :2] = _join_linear(scale, angle_rad, axis, shear)
    frames[:, :, 2] = xy * np.array([max(width_px - 1, 1), max(height_px - 1, 1)])
    return Keypoints(frames, packed[:, 8].astype(np.float32))


def pack_codes(descriptors: np.ndarray, words: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """(N, D) descriptors with their words → (N, 16) uint8; dimensions beyond 128 are left out."""
    residuals = (descriptors - centroids[words])[:, :NUM_CODE_BITS]
    bits = np.zeros((len(descriptors), NUM_CODE_BITS), np.uint8)
    bits[:, : residuals.shape[1]] = residuals > 0
    return np.packbits(bits, axis=1)


def _split_linear(linear: np.ndarray) -> tuple[np.ndarray, ...]:
    """A = s · L · R(angle), L lower triangular with determinant 1: the upright ellipse."""
    scale = np.sqrt(np.maximum(np.abs(np.linalg.det(linear)), 1e-12))
    unit = linear / scale[:, None, None]
    row = unit[:, 0]
    axis = np.maximum(np.hypot(row[:, 0], row[:, 1]), 1e-6)
    cos, sin = row[:, 0] / axis, -row[:, 1] / axis
    shear = unit[:, 1, 0] * cos - unit[:, 1, 1] * sin
    return scale, np.arctan2(sin, cos) % (2 * np.pi), axis, shear


def _join_linear(scale: np.ndarray, angle_rad: np.ndarray, axis: np.ndarray, shear: np.ndarray) -> np.ndarray:
    cos, sin = np.cos(angle_rad), np.sin(angle_rad)
    first = np.stack([axis * cos, -axis * sin], axis=1)
    second = np.stack([shear * cos + sin / axis, -shear * sin + cos / axis], axis=1)
    linear: np.ndarray = scale[:, None, None] * np.stack([first, second], axis=1)
    return linear


def _quantise(values: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    low, high = bounds
    return np.round(np.clip((values - low) / (high - low), 0, 1) * 255).astype(np.uint8)


def _restore(levels: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    low, high = bounds
    return low + levels.astype(np.float64) / 255 * (high - low)
