"""Evidence for candidates of which one shows a part of the query, turned and shrunk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from synthetic_points import OTHER_SIZE, SIZE, TRANSFORM, make_candidates, make_frames, make_query, pack

from ckn_scale.core import evidence as core_evidence
from ckn_scale.core.encoder import EncodedImage
from ckn_scale.core.evidence import (
    MATCHED_ASSIGNMENTS,
    choose_head,
    join_evidence,
    make_query_points,
    match_head,
    scale_pixels,
    score_shortlist,
    verify_head,
    warm_up,
)
from ckn_scale.core.fit_transforms import fit_candidates
from ckn_scale.core.packed_points import unpack_frames
from ckn_scale.core.point_loops import match_images, score_images, vote_codes
from ckn_scale.core.selective_matching import NUM_ASSIGNMENTS, PointSets


def test_verify_head_finds_the_transform_of_what_is_shared():
    query = make_query()
    points, frames, sizes = make_candidates(query, [0, 60])
    other, same = verify_head(query, points, frames, sizes)
    assert other.inliers <= 4 < 40 < same.inliers <= same.matches
    np.testing.assert_allclose(same.transform[:2], TRANSFORM[:2], atol=1.5, rtol=0.02)
    inside = query.frames[:60, :, 2] @ TRANSFORM[:2, :2].T + TRANSFORM[:2, 2]
    np.testing.assert_allclose(same.box, [*inside.min(axis=0), *inside.max(axis=0)], atol=15)
    assert score_shortlist(query, points).argmax() == 1


def test_after_warm_up_nothing_is_compiled_for_a_query():
    warm_up()
    loops = (score_images, match_images, vote_codes, fit_candidates)
    compiled = [len(loop.signatures) for loop in loops]
    query = make_query()
    points, frames, sizes = make_candidates(query, [0, 60])
    for array in (points.words, points.codes, points.offsets):
        array.flags.writeable = False  # as those of a mapped file
    verify_head(query, points, frames, sizes)
    score_shortlist(query, points)
    assert [len(loop.signatures) for loop in loops] == compiled


def test_a_query_matches_by_more_words_than_it_is_scored_by():
    rng = np.random.default_rng(5)
    centroids = rng.normal(size=(40, 128)).astype(np.float32)
    descriptors = rng.normal(size=(30, 128)).astype(np.float32)
    frames = pack(make_frames(rng, 30, SIZE), SIZE)
    points = {"words": np.zeros(30), "codes": np.zeros((30, 16)), "descriptors": descriptors}
    encoded = EncodedImage(np.zeros(4), *SIZE, original_size_px=(1280, 960), frames=frames, **points)
    query = make_query_points(encoded, centroids)
    assert query.words.shape == (30, MATCHED_ASSIGNMENTS)
    assert query.codes.shape == (30, MATCHED_ASSIGNMENTS, 16)
    assert set(query.aggregated.words) == set(query.words[:, :NUM_ASSIGNMENTS].ravel())
    np.testing.assert_array_equal(query.frames, unpack_frames(frames, *SIZE).frames)
    np.testing.assert_allclose(query.original @ [10, 20, 1], [20.5, 40.5, 1])
    part = make_query_points(encoded, centroids, (100.7, -3, 1400, 900))
    np.testing.assert_allclose(part.original @ [10, 20, 1], [120.5, 40.5, 1])
    few = make_query_points(encoded, centroids[:2])
    assert few.words.shape == (30, 2)
    empty = replace(encoded, frames=frames[:0], descriptors=np.zeros((0, 0)))
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
    ids, selective = np.array([9, 4, 7, 2]), np.array([0.5, 0.1, 0.5, 0.9])
    assert ids[choose_head(ids, np.full(4, 0.3), selective, 3)].tolist() == [2, 7, 9]
    assert ids[choose_head(ids, np.array([0.3, 0.9, 0.3, 0.3]), np.full(4, 0.1), 2)].tolist() == [4, 2]


def test_strength_grows_with_each_kind_of_evidence_and_is_finite_without_any():
    one, zero = np.array([0.3]), np.zeros(1)
    base = join_evidence(one, one, np.array([5]))
    for more in (
        join_evidence(2 * one, one, np.array([5])),
        join_evidence(one, 2 * one, np.array([5])),
        join_evidence(one, one, np.array([6])),
    ):
        assert more > base
    assert np.isfinite(join_evidence(-one, zero, np.array([0])))


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
