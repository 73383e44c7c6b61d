"""The mix of channels: VLADs side by side, each by the root of its weight, together of unit length."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ckn_scale.core.ckn_model import Ckn, CknLayer, orientation_layer, subpatch_dim
from ckn_scale.core.descriptors.ckn import CknNetwork
from ckn_scale.core.descriptors.network import ProjectedDescriptor
from ckn_scale.core.encoder import Channel, ImageEncoder
from ckn_scale.core.flattening import fit_flattening
from ckn_scale.core.keypoints import Keypoints
from ckn_scale.core.packed_points import pack_codes, pack_frames, unpack_frames
from ckn_scale.core.pca import Projection, fit_projection
from ckn_scale.core.points import PointModel
from ckn_scale.core.preprocessor import Preprocessor
from ckn_scale.core.specs import (
    ChannelSpec,
    CknSpec,
    ImageSpec,
    KeypointSpec,
    LayerSpec,
    PatchSpec,
    ProjectionSpec,
)
from ckn_scale.core.vlad import aggregate_vlad, assign_words

SPEC = CknSpec("grad", (LayerSpec(1, 4, 4), LayerSpec(2, 6, 3)))
FRONT = Preprocessor(ImageSpec(), KeypointSpec(max_keypoints=40), PatchSpec())


def make_channel(seed: int, weight: float) -> Channel:
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((6, subpatch_dim(SPEC, 1)), np.float32)
    layers = (
        orientation_layer(SPEC.layers[0]),
        CknLayer(SPEC.layers[1], 0.5, weights, np.full(6, -1, np.float32)),
    )
    ckn = Ckn(SPEC, 51, layers)
    matrix = rng.standard_normal((8, ckn.dim), np.float32)
    descriptor = ProjectedDescriptor(CknNetwork(ckn), Projection(matrix, np.zeros(8, np.float32)))
    return Channel("grad", descriptor, rng.standard_normal((3, 8), np.float32), weight)


def make_image(seed: int) -> np.ndarray:
    coarse = np.random.default_rng(seed).integers(0, 255, (24, 24, 3), np.uint8)
    return np.kron(coarse, np.ones((8, 8, 1), np.uint8))


def alone(channel: Channel, image: np.ndarray) -> np.ndarray:
    rows = channel.descriptor.describe(FRONT.prepare_pixels(image).patches)
    return aggregate_vlad(rows, channel.centroids, intra_normalise=True)


def test_similarity_of_a_mix_is_the_weighted_mean_of_its_channels():
    channels = (make_channel(0, 1.0), make_channel(1, 0.25))
    encoder = ImageEncoder(FRONT, channels, intra_normalise=True, reduction=None)
    images = [make_image(seed) for seed in (0, 1)]
    first, second = (
        one.vector for one in encoder.encode_prepared([FRONT.prepare_pixels(image) for image in images])
    )
    parts = [alone(channel, images[0]) @ alone(channel, images[1]) for channel in channels]
    assert first @ second == pytest.approx(np.average(parts, weights=[1.0, 0.25]), abs=1e-5)
    assert np.linalg.norm(first) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("method", ["flatten", "pca"])
def test_a_vector_is_the_same_alone_and_in_company(method):
    """The reduction is applied to a group of images at once."""
    channels, images = (make_channel(0, 1.0),), [make_image(seed) for seed in range(20)]
    plain = ImageEncoder(FRONT, channels, intra_normalise=True, reduction=None)
    prepared = [FRONT.prepare_pixels(image) for image in images]
    vlads = np.stack([one.vector for one in plain.describe_prepared(prepared)])
    fit = {
        "flatten": lambda: fit_flattening(vlads, 3),
        "pca": lambda: fit_projection(vlads, ProjectionSpec(dim=5)),
    }
    encoder = ImageEncoder(FRONT, channels, intra_normalise=True, reduction=fit[method]())
    together = np.stack([one.vector for one in encoder.encode_prepared(prepared)])
    np.testing.assert_array_equal(together[7], encoder.encode_prepared(prepared[7:8])[0].vector)
    np.testing.assert_array_equal(together, encoder.reduce(vlads))
    assert encoder.encode_prepared([]) == []


@pytest.mark.parametrize("weight", [0.0, -1.0, 101.0])
def test_weight_that_makes_no_sense_is_refused(weight):
    with pytest.raises(ValueError, match="weight must lie"):
        ChannelSpec(SPEC, weight=weight)


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


def test_pack_codes_of_two_channels_are_their_codes_side_by_side():
    rng = np.random.default_rng(0)
    descriptors, centroids = rng.normal(size=(4, 256)), rng.normal(size=(3, 256))
    words = np.array([0, 2, 1, 2])
    halves = [
        pack_codes(descriptors[:, one], words, centroids[:, one]) for one in np.split(np.arange(256), 2)
    ]
    codes = pack_codes(descriptors, words, centroids)
    assert codes.shape == (4, 32)
    assert np.array_equal(codes, np.hstack(halves))


def make_points(channel: Channel) -> PointModel:
    """Points of eight numbers by a projection of the channel's network, and five words."""
    rng = np.random.default_rng(7)
    matrix = rng.standard_normal((8, channel.descriptor.network.dim), np.float32)
    words = rng.standard_normal((5, 8), np.float32)
    return PointModel({"grad": Projection(matrix, np.zeros(8, np.float32))}, words, max_points=25)


