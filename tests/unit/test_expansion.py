"""Hits that help to ask: their points and vectors beside the query's, and chains over them."""

from __future__ import annotations

import numpy as np
import pytest

from ckn_scale.core.evidence import MATCHED_ASSIGNMENTS, Evidence, QueryPoints
from ckn_scale.core.expansion import (
    MAX_HITS,
    average_vectors,
    chain_inliers,
    choose_hits,
    make_hit_points,
    merge_points,
    restore_descriptors,
    separate_vectors,
)
from ckn_scale.core.keypoints import Keypoints
from ckn_scale.core.packed_points import pack_codes, pack_frames, unpack_frames
from ckn_scale.core.selective_matching import PointSets
from ckn_scale.core.vlad import assign_words

SIZE = (640, 480)


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def make_words(count: int = 60) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.float32(0.5) * unit(rng.normal(size=(count, 128)))


def make_image(count: int, centroids: np.ndarray) -> tuple[PointSets, np.ndarray, np.ndarray]:
    """Points, packed frames and the descriptors they come from."""
    rng = np.random.default_rng(1)
    chosen = rng.integers(0, len(centroids), count)
    residuals = rng.normal(size=(count, 128))
    descriptors = centroids[chosen] + np.float32(np.sqrt(0.75)) * unit(residuals)
    words = assign_words(descriptors, centroids)
    frames = np.zeros((count, 2, 3), np.float32)
    frames[:, 0, 0] = frames[:, 1, 1] = 6
    frames[:, :, 2] = rng.uniform(5, np.array(SIZE) - 5, (count, 2))
    packed = pack_frames(Keypoints(frames, np.ones(count, np.float32)), *SIZE)
    codes = pack_codes(descriptors, words, centroids)
    return PointSets(words.astype(np.uint16), codes, np.array([0, count])), packed, descriptors


def test_hits_have_enough_inliers_most_first_ties_by_id():
    ids = np.array([5, 3, 9, 1, 7])
    assert ids[choose_hits(ids, np.array([12, 30, 11, 30, 16]))].tolist() == [1, 3, 7, 5]
    assert len(choose_hits(np.arange(50), np.full(50, 20))) == MAX_HITS
    assert len(choose_hits(ids[:0], np.zeros(0))) == 0


def test_restored_descriptors_are_nearer_than_their_words():
    centroids = make_words()
    points, _, descriptors = make_image(200, centroids)
    restored = restore_descriptors(points.words, points.codes, centroids)
    missed = np.linalg.norm(descriptors - restored, axis=1)
    without = np.linalg.norm(descriptors - centroids[points.words], axis=1)
    assert np.mean(missed / without) == pytest.approx(np.sqrt(1 - 2 / np.pi), abs=0.05)
    np.testing.assert_array_equal(pack_codes(restored, points.words, centroids), points.codes)


def test_a_hit_asks_by_its_points_inside_the_box():
    centroids = make_words()
    points, packed, _ = make_image(200, centroids)
    frames = unpack_frames(packed, *SIZE).frames
    hit = make_hit_points(points, packed, SIZE, (100.0, 100.0, 200.0, 300.0), centroids)
    at = frames[:, :, 2]
    inside = (at[:, 0] >= 82) & (at[:, 0] <= 218) & (at[:, 1] >= 72) & (at[:, 1] <= 328)
    assert 0 < inside.sum() < 200
    np.testing.assert_array_equal(hit.frames, frames[inside])
    assert hit.words.shape == (inside.sum(), MATCHED_ASSIGNMENTS)
    np.testing.assert_array_equal(hit.words[:, 0], points.words[inside])
    np.testing.assert_array_equal(hit.codes[:, 0], points.codes[inside])
    assert all(len(set(row)) == MATCHED_ASSIGNMENTS for row in hit.words.tolist())
    assert set(hit.aggregated.words) == set(points.words[inside])  # scored by the stored word alone
    plain = make_hit_points(points, packed, SIZE, (100.0, 100.0, 200.0, 300.0), None)
    np.testing.assert_array_equal(plain.words, hit.words[:, :1])
    np.testing.assert_array_equal(plain.aggregated.codes, hit.aggregated.codes)
    nowhere = make_hit_points(points, packed, SIZE, (-500.0, -500.0, -400.0, -400.0), centroids)
    assert len(nowhere) == 0


def test_merged_points_have_the_words_of_all_and_the_querys_code_where_two_differ():
    frames = np.zeros((2, 2, 3), np.float32)
    codes = np.arange(2 * 16, dtype=np.uint8).reshape(2, 1, 16)
    query = QueryPoints(np.array([[3], [9]], np.uint16), codes, frames, SIZE)
    hit = QueryPoints(np.array([[9], [4]], np.uint16), 255 - codes, frames, SIZE, num_scored=1)
    merged = merge_points(query, [hit]).aggregated
    assert merged.words.tolist() == [3, 4, 9]
    np.testing.assert_array_equal(merged.codes, [codes[0, 0], 255 - codes[1, 0], codes[1, 0]])
    alone = merge_points(query, []).aggregated
    np.testing.assert_array_equal(alone.codes, query.aggregated.codes)


def test_vectors_of_query_and_hits_become_one():
    query, hit = np.array([1.0, 0, 0], np.float32), np.array([[0, 1.0, 0]], np.float32)
    np.testing.assert_allclose(average_vectors(query, hit), [np.sqrt(0.5), np.sqrt(0.5), 0], atol=1e-6)
    np.testing.assert_array_equal(average_vectors(query, hit[:0]), query)


def test_separated_vectors_leave_out_what_others_have_too():
    rng = np.random.default_rng(2)
    common, own = np.eye(50)[0], np.eye(50)[1]
    hits, others = (unit(rng.normal(size=(20, 50)) * 0.05 + what) for what in (common + own, common))
    average, separated = average_vectors(hits[0], hits[1:]), separate_vectors(hits[0], hits[1:], others)
    assert np.linalg.norm(separated) == pytest.approx(1, abs=1e-5)
    assert separated[1] > 0.5
    assert abs(separated[0] / separated[1]) < 0.5 < abs(average[0] / average[1])
    np.testing.assert_array_equal(separate_vectors(hits[0], hits[1:], others[:0]), average)


def test_a_chain_is_as_strong_as_its_weaker_link():
    assert chain_inliers(12, [Evidence(inliers=30), Evidence(inliers=5)]).tolist() == [12, 5]
    assert chain_inliers(12, []).tolist() == []
