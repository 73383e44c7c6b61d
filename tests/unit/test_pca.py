from __future__ import annotations

import json
import weakref

import numpy as np
import pytest
import torch

from ckn_scale.core import pca
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.pca import (
    Projection,
    compare_rows,
    find_principal,
    fit_projection,
    largest_eigenpairs,
    split_columns,
    weigh_by_similarity,
)
from ckn_scale.core.specs import ProjectionSpec


def unit_rows(count, dim, seed=0, decay=0.5):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, dim)) * np.arange(1, dim + 1) ** -decay + 0.05
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def decompose_slowly(rows, weights):
    """Mean, directions and singular values of the weighted covariance, in float64."""
    weights = weights / weights.sum()
    mean = weights @ rows
    values, vectors = np.linalg.eigh((rows - mean).T @ ((rows - mean) * weights[:, None]))
    return mean, vectors.T[::-1], np.sqrt(np.maximum(values[::-1], 0))


@pytest.mark.parametrize("exact_size", [10, 10_000])
def test_find_principal_equals_the_definition(monkeypatch, exact_size):
    """By subspace iteration, and by eigh."""
    monkeypatch.setattr(pca, "_EXACT_SIZE", exact_size)
    rows, weights = unit_rows(700, 90), np.random.default_rng(1).uniform(0.1, 1, 700)
    columns = split_columns(rows.astype(np.float32), 40)
    found = find_principal(columns, *compare_rows(columns), 12, weights)
    mean, directions, singular = decompose_slowly(rows, weights)
    np.testing.assert_allclose(found.mean, mean, atol=1e-6)
    np.testing.assert_allclose(found.singular, singular[:13], rtol=1e-4)
    np.testing.assert_allclose(np.abs(np.sum(found.directions * directions[:12], axis=1)), 1, atol=1e-4)


def test_length_does_not_count_and_zero_rows_are_left_out():
    rows = unit_rows(60, 20).astype(np.float32)
    scaled = np.concatenate([rows * np.linspace(0.5, 8, 60)[:, None], np.zeros((7, 20))]).astype(np.float32)
    weights, padded = (weigh_by_similarity(compare_rows([part])[0]) for part in (rows, scaled))
    np.testing.assert_allclose(padded, [*weights, *np.zeros(7)])
    alike = find_principal([scaled], *compare_rows([scaled]), 5)
    np.testing.assert_allclose(alike.mean, rows.mean(axis=0), atol=1e-6)


def test_columns_and_their_float_type_do_not_matter():
    rows = unit_rows(300, 64).astype(np.float16)
    whole = find_principal([rows], *compare_rows([rows]), 8)
    parts = split_columns(rows.astype(np.float32), 10)
    cut = find_principal(parts, *compare_rows(parts), 8)
    np.testing.assert_allclose(cut.directions, whole.directions, atol=1e-4)


def test_subspace_iteration_ends_by_its_residual(monkeypatch):
    """A spectrum that falls slowly: eight rounds, as it once was, leave the last directions unconverged."""
    monkeypatch.setattr(pca, "_EXACT_SIZE", 10)
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(600, 600)))[0]
    values = np.arange(1, 601) ** -0.3
    matrix = torch.from_numpy((basis * values) @ basis.T).float()
    found, vectors = largest_eigenpairs(matrix, 24)
    residuals = torch.linalg.vector_norm(matrix.double() @ vectors - vectors * found, dim=0)
    assert (residuals <= 1.2e-3 * found).all()
    np.testing.assert_allclose(found, values[:24], rtol=1e-4)
    monkeypatch.setattr(pca, "_MAX_ROUNDS", 8)
    with pytest.raises(ValueError, match="did not converge"):
        largest_eigenpairs(matrix, 24)


def test_rows_with_nan_are_refused_and_do_not_hang(monkeypatch):
    monkeypatch.setattr(pca, "_EXACT_SIZE", 10)
    with pytest.raises((ValueError, RuntimeError)):
        largest_eigenpairs(torch.full((600, 600), torch.nan), 8)


def test_the_result_is_the_same_each_time():
    columns = split_columns(unit_rows(900, 70).astype(np.float32))
    first, again = (find_principal(columns, *compare_rows(columns), 9) for _ in range(2))
    assert np.array_equal(first.directions, again.directions)


def test_fewer_directions_where_the_rank_is_less():
    rows = unit_rows(30, 20)[np.arange(90) % 4].astype(np.float32)
    found = find_principal([rows], *compare_rows([rows]), 10)
    assert found.directions.shape == (3, 20)
    assert len(found.singular) == 3


def test_similar_images_weigh_less():
    rng = np.random.default_rng(0)
    apart = rng.normal(size=(400, 200))
    place = rng.normal(size=200)[None] + 0.5 * rng.normal(size=(40, 200))
    weights = weigh_by_similarity(compare_rows([np.concatenate([apart, place]).astype(np.float32)])[0])
    np.testing.assert_allclose(weights[400:], 1 / np.sqrt(40), rtol=0.1)
    assert weights[:400].mean() > 0.6


def test_two_rows_at_least():
    for bad in (np.zeros((5, 3)), np.eye(3)[:1]):
        with pytest.raises(ValueError, match="at least two rows that are not zero"):
            find_principal([bad.astype(np.float32)], *compare_rows([bad]), 1)


class BlocksOnDemand:
    """Makes a block when it is asked for, and knows how many are still held."""

    def __init__(self, rows, width):
        self.rows, self.width, self.made = rows, width, []
        self.most_held = 0

    def __len__(self):
        return self.rows.shape[1] // self.width

    def __getitem__(self, position):
        if position >= len(self):
            raise IndexError(position)
        block = self.rows[:, position * self.width : (position + 1) * self.width].copy()
        self.made.append(weakref.ref(block))
        self.most_held = max(self.most_held, sum(one() is not None for one in self.made))
        return block


def test_blocks_are_read_twice_and_never_held_together():
    blocks = BlocksOnDemand(unit_rows(50, 200).astype(np.float16), 10)
    found = find_principal(blocks, *compare_rows(blocks), 3)
    assert found.directions.shape == (3, 200)
    assert len(blocks.made) <= 2 * 20 + 1
    assert blocks.most_held <= 2


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
