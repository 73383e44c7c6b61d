"""The models that points are matched by: a projection to a fixed dimension, words by the sample."""

from __future__ import annotations

import numpy as np
import pytest

from ckn_scale.core.pca import fit_projection
from ckn_scale.core.points import fit_point_projection, fit_point_words
from ckn_scale.core.specs import PointsSpec, ProjectionSpec


@pytest.mark.parametrize(
    ("num_images", "num_descriptors", "words"),
    [
        (20, 16_000, 128),
        (100, 60_000, 1024),
        (1_500, 60_000, 4096),
        (1_500, 200_000, 4096),  # no more words than images above 4,096
        (8_191, 100_000, 4096),
        (20_000, 60_000, 4096),
        (20_000, 100_000, 8192),  # a full sample: a large collection
        (20_000, 200_000, 16_384),
        (100, 3_000, 128),  # images with few points
        (1, 30, 2),
        (1, 3, 1),
    ],
)
def test_words_are_as_many_as_the_sample_supports(num_images, num_descriptors, words):
    assert PointsSpec().count_words(num_images, num_descriptors) == words


def test_words_are_limited_by_settings():
    assert PointsSpec(num_words=65_536).count_words(20_000, 10**6) == 16_384, "too few images"
    assert PointsSpec(num_words=65_536).count_words(70_000, 10**6) == 65_536
    assert PointsSpec(num_words=1000).count_words(20_000, 60_000) == 512, "a power of two"


def test_a_point_takes_27_bytes_and_16_more_for_each_further_channel():
    assert PointsSpec().bytes_per_point == 27
    assert PointsSpec(channels=("grad", "white")).bytes_per_point == 43
    assert PointsSpec(dim=256).bytes_per_point == 43


def test_fit_point_words_are_centres_of_the_rows():
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((4, 16), np.float32) * 10
    rows = np.repeat(centres, 40, axis=0) + rng.normal(0, 0.1, (160, 16)).astype(np.float32)
    words = fit_point_words(rows, 100, PointsSpec(num_words=4))
    distances = np.linalg.norm(words[:, None] - centres, axis=2)
    assert distances.min(axis=0).max() < 0.1


def test_fit_point_projection_has_zeros_where_the_data_have_no_direction():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((200, 5)) @ rng.standard_normal((5, 40))
    spec = PointsSpec(dim=16, whitening=0.75)
    projected = fit_point_projection(rows, spec).apply(rows)
    shorter = fit_projection(rows, ProjectionSpec(16, 0.75)).apply(rows)
    assert projected.shape == (200, 16)
    assert shorter.shape[1] < 16
    np.testing.assert_allclose(projected[:, : shorter.shape[1]], shorter, atol=1e-6)
    assert not projected[:, shorter.shape[1] :].any()
