"""The record that detectors return."""

from __future__ import annotations

import numpy as np
import pytest

from ckn_scale.core.keypoints import FIRST_SCALE_PX, MAX_POINTS, Keypoints, detect_dense, empty_keypoints
from ckn_scale.core.specs import KeypointSpec


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


def test_detect_dense_counts_as_worked_out_by_hand() -> None:
    """8 px on 1024 × 768: 128 · 96 points, then steps of 11.3 px (90 · 67), 16 (64 · 48), 22.6 and 32."""
    keypoints = detect_dense(np.zeros((768, 1024), np.uint8), KeypointSpec(detector="dense"))
    scales, counts = np.unique(keypoints.scales_px.round(3), return_counts=True)
    assert counts.tolist() == [12288, 6030, 3072, 1485, 768]
    np.testing.assert_allclose(scales, FIRST_SCALE_PX * np.sqrt(2) ** np.arange(5), atol=1e-3)


def test_detect_dense_is_upright_and_round() -> None:
    keypoints = detect_dense(np.zeros((50, 60), np.uint8), KeypointSpec(dense_num_scales=2))
    frames = keypoints.frames
    np.testing.assert_array_equal(frames[:, 0, 0], frames[:, 1, 1])
    assert not frames[:, 0, 1].any()
    assert not frames[:, 1, 0].any()


def test_detect_dense_is_centred_and_inside() -> None:
    centres = detect_dense(np.zeros((50, 61), np.uint8), KeypointSpec(dense_num_scales=1)).frames[:, :, 2]
    np.testing.assert_allclose(centres.min(axis=0) + centres.max(axis=0), [60, 49], atol=1e-4)
    assert centres.min() >= 0
    np.testing.assert_allclose(np.diff(np.unique(centres[:, 0])), 8, atol=1e-4)


def test_detect_dense_ignores_the_pixels() -> None:
    spec = KeypointSpec(detector="dense")
    flat = detect_dense(np.zeros((64, 64), np.uint8), spec)
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    np.testing.assert_array_equal(flat.frames, detect_dense(noise, spec).frames)


@pytest.mark.parametrize("shape", [(0, 0), (3, 100), (7, 7)])
def test_detect_dense_of_images_below_the_step_is_empty(shape: tuple[int, int]) -> None:
    keypoints = detect_dense(np.zeros(shape, np.uint8), KeypointSpec())
    assert keypoints.frames.shape == (0, 2, 3)


def test_detect_dense_is_bounded_however_small_the_step() -> None:
    """A step of 1 px would be 1.5 million points, 12 GB of patches; the default grid is left alone."""
    image = np.zeros((768, 1024), np.uint8)
    assert len(detect_dense(image, KeypointSpec(detector="dense")).frames) == 23_643
    few = detect_dense(image, KeypointSpec(detector="dense", dense_step_px=1))
    assert 0.8 * MAX_POINTS < len(few.frames) <= MAX_POINTS
    assert len(np.unique(few.scales_px.round(3))) == 5
