"""One call for every detector."""

from __future__ import annotations

import numpy as np

from ckn_scale.core.dense import detect_dense
from ckn_scale.core.hessian_affine import detect_hessian_affine
from ckn_scale.core.images import to_luma
from ckn_scale.core.keypoints import Keypoints
from ckn_scale.core.specs import KeypointSpec

DETECTORS = {"hessian-affine": detect_hessian_affine, "dense": detect_dense}


def detect_keypoints(image: np.ndarray, spec: KeypointSpec) -> Keypoints:
    """The regions of an (H, W, 3) RGB or (H, W) grey image that `spec` asks for, strongest first."""
    return DETECTORS[spec.detector](to_luma(image), spec)
