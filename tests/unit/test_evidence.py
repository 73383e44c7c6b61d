"""Evidence for candidates of which one shows a part of the query, turned and shrunk."""

from __future__ import annotations

import numpy as np
import pytest

from ckn_scale.core import evidence as core_evidence
from ckn_scale.core.encoder import EncodedImage, pack_frames, unpack_frames
from ckn_scale.core.evidence import (
    MATCHED_ASSIGNMENTS,
    QueryPoints,
    choose_head,
    join_evidence,
    make_query_points,
    match_head,
    scale_pixels,
    score_shortlist,
    verify_head,
)
from ckn_scale.core.keypoints import Keypoints
from ckn_scale.core.selective_matching import NUM_ASSIGNMENTS, PointSets

SIZE, OTHER_SIZE = (640, 480), (500, 400)
TRANSFORM = np.array([[0.5, -0.2, 90.0], [0.2, 0.5, 40.0], [0, 0, 1]])


def make_frames(rng: np.random.Generator, count: int, size_px: tuple[int, int]) -> np.ndarray:
    frames = np.empty((count, 2, 3), np.float32)
    angles = rng.uniform(0, 2 * np.pi, count)
    turns = np.stack([np.cos(angles), -np.sin(angles), np.sin(angles), np.cos(angles)], axis=1)
    frames[:, :, :2] = rng.uniform(4, 12, (count, 1, 1)) * turns.reshape(-1, 2, 2)
    frames[:, :, 2] = rng.uniform(10, np.array(size_px) - 10, (count, 2))
    return frames


def pack(frames: np.ndarray, size_px: tuple[int, int]) -> np.ndarray:
    return pack_frames(Keypoints(frames, np.ones(len(frames), np.float32)), *size_px)


def make_query(count: int = 200, seed: int = 0) -> QueryPoints:
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 100, (count, 1)).astype(np.uint16)
    codes = rng.integers(0, 256, (count, 1, 16), np.uint8)
    frames = unpack_frames(pack(make_frames(rng, count, SIZE), SIZE), *SIZE).frames
    return QueryPoints(words, codes, frames, SIZE)


def make_candidates(
    query: QueryPoints, shared: list[int], others: int = 150
) -> tuple[PointSets, np.ndarray, np.ndarray]:
    """Candidates that share so many points with the query, where `TRANSFORM` puts them, and have others."""
    words, codes, frames = [], [], []
    for number, count in enumerate(shared):
        rng = np.random.default_rng(number + 1)
        there = np.empty((count, 2, 3), np.float32)
        there[:, :, :2] = TRANSFORM[:2, :2] @ query.frames[:count, :, :2]
        there[:, :, 2] = query.frames[:count, :, 2] @ TRANSFORM[:2, :2].T + TRANSFORM[:2, 2]
        word = np.concatenate([query.words[:count, 0], rng.integers(0, 100, others).astype(np.uint16)])
        code = np.concatenate([query.codes[:count, 0], rng.integers(0, 256, (others, 16), np.uint8)])
        frame = np.concatenate([there, make_frames(rng, others, OTHER_SIZE)])
        order = np.argsort(word, kind="stable")
        words.append(word[order])
        codes.append(code[order])
        frames.append(pack(frame[order], OTHER_SIZE))
    offsets = np.cumsum([0, *(len(one) for one in words)])
    sizes = np.tile(OTHER_SIZE, (len(shared), 1))
    return PointSets(np.concatenate(words), np.concatenate(codes), offsets), np.concatenate(frames), sizes


def test_verify_head_finds_the_transform_of_what_is_shared():
    query = make_query()
    points, frames, sizes = make_candidates(query, [0, 60])
    other, same = verify_head(query, points, frames, sizes)
    assert other.inliers <= 4 < 40 < same.inliers <= same.matches
    np.testing.assert_allclose(same.transform[:2], TRANSFORM[:2], atol=1.5, rtol=0.02)
    inside = query.frames[:60, :, 2] @ TRANSFORM[:2, :2].T + TRANSFORM[:2, 2]
    np.testing.assert_allclose(same.box, [*inside.min(axis=0), *inside.max(axis=0)], atol=15)
    assert score_shortlist(query, points).argmax() == 1


