import numpy as np
import pytest

from ckn_scale.core.vlad import assign_words, fit_codebook


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
