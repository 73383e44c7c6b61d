"""The record that detectors return."""

from __future__ import annotations

import numpy as np

from ckn_scale.core.keypoints import Keypoints, empty_keypoints


def make_keypoints() -> Keypoints:
    frames = np.array([[[2, 0, 5], [1, 8, 6]], [[0, 3, 1], [-3, 0, 2]]], np.float32)
    return Keypoints(frames, np.array([9, 4], np.float32))


def test_scales_px_by_hand() -> None:
    np.testing.assert_allclose(make_keypoints().scales_px, [4, 3])


def test_empty_keypoints() -> None:
    keypoints = empty_keypoints()
    assert len(keypoints) == 0
    assert keypoints.scales_px.shape == (0,)
    assert keypoints.frames.dtype == keypoints.responses.dtype == np.float32