def test_a_query_matches_by_more_words_than_it_is_scored_by():
    rng = np.random.default_rng(5)
    centroids = rng.normal(size=(40, 128)).astype(np.float32)
    descriptors = rng.normal(size=(30, 128)).astype(np.float32)
    frames = pack(make_frames(rng, 30, SIZE), SIZE)
    encoded = EncodedImage(np.zeros(4), *SIZE, frames, np.zeros(30), np.zeros((30, 16)), descriptors)
    query = make_query_points(encoded, centroids)
    assert query.words.shape == (30, MATCHED_ASSIGNMENTS)
    assert query.codes.shape == (30, MATCHED_ASSIGNMENTS, 16)
    assert set(query.aggregated.words) == set(query.words[:, :NUM_ASSIGNMENTS].ravel())
    np.testing.assert_array_equal(query.frames, unpack_frames(frames, *SIZE).frames)
    few = make_query_points(encoded, centroids[:2])
    assert few.words.shape == (30, 2)
    empty = EncodedImage(np.zeros(4), *SIZE, frames[:0], *(np.zeros(0), np.zeros((0, 0)), np.zeros((0, 0))))
    assert len(make_query_points(empty, centroids)) == 0


def test_a_candidate_gets_the_same_evidence_in_any_company():
    query = make_query()
    points, frames, sizes = make_candidates(query, [10, 60, 0, 25])
    together, scores = verify_head(query, points, frames, sizes), score_shortlist(query, points)
    for place in range(4):
        rows = slice(*points.offsets[place : place + 2])
        one = PointSets(points.words[rows], points.codes[rows], np.array([0, rows.stop - rows.start]))
        alone = verify_head(query, one, frames[rows], sizes[place : place + 1])[0]
        assert (alone.inliers, alone.matches, alone.box) == (
            together[place].inliers,
            together[place].matches,
            together[place].box,
        )
        assert np.array_equal(alone.transform, together[place].transform)
        assert score_shortlist(query, one)[0] == scores[place]


def test_points_of_one_place_count_once():
    query = make_query()
    query.frames[:30, :, 2] = query.frames[0, :, 2]
    points, frames, sizes = make_candidates(query, [30])
    found = match_head(query, points, frames, sizes)
    assert len(found.verified[0].inliers) >= 25
    assert verify_head(query, points, frames, sizes)[0].inliers <= 4


def test_nothing_to_match_is_no_evidence():
    query, nobody = make_query(), make_query(0)
    points, frames, sizes = make_candidates(query, [60])
    assert [one.inliers for one in verify_head(nobody, points, frames, sizes)] == [0]
    assert score_shortlist(nobody, points).tolist() == [0]
    none = PointSets(points.words[:0], points.codes[:0], np.array([0, 0]))
    found = verify_head(query, none, frames[:0], sizes)
    assert [(one.inliers, one.transform, one.box) for one in found] == [(0, None, None)]
    assert verify_head(query, PointSets(none.words, none.codes, np.array([0])), frames[:0], sizes[:0]) == []


def test_few_matches_are_kept_by_their_distance(monkeypatch):
    query = make_query()
    points, frames, sizes = make_candidates(query, [60, 0])
    every = match_head(query, points, frames, sizes).tentative
    monkeypatch.setattr(core_evidence, "MAX_MATCHES", 20)
    kept = match_head(query, points, frames, sizes).tentative
    assert np.diff(kept.offsets).tolist() == np.minimum(np.diff(every.offsets), 20).tolist()
    assert kept.distances[:20].max() == 0


def test_the_head_is_the_best_and_ties_go_by_id():
    ids, scores = np.array([9, 4, 7, 2]), np.array([0.5, 0.1, 0.5, 0.9])
    assert ids[choose_head(ids, scores, 3)].tolist() == [2, 7, 9]


def test_inliers_lead_and_chance_does_not_count():
    strength = join_evidence(np.zeros(4), np.array([0.3, 0.1, 0.2, 0.0]), np.array([0, 3, 30, 8]))
    assert np.argsort(-strength).tolist() == [2, 3, 0, 1]


def test_evidence_moves_to_the_pixels_of_the_originals():
    query = make_query()
    points, frames, sizes = make_candidates(query, [60])
    found = verify_head(query, points, frames, sizes)[0]
    to_query, to_candidate = scale_pixels(SIZE, (1280, 960)), scale_pixels(OTHER_SIZE, (1500, 1200))
    moved = found.move(to_query, to_candidate)
    at = np.array([100.0, 50.0, 1])
    there = to_candidate @ (found.transform @ at)
    np.testing.assert_allclose(moved.transform @ to_query @ at, there, atol=1e-9)
    assert moved.box == pytest.approx([3 * value + 1 for value in found.box])
