"""The path of one image: bytes → pixels → keypoints → patches → descriptors → VLAD → vector.

What is kept of a point for matching is made here too, by `packed_points.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ckn_scale.core.descriptors.catalogue import load_network
from ckn_scale.core.descriptors.network import PatchNetwork, ProjectedDescriptor, Projector
from ckn_scale.core.flattening import Flattening
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.packed_points import pack_codes, pack_frames
from ckn_scale.core.pca import Projection
from ckn_scale.core.points import PointModel
from ckn_scale.core.preprocessor import PreparedImage, Preprocessor
from ckn_scale.core.specs import (
    BYTES_PER_FRAME,
    ChannelSpec,
    ImageSpec,
    KeypointSpec,
    PatchSpec,
    PointsSpec,
)
from ckn_scale.core.vlad import aggregate_vlad, assign_words

Reduction = Flattening | Projection


@dataclass(frozen=True)
class EncodedImage:
    """What is made of an image: its vector, its size, its points, strongest first.

    All is stored but the descriptors, from which a query takes more words than one a point. Without points
    (the encoder has no model for them, or was told not to) N is 0.
    """

    vector: np.ndarray  # (D,) float32, unit norm
    width_px: int  # at working size, in which frames are
    height_px: int
    original_size_px: tuple[int, int]  # width, height of the upright original
    frames: np.ndarray  # (N, 9) uint8, see pack_frames
    words: np.ndarray  # (N,) uint16
    codes: np.ndarray  # (N, B) uint8, see pack_codes
    descriptors: np.ndarray  # (N, D) float32 in the points' space


class EncodedPoints(NamedTuple):
    """The last four fields of an encoded image."""

    frames: np.ndarray
    words: np.ndarray
    codes: np.ndarray
    descriptors: np.ndarray


_NO_POINTS = EncodedPoints(
    np.empty((0, BYTES_PER_FRAME), np.uint8),
    np.empty(0, np.uint16),
    np.empty((0, 0), np.uint8),
    np.empty((0, 0), np.float32),
)


class DescribedPatches(NamedTuple):
    """The patches of each image by one channel."""

    rows: list[np.ndarray]  # (N, D) float32, for the VLAD
    points: list[np.ndarray]  # (N, d) float32, for matching; empty where the channel describes no points


@dataclass(frozen=True)
class Channel:
    """One learned description of patches and its VLAD words; the same network may describe points."""

    name: str
    descriptor: ProjectedDescriptor
    centroids: np.ndarray  # (K, D)
    weight: float  # of its similarities in the mix
    max_points: int | None = None  # its VLAD is of so many points, the strongest
    points: Projector | None = None  # of the network's descriptors, for matching

    def describe(
        self, prepared: Sequence[PreparedImage], *, with_points: bool, executor: Executor | None = None
    ) -> DescribedPatches:
        """Patches of all images share batches; each goes through the network once, if anything needs it."""
        others = [self.points] if with_points and self.points is not None else []
        patches = [one.patches[: None if others else self.max_points] for one in prepared]
        borders = np.cumsum([len(one) for one in patches])[:-1]
        described = self.descriptor.describe_with(np.concatenate(patches), others, executor)
        rows, *points = [np.split(one, borders) for one in described]
        return DescribedPatches([one[: self.max_points] for one in rows], points[0] if points else [])


@dataclass(frozen=True)
class ImageEncoder:
    """All learned models of a run, ready to turn images into vectors."""

    preprocessor: Preprocessor
    channels: tuple[Channel, ...]
    intra_normalise: bool
    reduction: Reduction | None  # none: the VLAD is the vector
    points: PointModel | None = None  # none: an image has a vector only
    device: str = "cpu"
    threads: int = 1  # of torch and others, as its bytes were made
    executor: Executor | None = None  # whose threads take batches beside each other: the same bytes, sooner

    @staticmethod
    def from_parts(parts: Mapping[str, ModelPart], *, with_reduction: bool = True) -> ImageEncoder:
        """`parts` as written by the training steps.

        encoder, ckn-* or network-*, projection-*, codebook-*, reduction; for points points-projection-* and
        points-words.
        """
        metadata = parts["encoder"].metadata
        preprocessor = Preprocessor(
            ImageSpec(**metadata["images"]),
            KeypointSpec(**metadata["keypoints"]),
            PatchSpec(**metadata["patches"]),
        )
        limits = metadata.get("max_points") or [None] * len(metadata["channels"])
        points = PointModel.from_parts(parts, metadata["points"]) if "points-words" in parts else None
        channels = []
        for name, weight, limit in zip(metadata["channels"], metadata["weights"], limits, strict=True):
            words = np.ascontiguousarray(parts[f"codebook-{name}"].arrays["centroids"], dtype=np.float32)
            descriptor = load_descriptor(parts, name, metadata["numerics"])
            projection = None if points is None else points.projections.get(name)
            projector = None if projection is None else descriptor.network.fold(projection)
            channels.append(Channel(name, descriptor, words, weight, limit, projector))
        reduction = load_reduction(parts["reduction"]) if with_reduction else None
        return ImageEncoder(
            preprocessor,
            tuple(channels),
            metadata["intra_normalise"],
            reduction,
            points,
            metadata["numerics"]["device"],
            int(metadata["numerics"].get("threads", 1)),
        )

    @property
    def dim(self) -> int:
        """Numbers of an image's vector."""
        if self.reduction is not None:
            return self.reduction.dim
        return sum(channel.centroids.size for channel in self.channels)

    def encode_bytes(self, data: bytes, box: Sequence[float] | None = None) -> EncodedImage:
        return self.encode_prepared([self.preprocessor.prepare(data, box)])[0]

    def encode_prepared(
        self, prepared: Sequence[PreparedImage], *, with_points: bool = True
    ) -> list[EncodedImage]:
        """The images' vectors and points; an image's result does not depend on the others."""
        described = self.describe_prepared(prepared, with_points=with_points)
        if not described:
            return []
        vectors = self.reduce(np.stack([one.vector for one in described]))
        return [replace(one, vector=vector) for one, vector in zip(described, vectors, strict=True)]

    def describe_prepared(
        self, prepared: Sequence[PreparedImage], *, with_points: bool = True
    ) -> list[EncodedImage]:
        """The same before the reduction: each vector is a VLAD. Patches of all images share batches.

        Whoever has many images reduces the VLADs of many groups at once, in full blocks.
        """
        if not prepared:
            return []
        matched = self.points.projections if self.points is not None and with_points else ()
        described = [
            one.describe(prepared, with_points=bool(matched), executor=self.executor) for one in self.channels
        ]
        by_name = {one.name: rows.points for one, rows in zip(self.channels, described, strict=True)}
        return [
            self._finish(
                one,
                [channel.rows[place] for channel in described],
                [by_name[name][place] for name in matched],
            )
            for place, one in enumerate(prepared)
        ]

    def reduce(self, vlads: np.ndarray) -> np.ndarray:
        """(N, K · D) VLADs → (N, dim) vectors."""
        return vlads if self.reduction is None else self.reduction.apply(vlads)

    def _finish(
        self, prepared: PreparedImage, rows: Sequence[np.ndarray], points: Sequence[np.ndarray]
    ) -> EncodedImage:
        """`rows` of each channel, for the VLAD; `points` of each that describes points, if any are wanted."""
        height_px, width_px = prepared.image.shape[:2]
        matched = _NO_POINTS if self.points is None or not points else self.encode_points(prepared, points)
        return EncodedImage(self.aggregate(rows), width_px, height_px, prepared.original_size_px, *matched)

    def encode_points(self, prepared: PreparedImage, points: Sequence[np.ndarray]) -> EncodedPoints:
        """The points of one image, described (N, d) by each channel that does."""
        if self.points is None:
            raise ValueError("this encoder has no model of points")
        height_px, width_px = prepared.image.shape[:2]
        descriptors = np.concatenate(points, axis=1)[: self.points.max_points]
        words = assign_words(descriptors, self.points.centroids)
        frames = pack_frames(prepared.keypoints, width_px, height_px)[: len(words)]
        codes = pack_codes(descriptors, words, self.points.centroids)
        return EncodedPoints(frames, words.astype(np.uint16), codes, descriptors)

    def aggregate(self, described: Sequence[np.ndarray]) -> np.ndarray:
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
    channels: Sequence[ChannelSpec],
    points: PointsSpec,
    *,
    intra_normalise: bool,
    numerics: Mapping[str, Any],
) -> dict[str, Any]:
    """The `encoder` part: everything an encoder needs besides the learned arrays."""
    return {
        **asdict(preprocessor),
        "channels": [channel.name for channel in channels],
        "weights": [channel.weight for channel in channels],
        "max_points": [channel.max_points for channel in channels],
        "points": {"channels": list(points.channels), "max_points": points.max_points},
        "intra_normalise": intra_normalise,
        "numerics": dict(numerics),
    }


def load_descriptor(
    parts: Mapping[str, ModelPart], channel: str, numerics: Mapping[str, Any]
) -> ProjectedDescriptor:
    """The descriptor of one channel from its parts: `ckn-` or `network-` and `projection-<channel>`."""
    names = (f"ckn-{channel}", f"network-{channel}")
    network = load_network_for(next(parts[name] for name in names if name in parts), numerics)
    return ProjectedDescriptor(network, Projection.from_part(parts[f"projection-{channel}"]))


def load_network_for(part: ModelPart, numerics: Mapping[str, Any]) -> PatchNetwork:
    """A network that computes with the numerics class of a run."""
    batch_size, device, dtype = (numerics[key] for key in ("batch_patches", "device", "dtype"))
    return load_network(part, batch_size=batch_size, device=device, dtype=dtype)


def load_reduction(part: ModelPart) -> Reduction | None:
    """The reduction of the part `reduction`; none where the VLAD is kept as it is."""
    kinds: dict[str, type[Flattening] | type[Projection]] = {"flatten": Flattening, "pca": Projection}
    method = part.metadata["method"]
    return None if method == "none" else kinds[method].from_part(part)
