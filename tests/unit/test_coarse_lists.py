from __future__ import annotations

import numpy as np
import pytest
import torch

from ckn_scale.core import coarse_lists
from ckn_scale.core.coarse_lists import SIGNS_FROM_DIM, choose_codec, learn_lists, open_lists
from ckn_scale.core.kmeans import cluster


def unit_rows(count: int, dim: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def groups(count: int, size: int, dim: int) -> np.ndarray:
    """Rows around `count` centres, a row of each after the other; similarity to their centre 0.45."""
    rows = np.tile(unit_rows(count, dim), (size, 1)) + 2 * unit_rows(count * size, dim, seed=1)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("dim", [64, SIGNS_FROM_DIM])
def test_rows_of_a_group_share_a_list_that_a_new_one_finds(dim):
    rows = groups(6, 40, dim)
    lists = open_lists(learn_lists(rows.__getitem__, len(rows), 6, 3), dim)
    owners = lists.search(rows, 1)[1][:, 0].reshape(40, 6)
    shared = [np.bincount(owners[:, one]).max() for one in range(6)]
    assert np.mean(shared) > 36 if dim > 64 else 25
    new = unit_rows(6, dim) + 2 * unit_rows(6, dim, seed=7)
    commonest = [np.bincount(owners[:, one]).argmax() for one in range(6)]
    assert np.mean(lists.search(new, 1)[1][:, 0] == commonest) > 0.6


def test_reading_blocks_gives_the_clusters_of_all_rows_at_once(monkeypatch):
    rows = unit_rows(500, 32)
    monkeypatch.setattr(coarse_lists, "BLOCK_BYTES", 4 * 32 * 70)
    read = []
    codes = learn_lists(lambda where: read.append(len(where)) or rows[where], 500, 9, seed=2)
    expected = cluster(torch.from_numpy(rows), 9, iterations=coarse_lists.ITERATIONS, seed=2, spherical=True)
    np.testing.assert_allclose(choose_codec(32).decode(codes), expected, atol=1e-3)
    assert max(read) == 70, "never more than a block is in memory"


def test_lists_are_learned_to_the_end_by_the_direction_of_rows_alone():
    """More iterations would hardly help, and lengths that are powers of two change no bit."""
    rows = groups(20, 30, 256)
    codes = learn_lists(rows.__getitem__, len(rows), 20, seed=0)
    longest = cluster(torch.from_numpy(rows), 20, iterations=40, seed=0, spherical=True).numpy()
    learned = choose_codec(256).decode(codes)
    fit, best = ((rows @ one.T).max(axis=1).mean() for one in (learned, longest))
    assert fit > 0.99 * best
    lengths = 2.0 ** (np.arange(len(rows), dtype=np.float32) % 7)
    long = rows * lengths[:, None]
    np.testing.assert_array_equal(learn_lists(long.__getitem__, len(long), 20, seed=0), codes)


def test_the_same_rows_give_the_same_bytes():
    rows = unit_rows(200, SIGNS_FROM_DIM)
    once, again = (learn_lists(rows.__getitem__, 200, 5, 0) for _ in range(2))
    np.testing.assert_array_equal(once, again)
    assert once.shape == (5, SIGNS_FROM_DIM // 8 + 8)
    assert (once != learn_lists(rows.__getitem__, 200, 5, 1)).any()


def test_empty_lists_are_filled_from_what_fits_badly():
    rows = np.concatenate([np.tile(unit_rows(1, 32), (50, 1)), unit_rows(3, 32, seed=5)])
    lists = open_lists(learn_lists(rows.__getitem__, 53, 4, 0), 32)
    assert len(np.unique(lists.search(rows, 1)[1])) == 4


@pytest.mark.parametrize(("rows", "lists"), [(3, 4), (3, 0), (0, 1)])
def test_more_lists_than_rows_are_refused(rows, lists):
    with pytest.raises(ValueError, match=f"{lists} lists need as many rows, got {rows}"):
        learn_lists(unit_rows(3, 32).__getitem__, rows, lists, 0)
