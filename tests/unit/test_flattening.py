import json

import numpy as np
import pytest

from ckn_scale.core.flattening import (
    Flattening,
    fit_flattening,
    keep_as_is,
    learn_flattening,
    supported_directions,
)
from ckn_scale.core.model_parts import ModelPart


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return unit(rng.normal(size=(300, 40)) * np.linspace(3, 0.3, 40) + 0.5).astype(np.float32)


def flatten_slowly(rows, train, count):
    """Centre, scale the first directions to the size of the next one, unit length; in float64."""
    train, rows = train.astype(np.float64), rows.astype(np.float64)
    mean = train.mean(axis=0)
    values, vectors = np.linalg.eigh(np.cov((train - mean).T))
    scales = np.ones(len(values))
    scales[-count:] = np.sqrt(values[-count - 1] / values[-count:])
    return unit((rows - mean) @ vectors * scales @ vectors.T)


@pytest.mark.parametrize("count", [1, 7])
def test_fit_flattening_equals_the_definition(rows, count):
    found = fit_flattening(rows[:200], count).apply(rows)
    np.testing.assert_allclose(found, flatten_slowly(rows, rows[:200], count), atol=2e-5)


def test_the_first_directions_get_the_size_of_the_next(rows):
    fitted = fit_flattening(rows, 5)
    centred = rows - fitted.mean
    sizes = np.std(centred @ fitted.directions.T, axis=0) * fitted.factors
    np.testing.assert_allclose(sizes, sizes[0], rtol=1e-4)


def test_a_row_depends_on_itself_alone_and_not_on_its_length(rows):
    fitted = fit_flattening(rows, 5)
    found = fitted.apply(rows[:50])
    assert np.array_equal(fitted.apply(rows[37:38]), found[37:38])
    assert np.array_equal(fitted.apply(rows[:50][::-1]), found[::-1])
    np.testing.assert_allclose(fitted.apply(8 * rows[:5]), found[:5], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)


def test_zero_rows_stay_zero_and_other_shapes_are_refused(rows):
    fitted = fit_flattening(rows, 5)
    assert not fitted.apply(np.zeros((2, 40), np.float32)).any()
    assert fitted.apply(rows[:0]).shape == (0, 40)
    with pytest.raises(ValueError, match=r"\(N, 40\), got \(3, 7\)"):
        fitted.apply(rows[:3, :7])


def test_arrays_round_trip(rows):
    for fitted in (fit_flattening(rows, 5), keep_as_is(40)):
        arrays, meta = fitted.to_part()
        again = Flattening.from_part(ModelPart(arrays, json.loads(json.dumps(meta))))
        assert np.array_equal(again.apply(rows), fitted.apply(rows))
    with pytest.raises(ValueError, match="a flattening needs arrays of shapes"):
        Flattening.from_part(ModelPart({**arrays, "mean": arrays["mean"][1:]}, meta))


def test_as_many_directions_as_the_images_support():
    assert [supported_directions(n, background=False) for n in (31, 32, 320, 10**6)] == [0, 1, 10, 128]
    assert [supported_directions(n, background=True) for n in (3, 40, 512, 10**6)] == [0, 10, 128, 128]


@pytest.mark.parametrize("count", [0, 1, 7])
def test_few_images_leave_the_vector_as_it_is(rows, count):
    np.testing.assert_allclose(
        learn_flattening(rows[:count], background=False, min_images=8).apply(rows), rows, atol=1e-6
    )


def test_one_image_many_times_leaves_the_vector_as_it_is(rows):
    same = np.repeat(rows[:1], 100, axis=0)
    np.testing.assert_allclose(
        learn_flattening(same, background=False, min_images=8).apply(rows), rows, atol=1e-6
    )


def test_a_middle_sample_is_centred_only(rows):
    fitted = learn_flattening(rows[:24], background=False, min_images=8)
    assert len(fitted.factors) == 0
    assert fitted.mean.any()


class Scenes:
    """Images of things: what is common to all photographs, plus the thing, plus the single view."""

    def __init__(self, light, dim=512):
        self.rng, self.dim, self.light = np.random.default_rng(1), dim, light
        self.common = np.linalg.qr(self.rng.normal(size=(dim, 8)))[0].T

    def draw(self, num_things, views):
        things = np.repeat(self.rng.normal(size=(num_things, self.dim)), views, axis=0)
        noise = 1.6 * self.rng.normal(size=things.shape)
        light = self.light * self.rng.normal(size=(len(things), 8)) @ self.common
        rows = (things + noise) / np.sqrt(self.dim) + light + 0.3 * self.common[0]
        return unit(rows).astype(np.float32), np.repeat(np.arange(num_things), views)


def mean_average_precision(rows, labels):
    """Each row asks for the others of its label."""
    cosines = rows @ rows.T
    np.fill_diagonal(cosines, -np.inf)
    found = []
    for label, order in zip(labels, np.argsort(-cosines, axis=1)[:, :-1], strict=True):
        places = np.flatnonzero(labels[order] == label) + 1
        found.append(np.mean(np.arange(1, len(places) + 1) / places))
    return np.mean(found)


@pytest.mark.parametrize("background", [False, True])
def test_flattening_helps_images_that_it_was_not_learned_on(background):
    scenes = Scenes(light=0.5)
    learned, (tested, labels) = scenes.draw(160, 2)[0], scenes.draw(100, 3)
    before = mean_average_precision(tested, labels)
    after = mean_average_precision(
        learn_flattening(learned, background=background, min_images=8).apply(tested), labels
    )
    assert after > before + 0.3


def test_a_collection_of_few_places_is_not_erased_by_itself():
    """Five places are most of the images: with equal weights their directions are the first to go."""
    scenes = Scenes(light=0.2)
    (places, where), (others, which) = scenes.draw(5, 60), scenes.draw(200, 2)
    rows, labels = np.concatenate([places, others]), np.concatenate([where, which + 5])
    before = mean_average_precision(rows, labels)
    weighted = learn_flattening(rows, background=False, min_images=8).apply(rows)
    alike = fit_flattening(rows, supported_directions(len(rows), background=False)).apply(rows)
    assert mean_average_precision(weighted, labels) > before
    assert mean_average_precision(alike, labels) < before - 0.1
