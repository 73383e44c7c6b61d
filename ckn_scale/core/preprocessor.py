"""From bytes to patches: decode, detect, cut. What an image goes through before any learned model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckn_scale.core.hessian_affine import detect_hessian_affine
from ckn_scale.core.images import decode_with_size, to_luma
from ckn_scale.core.keypoints import Keypoints, detect_dense
from ckn_scale.core.patches import extract_patches
from ckn_scale.core.specs import ImageSpec, KeypointSpec, PatchSpec
from ckn_scale.errors import ImageRejected

DETECTORS = {"hessian-affine": detect_hessian_affine, "dense": detect_dense}


def detect_keypoints(image: np.ndarray, spec: KeypointSpec) -> Keypoints:
    """The regions of an (H, W, 3) RGB or (H, W) grey image that `spec` asks for, strongest first."""
    return DETECTORS[spec.detector](to_luma(image), spec)


@dataclass(frozen=True)
class PreparedImage:
    """What the CPU makes of an image: all that a GPU batch needs."""

    image: np.ndarray  # (H, W, 3) uint8 RGB
    keypoints: Keypoints
    patches: np.ndarray  # (N, S, S, 3) uint8 RGB
    original_size_px: tuple[int, int]  # width, height before it was brought to working size


@dataclass(frozen=True)
class Preprocessor:
    """From bytes to patches: needs no learned model."""

    images: ImageSpec
    keypoints: KeypointSpec
    patches: PatchSpec

    def prepare(self, data: bytes, box: Sequence[float] | None = None) -> PreparedImage:
        """`box` (x1, y1, x2, y2) in pixels of the upright original crops it before anything else."""
        decoded = decode_with_size(data, self.images, box=box)
        return replace(self.prepare_pixels(decoded.pixels), original_size_px=decoded.original_size_px)

    def prepare_pixels(self, image: np.ndarray) -> PreparedImage:
        """The same from (H, W, 3) uint8 RGB; `ImageRejected` when the detector finds no point."""
        keypoints = detect_keypoints(image, self.keypoints)
        if len(keypoints) == 0:
            raise ImageRejected("no_keypoints", "the image is flat: the detector found no point")
        size_px = image.shape[1], image.shape[0]
        return PreparedImage(image, keypoints, extract_patches(image, keypoints, self.patches), size_px)
