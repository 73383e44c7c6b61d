"""Database-side augmentation against its definition, in one index and in several."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from ckn_scale.core import neighbour_sums
from ckn_scale.core.neighbour_sums import Part, augment_index, find_neighbours
from ckn_scale.core.topk import NO_ID, RowMask
from ckn_scale.core.vector_codes import make_codec
from ckn_scale.core.vector_index import build_index

DIM = 256


def make_vectors(count, seed=0):
    """Some groups of images that are alike, each image of unit length."""
    numbers = np.random.default_rng(seed)
    groups = numbers.standard_normal((-(-count // 4), DIM)).repeat(4, axis=0)[:count]
    vectors = groups + 0.8 * numbers.standard_normal((count, DIM))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def make_index(vectors, ids, stored):
    codec = make_codec(stored, DIM)
    return build_index(codec, codec.encode(vectors), ids)


def as_part(index, allowed=None):
    return lambda: Part(index, None if allowed is None else RowMask(allowed))


def augment_plainly(vectors, scores, count, allowed):
    """As it is defined: in double precision, one image after the other."""
    unit = vectors.astype(np.float64) / np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    augmented = np.empty_like(unit)
    for row, own in enumerate(unit):
        others = [
            other for other in np.argsort(-scores[row], kind="stable") if other != row and allowed[other]
        ]
        total = own + sum(max(scores[row, other], 0) ** 0.5 * unit[other] for other in others[:count])
        augmented[row] = total / np.linalg.norm(total)
    return augmented


@pytest.mark.parametrize("count", [1, 2, 7, 20])
def test_exact_rows_are_what_the_definition_says(count):
    ids, allowed = np.arange(10, 50), np.arange(40) % 5 != 0
    index = make_index(make_vectors(40), ids, "float16")
    stored = index.vectors_at(np.arange(40))
    unit = stored.astype(np.float64) / np.linalg.norm(stored, axis=1, keepdims=True)
    expected = augment_plainly(stored, unit @ unit.T, count, allowed)
    augmented = augment_index(index, [as_part(index, allowed)], count, make_codec("float16", DIM))
    assert np.array_equal(augmented.ids, ids)
    np.testing.assert_allclose(augmented.vectors_at(np.arange(40)), expected, atol=2e-4)
    assert not np.allclose(augmented.vectors_at(np.arange(40)), stored, atol=1e-2), "neighbours change rows"


def test_signs_are_those_of_the_sum():
    index, codec = make_index(make_vectors(40), np.arange(40), "signs"), make_codec("signs", DIM)
    stored = index.vectors_at(np.arange(40))
    unit = (stored / np.linalg.norm(stored, axis=1, keepdims=True)).astype(np.float32)
    similarity, ids = index.search(unit, 40)
    scores = np.take_along_axis(similarity, np.argsort(ids, axis=1), axis=1)
    expected = codec.encode(augment_plainly(stored, scores, 5, np.ones(40, bool)).astype(np.float32))
    augmented = augment_index(index, [as_part(index)], 5, codec)
    assert np.array_equal(augmented.codes[:, :-8], expected[:, :-8])
    assert not np.array_equal(augmented.codes, index.codes), "neighbours change rows"


@pytest.mark.parametrize("stored", ["float16", "signs"])
def test_it_is_the_same_however_rows_are_cut_into_indexes_and_blocks(stored, monkeypatch):
    vectors, ids, allowed = make_vectors(60), np.arange(60), np.arange(60) % 7 != 3
    vectors[20] = vectors[41] = vectors[3]  # equal ones in all of the parts
    codec = make_codec(stored, DIM)
    whole = augment_index(
        make_index(vectors, ids, stored), [as_part(make_index(vectors, ids, stored), allowed)], 3, codec
    )
    cuts = [slice(0, 17), slice(17, 18), slice(18, 60)]
    parts = [make_index(vectors[cut], ids[cut], stored) for cut in cuts]
    opened = [as_part(part, allowed[cut]) for part, cut in zip(parts, cuts, strict=True)]
    monkeypatch.setattr(neighbour_sums, "BLOCK_BYTES", 7 * 4 * DIM * 5)
    cut_up = [augment_index(part, opened, 3, codec).vectors_at(np.arange(part.rows)) for part in parts]
    assert np.array_equal(np.concatenate(cut_up), whole.vectors_at(np.arange(60)))


def test_an_image_is_not_its_own_neighbour_and_equal_ones_come_by_id():
    vectors = make_vectors(6)
    vectors[[1, 4, 5]] = vectors[0]
    index = make_index(vectors, np.arange(6), "float16")
    find = partial(find_neighbours, parts=[as_part(index)], count=2)
    assert find(vectors[[0]], np.array([0]))[1].tolist() == [[1, 4]]
    assert find(vectors[[5]], np.array([5]))[1].tolist() == [[0, 1]]


def test_where_there_are_no_others_a_row_stays():
    index, codec = make_index(make_vectors(1), np.array([3]), "signs"), make_codec("signs", DIM)
    found = find_neighbours(make_vectors(1), np.array([3]), [as_part(index)], 2)
    assert found[1].tolist() == [[NO_ID]]
    augmented = augment_index(index, [as_part(index)], 2, codec)
    assert np.array_equal(augmented.codes[:, :-8], index.codes[:, :-8])
