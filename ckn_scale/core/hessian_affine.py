"""Hessian-Affine regions: extrema of the Hessian's determinant with affine shape and orientation.

Vectorised over all points of an image with numpy and OpenCV; deterministic and safe in threads
(how many threads OpenCV itself uses is the caller's business).
"""

from __future__ import annotations

import numpy as np

from ckn_scale.core.affine_shape import estimate_shapes
from ckn_scale.core.keypoints import Keypoints
from ckn_scale.core.orientation import estimate_orientations
from ckn_scale.core.refinement import refine_extrema
from ckn_scale.core.scale_space import build_scale_space, find_extrema, plan_octaves
from ckn_scale.core.specs import KeypointSpec

SPARE_FACTOR = 1.25  # so many more extrema are refined than asked for, as some fail the edge test


def detect_hessian_affine(luma: np.ndarray, spec: KeypointSpec) -> Keypoints:
    """The `max_keypoints` strongest regions of an (H, W) image above `threshold`, strongest first.

    The threshold is low on purpose: a textured image of poor contrast gets its points too.
    """
    if luma.ndim != 2:
        raise ValueError(f"luma must be (H, W), got shape {luma.shape}")
    if min(luma.shape) == 0:
        return empty_keypoints()
    image = luma.astype(np.float32)
    space = build_scale_space(image, plan_octaves(*luma.shape))
    extrema = find_extrema(space, spec.threshold, spec.saddles)
    spare = int(np.ceil(SPARE_FACTOR * spec.max_keypoints))
    points = refine_extrema(space, extrema.strongest(spare)).strongest(spec.max_keypoints)
    if len(points) == 0:
        return empty_keypoints()
    shapes = estimate_shapes(image, space.layout, points)  # (N, 2, 2), upright
    if spec.orientation == "dominant":
        shapes = estimate_orientations(space, points, shapes)
    frames = np.empty((len(points), 2, 3), np.float32)
    frames[:, :, :2] = shapes
    frames[:, 0, 2] = points.x_px
    frames[:, 1, 2] = points.y_px
    return Keypoints(frames, points.responses)


def empty_keypoints() -> Keypoints:
    return Keypoints(np.empty((0, 2, 3), np.float32), np.empty(0, np.float32))
