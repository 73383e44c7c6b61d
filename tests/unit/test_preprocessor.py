"""`detect_keypoints` and `extract_patches` together: the path every image takes."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from ckn_scale.core.patches import extract_patches
from ckn_scale.core.preprocessor import detect_keypoints
from ckn_scale.core.specs import KeypointSpec, PatchSpec


@pytest.fixture
def image() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (160, 200, 3), dtype=np.uint8)


@pytest.mark.parametrize("detector", ["hessian-affine", "dense"])
def test_detect_keypoints_shapes(image: np.ndarray, detector: Literal["hessian-affine", "dense"]) -> None:
    keypoints = detect_keypoints(image, KeypointSpec(detector=detector, max_keypoints=50))
    assert keypoints.frames.dtype == keypoints.responses.dtype == np.float32
    assert keypoints.frames.shape == (len(keypoints), 2, 3)
    assert len(keypoints) > 0
    patches = extract_patches(image, keypoints, PatchSpec())
    assert patches.shape == (len(keypoints), 51, 51, 3)


def test_detect_keypoints_of_a_flat_image_is_empty() -> None:
    flat = np.full((120, 120, 3), 90, np.uint8)
    keypoints = detect_keypoints(flat, KeypointSpec())
    assert len(keypoints) == 0
    assert extract_patches(flat, keypoints, PatchSpec()).shape == (0, 51, 51, 3)
