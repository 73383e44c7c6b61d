"""Rectified patches: where they are cut, what lies outside, what must not alias."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from dead_leaves import make_dead_leaves

from ckn_scale.core.keypoints import Keypoints, empty_keypoints
from ckn_scale.core.patches import choose_levels, extract_patches
from ckn_scale.core.specs import PatchSpec


def keypoints_at(*frames: list[list[float]]) -> Keypoints:
    return Keypoints(np.array(frames, np.float32).reshape(-1, 2, 3), np.ones(len(frames), np.float32))


def make_ramp(height_px: int, width_px: int) -> np.ndarray:
    """Luma = column, so a patch's values are the x coordinates it was read from."""
    return np.broadcast_to(np.arange(width_px, dtype=np.uint8), (height_px, width_px)).copy()


def test_extract_patches_at_pitch_one_copies_the_pixels() -> None:
    image = make_dead_leaves()
    spec = PatchSpec(size_px=21, region=10.5)  # 21 pixels over 21 units
    patches = extract_patches(image, keypoints_at([[1, 0, 100], [0, 1, 80]]), spec)
    np.testing.assert_array_equal(patches[0], image[70:91, 90:111])


def test_extract_patches_follows_the_frame_by_hand() -> None:
    ramp = make_ramp(200, 250)
    # The first axis of the frame (patch columns) points down the image, the second to the left.
    patch = extract_patches(ramp, keypoints_at([[0, -1, 100], [1, 0, 80]]), PatchSpec(11, 5.5))[0]
    np.testing.assert_array_equal(patch, np.broadcast_to(np.arange(105, 94, -1)[:, None], (11, 11)))


def test_extract_patches_half_side_is_region_times_scale() -> None:
    ramp = make_ramp(200, 250)
    patch = extract_patches(ramp, keypoints_at([[2, 0, 120], [0, 2, 100]]), PatchSpec(51, 12.0))[0]
    # 51 pixels over 2 · 12 · 2 = 48: the outer ones are half a pitch inside.
    assert patch[25, 0] == pytest.approx(120 - 24 + 24 / 51, abs=1)
    assert patch[25, 25] == 120
    assert patch[25, 50] == pytest.approx(120 + 24 - 24 / 51, abs=1)


def test_extract_patches_repeats_the_nearest_pixel_outside() -> None:
    image = make_dead_leaves(60, 80)
    patch = extract_patches(image, keypoints_at([[1, 0, 0], [0, 1, 0]]), PatchSpec(21, 10.5))[0]
    np.testing.assert_array_equal(patch[10:, 10:], image[:11, :11])
    assert (patch[:11, :11] == image[0, 0]).all()
    np.testing.assert_array_equal(patch[0, 10:], image[0, :11])


def test_extract_patches_far_outside_is_the_corner() -> None:
    image = make_dead_leaves(60, 80)
    patch = extract_patches(image, keypoints_at([[1, 0, 5000], [0, 1, 5000]]), PatchSpec(21, 10.5))[0]
    assert (patch == image[-1, -1]).all()


@pytest.mark.parametrize("frame", [[[8, 0, 200], [0, 8, 200]], [[3, 1, 200], [0, 9, 200]]])
def test_extract_patches_does_not_alias(frame: list[list[float]]) -> None:
    """Stripes finer than the patch can show come out grey, not as slower stripes."""
    stripes = np.zeros((400, 400), np.uint8)
    stripes[::2] = 200
    patch = extract_patches(stripes, keypoints_at(frame), PatchSpec(51, 12.0))[0].astype(float)
    assert np.abs(patch - 100).max() < 12


def test_extract_patches_is_covariant_with_scale() -> None:
    image = make_dead_leaves(300, 300, seed=2)
    half = cv2.pyrDown(image)
    at_full = extract_patches(image, keypoints_at([[4, 1, 140], [-1, 4, 150]]), PatchSpec())[0]
    at_half = extract_patches(half, keypoints_at([[2, 0.5, 70], [-0.5, 2, 75]]), PatchSpec())[0]
    assert np.abs(at_full.astype(float) - at_half).mean() < 2.0


def test_extract_patches_colour_agrees_with_each_channel() -> None:
    channels = [make_dead_leaves(seed=seed) for seed in range(3)]
    frames = np.random.default_rng(0).normal(size=(300, 2, 3)) * [[[3, 3, 60], [3, 3, 60]]] + [
        [[0, 0, 120]] * 2
    ]
    keypoints = Keypoints(frames.astype(np.float32), np.ones(300, np.float32))
    colour = extract_patches(np.stack(channels, axis=2), keypoints, PatchSpec())
    assert colour.shape == (300, 51, 51, 3)
    assert colour.dtype == np.uint8
    assert colour.flags.c_contiguous
    for k, channel in enumerate(channels):
        grey = extract_patches(channel, keypoints, PatchSpec())
        assert np.abs(colour[..., k].astype(int) - grey).max() <= 1


def test_extract_patches_does_not_depend_on_the_other_points() -> None:
    image = make_dead_leaves()
    frames = np.zeros((200, 2, 3), np.float32)
    frames[:, 0, 0] = frames[:, 1, 1] = np.linspace(0.5, 9, 200)
    frames[:, :, 2] = np.random.default_rng(1).uniform(0, 240, (200, 2))
    every = extract_patches(image, Keypoints(frames, np.ones(200, np.float32)), PatchSpec())
    for i in (0, 77, 199):
        alone = extract_patches(image, Keypoints(frames[i : i + 1], np.ones(1, np.float32)), PatchSpec())
        np.testing.assert_array_equal(every[i], alone[0])


def test_extract_patches_of_no_keypoints() -> None:
    assert extract_patches(make_dead_leaves(), empty_keypoints(), PatchSpec(31)).shape == (0, 31, 31)
    colour = np.zeros((40, 50, 3), np.uint8)
    assert extract_patches(colour, empty_keypoints(), PatchSpec(31)).shape == (0, 31, 31, 3)


@pytest.mark.parametrize("shape", [(1, 1), (1, 500), (3, 2)])
def test_extract_patches_of_tiny_images(shape: tuple[int, int]) -> None:
    image = np.full(shape, 77, np.uint8)
    patches = extract_patches(image, keypoints_at([[40, 0, 0], [0, 40, 0]]), PatchSpec())
    assert (patches == 77).all()


@pytest.mark.parametrize(
    "image", [np.zeros((4, 4), np.float32), np.zeros((4, 4, 4), np.uint8), np.zeros(4, np.uint8)]
)
def test_extract_patches_refuses_other_images(image: np.ndarray) -> None:
    with pytest.raises(ValueError, match="uint8"):
        extract_patches(image, empty_keypoints(), PatchSpec())


def test_choose_levels_by_hand() -> None:
    pitches = np.array([0.1, 1.0, 1.4, 1.5, 2.8, 2.9, 8.0])
    transforms = np.zeros((7, 2, 3))
    transforms[:, 0, 0], transforms[:, 1, 1] = pitches, 0.05
    assert choose_levels(transforms).tolist() == [0, 0, 0, 1, 1, 2, 3]
