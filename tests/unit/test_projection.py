import json

import numpy as np
import pytest

from ckn_scale.core import pca
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.pca import Projection, fit_projection
from ckn_scale.core.specs import ProjectionSpec


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    scales = np.linspace(2, 0.2, 12)
    return (rng.normal(size=(400, 12)) * scales + 0.5).astype(np.float32)


def project_slowly(rows, train, dim, whitening):
    """L2, centre, project, divide by singular value^γ, L2: each step on its own, in float64."""
    train = train.astype(np.float64) / np.linalg.norm(train, axis=1, keepdims=True)
    mean = train.mean(axis=0)
    _, singular, directions = np.linalg.svd(train - mean, full_matrices=False)
    unit = rows.astype(np.float64) / np.linalg.norm(rows, axis=1, keepdims=True)
    projected = (unit - mean) @ directions[:dim].T / singular[:dim] ** whitening
    return projected / np.linalg.norm(projected, axis=1, keepdims=True)


@pytest.mark.parametrize("whitening", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [400, 8])
def test_fit_projection_equals_the_definition(rows, whitening, count):
    """400 rows go by moments (12 × 12), 8 rows by the Gram matrix (8 × 8)."""
    projection = fit_projection(rows[:count], ProjectionSpec(dim=5, whitening=whitening))
    expected = project_slowly(rows, rows[:count], 5, whitening)
    found = projection.apply(rows)
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=2e-4)
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=2e-4)


def test_full_whitening_gives_equal_variances(rows):
    projection = fit_projection(rows, ProjectionSpec(dim=6, whitening=1.0))
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    projected = unit @ projection.matrix.T - projection.offset
    covariance = np.cov(projected.T)
    np.testing.assert_allclose(covariance, np.eye(6) * covariance[0, 0], atol=1e-3 * covariance[0, 0])


def test_apply_gives_unit_rows_and_keeps_zeros(rows):
    projection = fit_projection(rows, ProjectionSpec(dim=4))
    found = projection.apply(np.concatenate([rows[:3], np.zeros((1, 12), np.float32)]))
    np.testing.assert_allclose(np.linalg.norm(found[:3], axis=1), 1, rtol=1e-5)
    assert not found[3].any()


def test_apply_ignores_the_length_of_a_row(rows):
    projection = fit_projection(rows, ProjectionSpec(dim=4))
    np.testing.assert_allclose(projection.apply(8 * rows[:5]), projection.apply(rows[:5]), atol=1e-5)


def test_apply_to_a_row_depends_on_that_row_alone(rows):
    projection = fit_projection(rows, ProjectionSpec(dim=4))
    found = projection.apply(rows[:50])
    assert np.array_equal(projection.apply(rows[37:38]), found[37:38])
    assert np.array_equal(projection.apply(rows[:50][::-1]), found[::-1])


def test_apply_to_nothing_and_to_other_shapes(rows):
    projection = fit_projection(rows, ProjectionSpec(dim=4))
    assert projection.apply(rows[:0]).shape == (0, 4)
    with pytest.raises(ValueError, match=r"\(N, 12\), got \(3, 7\)"):
        projection.apply(rows[:3, :7])


def test_dim_falls_to_the_rank(rows):
    assert fit_projection(rows[:6], ProjectionSpec(dim=100)).dim == 5
    assert fit_projection(np.repeat(rows[:3], 50, axis=0), ProjectionSpec(dim=100)).dim == 2


def test_zero_rows_are_left_out_of_the_fit(rows):
    padded = np.concatenate([rows, np.zeros((10, 12), np.float32)])
    spec = ProjectionSpec(dim=4)
    assert np.array_equal(fit_projection(padded, spec).matrix, fit_projection(rows, spec).matrix)


def test_fit_leaves_the_callers_rows_alone(rows):
    before = rows.copy()
    fit_projection(rows, ProjectionSpec(dim=4))
    np.testing.assert_array_equal(rows, before)


def test_large_matrices_are_decomposed_iteratively(monkeypatch):
    rng = np.random.default_rng(0)
    rows = (rng.normal(size=(500, 300)) * np.arange(1, 301) ** -0.8).astype(np.float32)
    exact = fit_projection(rows, ProjectionSpec(dim=32)).apply(rows[:100])
    monkeypatch.setattr(pca, "_EXACT_SIZE", 100)
    found = fit_projection(rows, ProjectionSpec(dim=32)).apply(rows[:100])
    np.testing.assert_allclose(found @ found.T, exact @ exact.T, atol=0.005)


def test_arrays_round_trip(rows):
    projection = fit_projection(rows, ProjectionSpec(dim=4))
    arrays, meta = projection.to_part()
    again = Projection.from_part(ModelPart(arrays, json.loads(json.dumps(meta))))
    assert np.array_equal(again.apply(rows), projection.apply(rows))
    with pytest.raises(ValueError, match=r"\(4, 12\) needs matrix and offset"):
        Projection.from_part(ModelPart({**arrays, "offset": arrays["offset"][1:]}, meta))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.ones((5, 3), np.float32), "all rows are equal"),
        (np.zeros((5, 3), np.float32), "at least two rows that are not zero, got 0"),
        (np.ones(5, np.float32), r"must be \(N, D\), got \(5,\)"),
    ],
)
def test_fit_projection_refuses(bad, message):
    with pytest.raises(ValueError, match=message):
        fit_projection(bad, ProjectionSpec(dim=2))
