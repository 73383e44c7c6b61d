"""Pairs of stored vectors that are alike, by definition; groups of them; the same however rows are cut."""

from __future__ import annotations

import numpy as np
import pytest

from ckn_scale.core import copies
from ckn_scale.core.copies import (
    SAME_SCORE,
    ScoredPairs,
    find_components,
    find_levels,
    find_pairs,
    keep_nearest,
    restore_rows,
    take_rows,
)
from ckn_scale.core.vector_codes import SignCodec
from ckn_scale.core.vector_index import build_exact, build_signs

DIM = 256


def units(vectors):
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def make_index(kind, vectors, ids):
    if kind == "exact":
        return build_exact(vectors, ids)
    return build_signs(SignCodec(DIM).encode(vectors), ids, DIM)


@pytest.fixture
def planted():
    """60 unrelated vectors; 7 is 3 again, 20 and 45 are near 10, 50 is nearer to 20 than to 10."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((60, DIM))
    vectors[7] = vectors[3]
    vectors[20] = vectors[10] + 0.4 * rng.standard_normal(DIM)
    vectors[45] = vectors[10] + 0.3 * rng.standard_normal(DIM)
    vectors[50] = vectors[20] + 0.3 * rng.standard_normal(DIM)
    return units(vectors)


def as_set(pairs):
    return set(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True))


@pytest.mark.parametrize("kind", ["exact", "signs"])
def test_find_pairs_is_the_definition(planted, kind, monkeypatch):
    monkeypatch.setattr(copies, "BLOCK_ROWS", 16)
    index = make_index(kind, planted, np.arange(60) * 2)
    rows = take_rows(index, np.arange(60))
    levels = find_levels(rows, rows, 6.0)
    stored = units(index.vectors_at(np.arange(60)).astype(np.float64))
    scores = stored.astype(np.float64) @ stored.T.astype(np.float64)
    for row in range(60):
        others = np.delete(scores[row], row)
        spread = 1.4826 * np.median(np.abs(others - np.median(others)))
        assert levels[row] == pytest.approx(min(np.median(others) + 6 * spread, SAME_SCORE), abs=1e-3)
    found = find_pairs(rows, levels, rows, levels, 32)
    expected = {(6, 14), (20, 40), (20, 90), (20, 100), (40, 90), (40, 100), (90, 100)}
    assert as_set(found) == expected
    for first, second, score in zip(found.first, found.second, found.scores, strict=True):
        assert score == pytest.approx(scores[first // 2, second // 2], abs=1e-5)
    assert found.scores[0] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("kind", ["exact", "signs"])
@pytest.mark.parametrize("cut", [1, 21, 59])
def test_find_pairs_is_the_same_however_rows_are_cut(planted, kind, cut):
    def rows_of(start, end):
        return take_rows(make_index(kind, planted[start:end], np.arange(start, end)), np.arange(end - start))

    whole, left, right = rows_of(0, 60), rows_of(0, cut), rows_of(cut, 60)
    levels = {part: find_levels(part, whole, 6.0) for part in (whole, left, right)}
    wanted = find_pairs(whole, levels[whole], whole, levels[whole], 2)
    parts = [
        find_pairs(one, levels[one], other, levels[other], 2)
        for one, other in ((left, left), (left, right), (right, right))
    ]
    joined = (np.concatenate([getattr(part, name) for part in parts]) for name in vars(wanted))
    merged = keep_nearest(ScoredPairs(*joined), 2)
    for name, values in vars(wanted).items():
        np.testing.assert_array_equal(getattr(merged, name), values)
    turned = find_pairs(right, levels[right], left, levels[left], 2)
    assert as_set(turned) == as_set(parts[1])


def test_restore_rows_gives_back_what_was_taken(planted):
    for kind in ("exact", "signs"):
        rows = take_rows(make_index(kind, planted, np.arange(60)), np.array([3, 7, 30]))
        again = restore_rows(rows.ids, rows.data)
        np.testing.assert_array_equal(rows.compare(again), again.compare(rows))
        assert find_pairs(again, np.full(3, 0.9), rows, np.full(3, 0.9), 5).first.tolist()[-1] == 3


def test_a_level_of_one_or_of_equal_images_leaves_the_same_vector_a_copy():
    same = units(np.ones((3, DIM)))
    rows = take_rows(build_exact(same, np.arange(3)), np.arange(3))
    assert find_levels(rows, rows, 6.0).max() <= SAME_SCORE
    assert as_set(find_pairs(rows, find_levels(rows, rows, 6.0), rows, np.ones(3), 5)) == {
        (0, 1),
        (0, 2),
        (1, 2),
    }
    one = take_rows(build_exact(same[:1], np.arange(1)), np.arange(1))
    assert find_levels(one, one, 6.0).tolist() == [SAME_SCORE]
    assert len(find_pairs(one, np.zeros(1), one, np.zeros(1), 5)) == 0
    none = take_rows(build_exact(same[:1], np.arange(1)), np.empty(0, np.int64))
    assert len(find_pairs(none, np.zeros(0), one, np.zeros(1), 5)) == 0


def test_keep_nearest_keeps_the_best_of_either_image_and_equal_ones_by_id():
    pairs = ScoredPairs(
        np.array([0, 0, 0, 1, 2]), np.array([1, 2, 3, 2, 3]), np.array([0.5, 0.5, 0.9, 0.4, 0.5])
    )
    # Image 0: 3; image 1: 0; image 2: 0 before 3 at equal scores; image 3: 0.
    assert as_set(keep_nearest(pairs, 1)) == {(0, 1), (0, 2), (0, 3)}
    assert as_set(keep_nearest(pairs, 5)) == as_set(pairs)
    assert len(keep_nearest(pairs.take(np.empty(0, np.int64)), 3)) == 0


def test_find_components_names_a_group_by_its_smallest_image():
    first, second = np.array([5, 3, 9, 8, 2]), np.array([9, 8, 7, 2, 3])
    ids, groups = find_components(first, second)
    assert dict(zip(ids.tolist(), groups.tolist(), strict=True)) == {2: 2, 3: 2, 8: 2, 5: 5, 7: 5, 9: 5}
    assert find_components(np.empty(0, np.int64), np.empty(0, np.int64))[0].tolist() == []


def test_find_components_of_a_long_chain_in_any_order():
    order = np.random.default_rng(1).permutation(5000)
    ids, groups = find_components(order[:-1], order[1:])
    assert (len(ids), set(groups.tolist())) == (5000, {0})
