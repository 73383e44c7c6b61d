"""Hessian-Affine regions: extrema of the Hessian's determinant with affine shape and orientation.

Vectorised over all points of an image with numpy and OpenCV; deterministic and safe in threads
(how many threads OpenCV itself uses is the caller's business).
"""

from __future__ import annotations

import numpy as np

from ckn_scale.core.affine_shape import estimate_frames
from ckn_scale.core.keypoints import Keypoints, empty_keypoints
from ckn_scale.core.orientation import orient_frames
from ckn_scale.core.refinement import choose_points
from ckn_scale.core.scale_space import build_scale_space
from ckn_scale.core.specs import KeypointSpec


def detect_hessian_affine(luma: np.ndarray, spec: KeypointSpec) -> Keypoints:
    """The `max_keypoints` strongest regions of an (H, W) uint8 or float32 image above `threshold`.

    The threshold is low on purpose: a textured image of poor contrast gets its points too. A flat
    image has none.
    """
    _check_luma(luma)
    if luma.size == 0:
        return empty_keypoints()
    space = build_scale_space(luma, threshold=spec.threshold, saddles=spec.saddles)
    points = choose_points(space, spec.max_keypoints, spec.scale_weight)
    if len(points) == 0:
        return empty_keypoints()
    frames = estimate_frames(luma, space.layout, points)
    if spec.orientation == "dominant":
        frames = orient_frames(space, points.octaves, frames)
    return Keypoints(frames, points.responses)


def _check_luma(luma: np.ndarray) -> None:
    if luma.ndim != 2 or luma.dtype not in (np.uint8, np.float32):
        raise ValueError(f"luma must be (H, W) uint8 or float32, got {luma.shape} {luma.dtype}")
