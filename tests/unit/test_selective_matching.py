"""Scores and tentative matches against loops that do the same point by point, in double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ckn_scale.core.packed_points import pack_codes
from ckn_scale.core.selective_matching import (
    PointSets,
    aggregate_points,
    encode_query,
    join_points,
    make_query,
    match_mutually,
    match_points,
    score_points,
)
from ckn_scale.core.vlad import assign_words

NUM_WORDS = 40


def make_points(rng: np.random.Generator, counts: list[int]) -> PointSets:
    """Codes near one of a few patterns, so that some are similar."""
    number = sum(counts)
    patterns = np.random.default_rng(99).integers(0, 2, (NUM_WORDS, 128), np.uint8)
    words = rng.integers(0, NUM_WORDS, number).astype(np.uint16)
    bits = patterns[words] ^ (rng.random((number, 128)) < rng.uniform(0.05, 0.45, (number, 1)))
    return PointSets(words, np.packbits(bits, axis=1), np.cumsum([0, *counts]))


def make_assigned(
    rng: np.random.Generator, count: int, num_assignments: int
) -> tuple[np.ndarray, np.ndarray]:
    words = np.stack([rng.permutation(NUM_WORDS)[:num_assignments] for _ in range(count)]).astype(np.uint16)
    patterns = np.random.default_rng(99).integers(0, 2, (NUM_WORDS, 128), np.uint8)
    noise = rng.random((count, num_assignments, 128)) < 0.2
    return words, np.packbits(patterns[words] ^ noise, axis=2)


def signs(code: np.ndarray) -> list[int]:
    return [1 if bit else -1 for bit in np.unpackbits(code)]


def hamming(one: np.ndarray, other: np.ndarray) -> int:
    return sum(a != b for a, b in zip(signs(one), signs(other), strict=True))


def aggregate_by_loop(words: np.ndarray, codes: np.ndarray) -> dict[int, list[int]]:
    """Word → 128 signs: of the sum, or of the first point where it is zero."""
    groups: dict[int, list[list[int]]] = {}
    for word, code in zip(words.tolist(), codes, strict=True):
        groups.setdefault(word, []).append(signs(code))
    return {
        word: [
            (1 if total > 0 else -1) if total else leading
            for total, leading in ((sum(column), column[0]) for column in zip(*group, strict=True))
        ]
        for word, group in groups.items()
    }


def score_by_loop(
    query: dict[int, list[int]], candidate: dict[int, list[int]], alpha: float, tau: float
) -> float:
    total = 0.0
    for word, bits in query.items():
        if word in candidate:
            similarity = sum(a * b for a, b in zip(bits, candidate[word], strict=True)) / 128
            total += similarity**alpha if similarity > tau else 0.0
    return total / math.sqrt(len(query) * len(candidate)) if candidate and query else 0.0


@pytest.mark.parametrize(("alpha", "tau"), [(3.0, 0.1), (1.0, 0.0), (5.0, 0.4)])
def test_scores_are_what_loops_say(alpha, tau):
    rng = np.random.default_rng(0)
    words, codes = make_assigned(rng, 30, 3)
    points = make_points(rng, [50, 0, 120, 1, 30])
    scores = score_points(
        make_query(words, codes), aggregate_points(points), selectivity=alpha, min_similarity=tau
    )
    query = aggregate_by_loop(words.ravel(), codes.reshape(-1, 16))
    expected = []
    for start, end in zip(points.offsets[:-1], points.offsets[1:], strict=True):
        candidate = aggregate_by_loop(points.words[start:end], points.codes[start:end])
        expected.append(score_by_loop(query, candidate, alpha, tau))
    np.testing.assert_allclose(scores, expected, rtol=1e-12)
    assert scores.dtype == np.float64
    assert scores[1] == 0
    assert scores.max() > 0.03


def sort_by_word(points: PointSets) -> PointSets:
    order = np.lexsort((points.words, points.image_of))
    return PointSets(points.words[order], points.codes[order], points.offsets)


def test_points_have_the_scores_of_their_aggregates_to_the_bit():
    rng = np.random.default_rng(0)
    query = make_query(*make_assigned(rng, 30, 3))
    points = sort_by_word(make_points(rng, [0, 50, 0, 400, 1, 30, 0]))  # words with 1, 2, 3 and many points
    assert len(np.unique(np.bincount(points.words))) > 4
    assert score_points(query, points).tolist() == score_points(query, aggregate_points(points)).tolist()
    nothing = PointSets(np.empty(0, np.uint16), np.empty((0, 16), np.uint8), np.zeros(3, np.int64))
    assert score_points(query, nothing).tolist() == [0, 0]
    with pytest.raises(ValueError, match="sorted by word"):
        score_points(query, make_points(rng, [50]))


def test_an_image_has_score_1_with_itself():
    points = aggregate_points(make_points(np.random.default_rng(0), [100]))
    assert score_points(points, points) == pytest.approx([1.0], abs=1e-12)


def test_a_score_is_the_same_alone_and_in_company():
    rng = np.random.default_rng(0)
    query, candidates = (aggregate_points(make_points(rng, counts)) for counts in ([80], [60, 90, 40]))
    together = score_points(query, candidates)
    for position, (start, end) in enumerate(
        zip(candidates.offsets[:-1], candidates.offsets[1:], strict=True)
    ):
        alone = PointSets(
            candidates.words[start:end], candidates.codes[start:end], np.array([0, end - start])
        )
        assert score_points(query, alone)[0] == together[position]


def test_sets_that_are_joined_are_the_sets_one_after_the_other():
    whole = make_points(np.random.default_rng(0), [60, 0, 90, 40])
    parts = [PointSets(whole.words[:60], whole.codes[:60], whole.offsets[:3])]
    parts.append(PointSets(whole.words[60:], whole.codes[60:], whole.offsets[2:] - 60))
    joined = join_points(parts)
    for name in ("words", "codes", "offsets"):
        assert np.array_equal(getattr(joined, name), getattr(whole, name)), name


def test_aggregate_points_is_what_loops_say():
    points = make_points(np.random.default_rng(1), [100, 3, 0, 50])
    aggregated = aggregate_points(points)
    assert len(aggregated) == 4
    for image in range(4):
        start, end = points.offsets[image : image + 2]
        expected = aggregate_by_loop(points.words[start:end], points.codes[start:end])
        rows = slice(*aggregated.offsets[image : image + 2])
        assert aggregated.words[rows].tolist() == sorted(expected)
        for word, code in zip(aggregated.words[rows].tolist(), aggregated.codes[rows], strict=True):
            assert signs(code) == expected[word]


def test_the_first_point_decides_between_two():
    codes = np.stack([np.full(16, 0b1100_0000, np.uint8), np.full(16, 0b1010_0000, np.uint8)])
    both = PointSets(np.full(2, 7, np.uint16), codes, np.array([0, 2]))
    assert aggregate_points(both).codes.tolist() == [[0b1100_0000] * 16]


def test_match_points_is_what_loops_say():
    rng = np.random.default_rng(2)
    words, codes = make_assigned(rng, 60, 3)
    points = make_points(rng, [70, 0, 40])
    matches = match_points(words, codes, points, max_difference=50 / 128)
    expected = []
    for image in range(3):
        pairs = {}
        for query in range(60):
            for point in range(*points.offsets[image : image + 2]):
                for word, code in zip(words[query], codes[query], strict=True):
                    if word == points.words[point]:
                        pairs[query, point] = hamming(code, points.codes[point])
        pairs = {pair: distance for pair, distance in pairs.items() if distance <= 50}
        for (query, point), distance in sorted(pairs.items()):
            best_point = min((d, p) for (q, p), d in pairs.items() if q == query)[1]
            best_query = min((d, q) for (q, p), d in pairs.items() if p == point)[1]
            if (best_query, best_point) == (query, point):
                expected.append((image, query, point, distance))
    images = np.repeat(np.arange(3), np.diff(matches.offsets))
    found = zip(images, matches.query, matches.candidate, matches.distances, strict=True)
    assert [tuple(int(value) for value in one) for one in found] == expected
    assert len(expected) > 20


def test_codes_of_two_channels_count_all_their_bits():
    rng = np.random.default_rng(3)
    query, points = make_points(rng, [40]), make_points(rng, [40])
    both = [PointSets(one.words, np.repeat(one.codes, 2, axis=1), one.offsets) for one in (query, points)]
    once = score_points(aggregate_points(query), aggregate_points(points))
    np.testing.assert_array_equal(score_points(*map(aggregate_points, both)), once)
    assert once > 0
    single = match_points(query.words[:, None], query.codes[:, None], points)
    double = match_points(both[0].words[:, None], both[0].codes[:, None], both[1])
    np.testing.assert_array_equal(double.candidate, single.candidate)
    np.testing.assert_array_equal(double.distances, 2 * single.distances)
    assert len(single.query) > 0


def test_match_mutually_by_hand():
    i, j = match_mutually(np.array([[1.0, 5.0, 5.0], [0.5, 2.0, 9.0], [9.0, 3.0, 3.0]]))
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == [(1, 0)]
    assert [len(one) for one in match_mutually(np.empty((0, 3)))] == [0, 0]
    i, j = match_mutually(np.zeros((2, 2)))  # all are as near: the first
    assert (i.tolist(), j.tolist()) == ([0], [0])


def test_encode_query_gives_the_nearest_words_first():
    rng = np.random.default_rng(4)
    centroids, rows = rng.standard_normal((20, 128), np.float32), rng.standard_normal((9, 128), np.float32)
    words, codes = encode_query(rows, centroids, num_assignments=3)
    distances = np.linalg.norm(rows[:, None].astype(np.float64) - centroids[None], axis=2)
    np.testing.assert_array_equal(words, np.argsort(distances, axis=1)[:, :3])
    np.testing.assert_array_equal(words[:, 0], assign_words(rows, centroids))
    for column in range(3):
        np.testing.assert_array_equal(codes[:, column], pack_codes(rows, words[:, column], centroids))
    assert encode_query(rows[:0], centroids)[1].shape == (0, 3, 16)


def test_nothing_matches_nothing():
    none = PointSets(np.empty(0, np.uint16), np.empty((0, 16), np.uint8), np.array([0, 0, 0]))
    words, codes = make_assigned(np.random.default_rng(0), 5, 3)
    assert score_points(make_query(words, codes), aggregate_points(none)).tolist() == [0, 0]
    assert match_points(words, codes, none).offsets.tolist() == [0, 0, 0]
    points = make_points(np.random.default_rng(0), [5, 6])
    assert match_points(words[:0], codes[:0], points).offsets.tolist() == [0, 0, 0]
    empty = make_query(words[:0], codes[:0])
    assert score_points(empty, aggregate_points(points)).tolist() == [0, 0]


WORDS, CODES, OFFSETS = np.zeros(4, np.uint16), np.zeros((4, 16), np.uint8), np.array([0, 4])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: PointSets(WORDS.astype(np.int64), CODES, OFFSETS),
            r"words must be \(P,\) uint16, got \(4,\) int64",
        ),
        (lambda: PointSets(WORDS, CODES[:3], OFFSETS), r"codes must be \(4, B\) uint8, got \(3, 16\)"),
        (lambda: PointSets(WORDS, CODES, np.array([0, 3])), "from 0 to the 4 points"),
        (lambda: PointSets(WORDS, CODES, np.array([0, 5, 4])), "must not decrease"),
        (
            lambda: score_points(*2 * [PointSets(WORDS, CODES, np.array([0, 2, 4]))]),
            "a query is one image, got 2",
        ),
        (
            lambda: score_points(*2 * [PointSets(WORDS, CODES, OFFSETS)]),
            "the query must be aggregated: each word once, ascending",
        ),
        (lambda: match_points(WORDS, CODES, PointSets(WORDS, CODES, OFFSETS)), r"words must be \(N, m\)"),
        (lambda: match_mutually(np.zeros(3)), r"distances must be \(N, M\), got \(3,\)"),
        (lambda: encode_query(np.zeros((2, 3)), np.zeros((5, 4))), r"must be \(N, 4\), got \(2, 3\)"),
        (
            lambda: encode_query(np.zeros((2, 4)), np.zeros((2, 4))),
            "between 1 and the 2 words .at most 65536., got 3",
        ),
    ],
)
def test_bad_input_is_refused_with_its_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()