def test_points_are_described_by_a_projection_of_their_own():
    """And the vector is the same with and without them."""
    channel, model = make_channel(0, 1.0), make_points(make_channel(0, 1.0))
    matching = replace(channel, points=channel.descriptor.network.fold(model.projections["grad"]))
    encoder = ImageEncoder(FRONT, (matching,), intra_normalise=True, reduction=None, points=model)
    prepared = [FRONT.prepare_pixels(make_image(seed)) for seed in (0, 1)]
    one = encoder.encode_prepared(prepared)[1]
    raw = channel.descriptor.network.describe(prepared[1].patches[:25])
    expected = model.projections["grad"].apply(raw)
    np.testing.assert_allclose(one.descriptors, expected, atol=1e-5)
    np.testing.assert_array_equal(one.words, assign_words(one.descriptors, model.centroids))
    np.testing.assert_array_equal(one.codes, pack_codes(one.descriptors, one.words, model.centroids))
    assert (one.frames.shape, one.codes.shape) == ((25, 9), (25, 16))
    plain = encoder.encode_prepared(prepared, with_points=False)[1]
    np.testing.assert_array_equal(plain.vector, one.vector)
    assert [len(plain.frames), len(plain.words), len(plain.codes), len(plain.descriptors)] == [0] * 4


def test_an_encoder_without_a_model_of_points_gives_vectors_only():
    encoder = ImageEncoder(FRONT, (make_channel(0, 1.0),), intra_normalise=True, reduction=None)
    one = encoder.encode_prepared([FRONT.prepare_pixels(make_image(0))])[0]
    assert encoder.points is None
    assert one.vector.any()
    assert [len(one.frames), len(one.words), len(one.codes)] == [0] * 3


def test_a_channel_of_few_points_leaves_the_others_out_of_its_vlad_alone():
    """Its network still describes all points that are matched."""
    channel, model = make_channel(0, 1.0), make_points(make_channel(0, 1.0))
    prepared = FRONT.prepare_pixels(make_image(0))
    few = replace(prepared, patches=prepared.patches[:10])
    whole = ImageEncoder(FRONT, (channel,), intra_normalise=True, reduction=None)
    expected = whole.encode_prepared([few])[0].vector
    limited = replace(channel, max_points=10)
    alone = ImageEncoder(FRONT, (limited,), intra_normalise=True, reduction=None)
    np.testing.assert_array_equal(alone.encode_prepared([prepared])[0].vector, expected)
    matching = replace(limited, points=channel.descriptor.network.fold(model.projections["grad"]))
    both = ImageEncoder(FRONT, (matching,), intra_normalise=True, reduction=None, points=model)
    np.testing.assert_array_equal(both.encode_prepared([prepared])[0].vector, expected)
    assert len(both.encode_prepared([prepared])[0].words) == 25


def test_words_of_another_size_than_the_projections_are_refused():
    projections = make_points(make_channel(0, 1.0)).projections
    with pytest.raises(ValueError, match=r"must be \(K, 8\), got \(5, 9\)"):
        PointModel(projections, np.zeros((5, 9), np.float32), 10)
