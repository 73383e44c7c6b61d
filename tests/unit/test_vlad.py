from __future__ import annotations

import numpy as np
import pytest

from ckn_scale.core.vlad import aggregate_vlad, assign_words, fit_codebook, sum_residuals

WORDS = np.array([[0, 0], [10, 0], [0, 10]], np.float32)


def test_sum_residuals_by_hand():
    rows = np.array([[1, 0], [1, 2], [9, 0]], np.float32)
    np.testing.assert_allclose(sum_residuals(rows, WORDS), [[2, 2], [-1, 0], [0, 0]])


def test_aggregate_vlad_by_hand():
    rows = np.array([[4, 0], [10, 9]], np.float32)
    expected = np.array([2, 0, 0, 3, 0, 0]) / np.sqrt(13)
    found = aggregate_vlad(rows, WORDS, intra_normalise=False)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_aggregate_vlad_keeps_signs():
    rows = np.array([[-4, 4]], np.float32)
    expected = np.array([-1, 1, 0, 0, 0, 0]) / np.sqrt(2)
    np.testing.assert_allclose(aggregate_vlad(rows, WORDS, intra_normalise=False), expected, rtol=1e-6)


def test_aggregate_vlad_with_unit_blocks():
    rows = np.array([[4, 0], [10, 9]], np.float32)
    found = aggregate_vlad(rows, WORDS, intra_normalise=True)
    np.testing.assert_allclose(found, np.array([1, 0, 0, 1, 0, 0]) / np.sqrt(2), rtol=1e-6)


def test_aggregate_vlad_has_unit_length_and_ignores_order():
    rows = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    found = aggregate_vlad(rows, WORDS, intra_normalise=True)
    assert np.linalg.norm(found) == pytest.approx(1, rel=1e-5)
    np.testing.assert_allclose(aggregate_vlad(rows[::-1], WORDS, intra_normalise=True), found, atol=1e-6)


@pytest.mark.parametrize("intra", [False, True])
def test_aggregate_vlad_of_nothing_is_zero(intra):
    found = aggregate_vlad(np.empty((0, 2), np.float32), WORDS, intra_normalise=intra)
    assert found.shape == (6,)
    assert not found.any()


def test_aggregate_vlad_does_not_count_blank_patches():
    rows = np.array([[4, 1], [10, 9]], np.float32)
    padded = np.concatenate([rows, np.zeros((5, 2), np.float32)])
    words = WORDS + 1
    assert np.array_equal(
        aggregate_vlad(padded, words, intra_normalise=False),
        aggregate_vlad(rows, words, intra_normalise=False),
    )


def test_aggregate_vlad_refuses_other_dims():
    with pytest.raises(ValueError, match=r"\(N, 2\), got \(3, 4\)"):
        aggregate_vlad(np.ones((3, 4), np.float32), WORDS, intra_normalise=True)


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    centres = np.array([[0, 0], [10, 0], [0, 10], [10, 10]], np.float32)
    return (np.repeat(centres, 100, axis=0) + rng.normal(size=(400, 2))).astype(np.float32)


def test_fit_codebook_finds_separate_groups(rows):
    words = fit_codebook(rows, 4, iterations=10, seed=1)
    assert words.dtype == np.float32
    found = sorted(np.round(words / 10).astype(int).tolist())
    assert found == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_fit_codebook_words_are_means_of_their_rows(rows):
    words = fit_codebook(rows, 7, iterations=60, seed=0)
    assigned = assign_words(rows, words)
    means = np.array([rows[assigned == word].mean(axis=0) for word in range(7)])
    np.testing.assert_allclose(words, means, atol=1e-4)


def test_fit_codebook_is_deterministic_by_seed(rows):
    assert np.array_equal(fit_codebook(rows, 8, seed=3), fit_codebook(rows, 8, seed=3))
    assert not np.array_equal(fit_codebook(rows, 8, seed=3), fit_codebook(rows, 8, seed=4))


def test_fit_codebook_leaves_no_word_empty():
    rows = np.concatenate([np.zeros((100, 2)), [[1, 0], [0, 1], [5, 5]]]).astype(np.float32)
    words = fit_codebook(rows, 4, iterations=10, seed=0)
    assert len(np.unique(assign_words(rows, words))) == 4


def test_fit_codebook_refuses_too_few_rows(rows):
    with pytest.raises(ValueError, match=r"8 words need as many descriptors \(N, D\), got \(5, 2\)"):
        fit_codebook(rows[:5], 8)


def test_assign_words_by_hand():
    words = np.array([[0, 0], [1, 0], [4, 4]], np.float32)
    rows = np.array([[0.4, 0], [0.6, 0], [9, 9]], np.float32)
    assert assign_words(rows, words).tolist() == [0, 1, 2]
    assert assign_words(rows, words).dtype == np.int64


def test_assign_words_of_nothing_and_of_other_shapes():
    words = np.zeros((3, 2), np.float32)
    assert assign_words(np.empty((0, 2), np.float32), words).shape == (0,)
    with pytest.raises(ValueError, match=r"\(N, 2\), got \(4, 5\)"):
        assign_words(np.zeros((4, 5), np.float32), words)
