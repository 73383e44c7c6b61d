from __future__ import annotations

import numpy as np
import pytest

from ckn_scale.core.coarse_lists import learn_lists
from ckn_scale.core.short_codes import (
    CodeScan,
    Quantiser,
    count_pieces,
    learn_quantiser,
)
from ckn_scale.core.topk import RowMask

DIM = 96


def unit_rows(count: int, seed: int = 0, dim: int = DIM) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def learn(rows: np.ndarray, lists: int = 0) -> Quantiser:
    coarse = learn_lists(rows[:400].__getitem__, 400, lists, 3) if lists else None
    return learn_quantiser(rows[:400], seed=3, coarse=coarse)


def scan_of(quantiser: Quantiser, rows: np.ndarray, cuts: int = 1, probes: int = 99) -> CodeScan:
    parts = np.array_split(rows, cuts)
    codes, lists = [quantiser.encode(part) for part in parts], [quantiser.assign(part) for part in parts]
    return CodeScan(quantiser, codes, lists, probes)


ROWS = np.concatenate([unit_rows(900), np.repeat(unit_rows(4, seed=1), 25, axis=0)])
FLAT, LISTED = learn(ROWS), learn(ROWS, lists=8)


def test_a_piece_is_the_nearest_of_its_centroids():
    codes = FLAT.encode(ROWS[:50])
    numbers = np.stack([codes & 15, codes >> 4], axis=2).reshape(50, -1)
    pieces = ROWS[:50].reshape(50, count_pieces(DIM), -1)
    distances = np.square(pieces[:, :, None] - FLAT.centroids[None]).sum(axis=3)
    np.testing.assert_array_equal(numbers, distances.argmin(axis=2))


def test_codes_do_not_depend_on_the_company():
    together = LISTED.encode(ROWS)
    np.testing.assert_array_equal(
        np.concatenate([LISTED.encode(row[None]) for row in ROWS[:40]]), together[:40]
    )
    np.testing.assert_array_equal(LISTED.encode(ROWS[7:31]), together[7:31])
    lists = LISTED.assign(ROWS)
    assert [LISTED.assign(row[None])[0] for row in ROWS[:40]] == lists[:40].tolist()
    np.testing.assert_array_equal(LISTED.rank_lists(ROWS, 8)[:, 0], lists)


def test_scores_are_inner_products_with_the_centroids():
    scan, queries = scan_of(FLAT, ROWS), unit_rows(3, seed=5)
    scores, positions = scan.score(queries, len(ROWS))
    codes = FLAT.encode(ROWS)
    numbers = np.stack([codes & 15, codes >> 4], axis=2).reshape(len(ROWS), -1)
    decoded = FLAT.centroids[np.arange(FLAT.centroids.shape[0]), numbers].reshape(len(ROWS), -1)
    expected = np.take_along_axis(queries @ decoded.T, positions, axis=1)
    np.testing.assert_allclose(scores, expected, atol=0.02)
    assert (np.diff(scores, axis=1) <= 0).all()


@pytest.mark.parametrize(
    ("dim", "pieces"), [(3, 2), (8, 2), (12, 2), (96, 24), (1000, 250), (1024, 256), (32768, 256)]
)
def test_pieces_by_dimension(dim, pieces):
    assert count_pieces(dim) == pieces
    rows = unit_rows(30, dim=dim)
    quantiser = learn_quantiser(rows, seed=0)
    scan = scan_of(quantiser, rows)
    # The sum of 256 pieces fits into FAISS's 16 bits: a row finds itself, the best match there can be.
    assert (scan.score(rows, 1)[1][:, 0] == np.arange(30)).mean() > (0.9 if dim > 90 else 0)


@pytest.mark.parametrize("quantiser", [FLAT, LISTED], ids=["all", "lists"])
@pytest.mark.parametrize("cuts", [1, 2, 7])
@pytest.mark.parametrize("probes", [3, 8])
def test_the_shortlist_does_not_depend_on_the_cut_or_the_batch(quantiser, cuts, probes):
    queries = np.concatenate([ROWS[-60:-58], unit_rows(6, seed=6)])
    whole = scan_of(quantiser, ROWS, probes=probes).shortlist(queries, 40, 10)
    parts = scan_of(quantiser, ROWS, cuts, probes)
    for row, found in enumerate(parts.shortlist(queries, 40, 10)):
        np.testing.assert_array_equal(found, whole[row])
        np.testing.assert_array_equal(parts.shortlist(queries[row : row + 1], 40, 10)[0], found)
        assert len(found) >= 10


@pytest.mark.parametrize("quantiser", [FLAT, LISTED], ids=["all", "lists"])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.3, 0.97])
def test_a_masked_shortlist_is_that_of_the_allowed_rows(quantiser, share):
    mask = np.random.default_rng(1).random(len(ROWS)) < share
    found = scan_of(quantiser, ROWS).shortlist(unit_rows(4, seed=6), 30, 5, RowMask(mask))
    alone = scan_of(quantiser, ROWS[mask]).shortlist(unit_rows(4, seed=6), 30, 5)
    for one, other in zip(found, alone, strict=True):
        np.testing.assert_array_equal(one, np.flatnonzero(mask)[other])


def test_more_copies_than_the_depth_are_all_on_the_shortlist():
    rows = np.concatenate([unit_rows(50), np.repeat(unit_rows(1, seed=9), 300, axis=0)])
    found = scan_of(learn(rows), rows).shortlist(rows[-1:], 20, 10)[0]
    assert set(range(50, 350)) <= set(found.tolist())


def test_few_lists_that_hold_too_few_rows_are_not_enough():
    scan = scan_of(LISTED, ROWS, probes=1)
    for found in scan.shortlist(unit_rows(5, seed=2), 800, 600):
        assert len(found) >= 600


def test_a_shortlist_of_everything_and_of_nothing():
    scan = scan_of(FLAT, ROWS[:30])
    assert scan.shortlist(ROWS[:2], 30, 10)[1].tolist() == list(range(30))
    empty = CodeScan(FLAT, [], [], 1)
    assert empty.shortlist(ROWS[:1], 5, 5)[0].tolist() == []


def test_learning_is_the_same_each_time_and_travels_as_a_part():
    again = learn(ROWS, lists=8)
    np.testing.assert_array_equal(again.centroids, LISTED.centroids)
    np.testing.assert_array_equal(again.coarse, LISTED.coarse)
    back = Quantiser.from_part(LISTED.to_part())
    np.testing.assert_array_equal(back.encode(ROWS), LISTED.encode(ROWS))
    np.testing.assert_array_equal(back.assign(ROWS), LISTED.assign(ROWS))
    with pytest.raises(ValueError, match="are none of vectors of 5000 numbers"):
        Quantiser.from_part(LISTED.to_part()._replace(metadata={"dim": 5000}))
    sketches = LISTED.to_part()
    sketches.arrays["coarse"] = np.zeros((8, 1024), np.float32)  # of an earlier release
    with pytest.raises(ValueError, match=r"lists \(8, 1024\) are none of vectors of 96 numbers"):
        Quantiser.from_part(sketches)


def test_few_vectors_are_enough_and_none_are_refused():
    rows = unit_rows(3)
    codes = learn_quantiser(rows, seed=0).encode(rows)
    assert len(np.unique(codes, axis=0)) == 3
    with pytest.raises(ValueError, match="got none"):
        learn_quantiser(rows[:0], seed=0)
