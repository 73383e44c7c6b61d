from __future__ import annotations

import numpy as np
import pytest

from ckn_scale.core.keypoints import Keypoints
from ckn_scale.core.local_codes import pack_codes, pack_frames, unpack_frames


def make_keypoints(count: int, seed: int = 0) -> Keypoints:
    rng = np.random.default_rng(seed)
    angle, scale, stretch = (
        rng.uniform(0, 2 * np.pi, count),
        rng.uniform(1, 60, count),
        rng.uniform(0.5, 2, count),
    )
    turn = np.stack([np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)], 1).reshape(-1, 2, 2)
    shape = np.zeros((count, 2, 2))
    shape[:, 0, 0], shape[:, 1, 0], shape[:, 1, 1] = stretch, rng.uniform(-1, 1, count), 1 / stretch
    frames = np.zeros((count, 2, 3), np.float32)
    frames[:, :, :2] = scale[:, None, None] * shape @ turn
    frames[:, :, 2] = rng.uniform(0, 1, (count, 2)) * (639, 479)
    return Keypoints(frames, np.linspace(1, 0, count, dtype=np.float32))


def test_pack_frames_takes_nine_bytes_a_point():
    assert pack_frames(make_keypoints(7), 640, 480).shape == (7, 9)
    assert pack_frames(make_keypoints(7), 640, 480).dtype == np.uint8


def test_unpack_frames_gives_the_frames_back_within_quantisation():
    keypoints = make_keypoints(500)
    restored = unpack_frames(pack_frames(keypoints, 640, 480), 640, 480)
    centre_error = np.abs(restored.frames[:, :, 2] - keypoints.frames[:, :, 2])
    linear, linear_back = keypoints.frames[:, :, :2], restored.frames[:, :, :2]
    relative = np.linalg.norm(linear - linear_back, axis=(1, 2)) / np.linalg.norm(linear, axis=(1, 2))
    assert centre_error.max() < 0.01
    assert relative.max() < 0.03


def test_pack_frames_of_nothing_is_empty():
    assert pack_frames(make_keypoints(0), 640, 480).shape == (0, 9)
    assert len(unpack_frames(np.zeros((0, 9), np.uint8), 640, 480)) == 0


def test_pack_frames_keeps_a_point_outside_the_image_at_its_border():
    keypoints = make_keypoints(1)
    keypoints.frames[0, :, 2] = (-5, 1000)
    assert unpack_frames(pack_frames(keypoints, 640, 480), 640, 480).frames[0, :, 2] == pytest.approx(
        [0, 479]
    )


def test_pack_codes_are_the_signs_of_the_residual():
    centroids = np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]], np.float32)
    descriptors = np.array([[0.5, -0.5, 0.5], [0.5, 1.5, 0.5]], np.float32)
    codes = pack_codes(descriptors, np.array([0, 1]), centroids)
    assert codes.shape == (2, 16)
    assert codes[:, 0].tolist() == [0b10100000, 0b01000000]
    assert not codes[:, 1:].any()


def test_pack_codes_leaves_out_dimensions_beyond_128():
    rng = np.random.default_rng(0)
    descriptors, centroids = rng.normal(size=(4, 200)).astype(np.float32), np.zeros((1, 200), np.float32)
    words = np.zeros(4, int)
    assert np.array_equal(
        pack_codes(descriptors, words, centroids), pack_codes(descriptors[:, :128], words, centroids[:, :128])
    )
