"""The regions of images and their patches, as the pipeline finds and cuts them, kept in the cache."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from ckn_scale.core.descriptors.network import ProjectedDescriptor
from ckn_scale.core.images import decode_image
from ckn_scale.core.keypoints import Keypoints
from ckn_scale.core.patches import extract_patches
from ckn_scale.core.preprocessor import detect_keypoints
from ckn_scale.core.specs import ImageSpec, KeypointSpec, PatchSpec
from ckn_scale.errors import ImageRejected, InputError
from ckn_scale.evaluate.cache import ContentCache, hash_code, make_key
from ckn_scale.storage.image_refs import IMAGE_EXTENSIONS

NETPBM = ("ppm", "pgm")
EXTENSIONS = {*IMAGE_EXTENSIONS, *NETPBM}


class UnusableImage(InputError):
    """An image of a data set that the pipeline would refuse; training goes on without it."""


@dataclass(frozen=True)
class ImageFile:
    """An image of a data set; `box` (x1, y1, x2, y2) is cut out before anything else."""

    path: Path
    box: tuple[float, float, float, float] | None = None

    def read(self) -> bytes:
        """Its bytes, in a format that the pipeline reads."""
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror}") from None
        return _wrap_netpbm(data) if self.path.suffix.lower()[1:] in NETPBM else data


def _wrap_netpbm(data: bytes) -> bytes:
    """The same pixels as PNG: old data sets come as PPM, which no one should send to an index."""
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED) if data else None
    if pixels is None:
        return data  # the decoder will say what is wrong
    return cv2.imencode(".png", pixels, [cv2.IMWRITE_PNG_COMPRESSION, 0])[1].tobytes()


@dataclass(frozen=True)
class Detected:
    """What the detector found in one image; `key` names it in the cache."""

    key: str
    keypoints: Keypoints
    width_px: int
    height_px: int


@dataclass(frozen=True)
class RegionReader:
    """`images` and `keypoints` say which regions there are, `patches` how large a square each becomes."""

    images: ImageSpec
    keypoints: KeypointSpec
    patches: PatchSpec
    cache: ContentCache

    def with_region(self, region: float) -> RegionReader:
        return replace(self, patches=replace(self.patches, region=region))

    def key_of(self, file: ImageFile) -> str:
        return make_key("keypoints", hash_code(), file.read(), file.box, self.images, self.keypoints)

    def detect(self, file: ImageFile) -> Detected:
        """The regions of an image, from the cache or found; UnusableImage when it cannot be decoded."""
        key = self.key_of(file)
        arrays = self.cache.load(key)
        if arrays is None:
            image = self.decode(file)
            found = detect_keypoints(image, self.keypoints)
            size = np.array(image.shape[1::-1], np.int64)
            arrays = {"frames": found.frames, "responses": found.responses, "size": size}
            self.cache.save(key, arrays)
        keypoints = Keypoints(arrays["frames"], arrays["responses"])
        return Detected(key, keypoints, *arrays["size"].tolist())

    def decode(self, file: ImageFile) -> np.ndarray:
        try:
            return decode_image(file.read(), self.images, box=file.box)
        except ImageRejected as rejected:
            raise UnusableImage(f"{file.path} cannot be used: {rejected}") from None

    def patches_key(self, keypoints_key: str) -> str:
        return make_key("patches", keypoints_key, self.patches)

    def extract(self, file: ImageFile, detected: Detected) -> np.ndarray:
        """(N, S, S, 3) uint8, one per keypoint."""
        key = self.patches_key(detected.key)
        arrays = self.cache.load(key)
        if arrays is None:
            patches = extract_patches(self.decode(file), detected.keypoints, self.patches)
            arrays = {"patches": patches}
            self.cache.save(key, arrays)
        return arrays["patches"]

    def extract_some(self, file: ImageFile, detected: Detected, chosen: Sequence[int]) -> np.ndarray:
        """Patches of some keypoints only; too small a thing to keep."""
        found = detected.keypoints
        some = Keypoints(found.frames[chosen], found.responses[chosen])
        return extract_patches(self.decode(file), some, self.patches)


@dataclass(frozen=True)
class KeyedDescriptor:
    """A descriptor and the hash of all that makes it."""

    descriptor: ProjectedDescriptor
    key: str
    train_seconds: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)  # how it runs: batch size, device, dtype

    @property
    def dim(self) -> int:
        return self.descriptor.dim


def name_descriptors(reader: RegionReader, file: ImageFile, keyed: KeyedDescriptor) -> str:
    """The cache's key of one image's descriptors."""
    return make_key("descriptors", reader.patches_key(reader.key_of(file)), keyed.key)


def describe_regions(
    reader: RegionReader, file: ImageFile, keyed: KeyedDescriptor
) -> tuple[np.ndarray, float]:
    """(N, dim) float32 of one image's regions, and the seconds it took when it was done.

    Regions and patches are looked for only when the cache does not know the descriptors.
    """
    key = name_descriptors(reader, file, keyed)
    arrays = reader.cache.load(key)
    if arrays is None:
        patches = reader.extract(file, reader.detect(file))
        started = time.perf_counter()
        rows = keyed.descriptor.describe(patches)
        arrays = {"rows": rows, "seconds": np.array([time.perf_counter() - started])}
        reader.cache.save(key, arrays)
    return arrays["rows"], float(arrays["seconds"][0])
