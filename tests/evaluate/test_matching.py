"""Mikolajczyk's protocol on regions whose overlap is known."""

from __future__ import annotations

import numpy as np
import pytest

from ckn_scale.core.keypoints import Keypoints
from ckn_scale.core.regions import overlap_regions
from ckn_scale.evaluate.matching import (
    REGION_SCALES,
    find_truth,
    match_greedily,
    measure_distances,
    score_pair,
)
from ckn_scale.evaluate.regions import Detected


def circles(centres, radii):
    frames = np.zeros((len(centres), 2, 3))
    frames[:, 0, 0] = frames[:, 1, 1] = radii
    frames[:, :, 2] = centres
    return frames


def detected(frames, side_px=1000):
    frames = np.asarray(frames, np.float32)
    return Detected("key", Keypoints(frames, np.ones(len(frames), np.float32)), side_px, side_px)


def grid_of_circles(radius=4.0):
    x, y = np.meshgrid(np.arange(5) * 60 + 100.0, np.arange(4) * 60 + 100.0)
    return circles(np.stack([x.ravel(), y.ravel()], 1), np.full(20, radius))


def lens_overlap(radius, distance):
    """Intersection over union of two equal circles."""
    half = distance / 2
    lens = 2 * radius**2 * np.arccos(half / radius) - half * np.sqrt(4 * radius**2 - distance**2)
    return lens / (2 * np.pi * radius**2 - lens)


@pytest.mark.parametrize("distance", [0.0, 1.0, 3.0, 6.0])
def test_overlap_of_shifted_circles(distance):
    first, second = circles([(0, 0)], [5.0]), circles([(distance, 0)], [5.0])
    expected = lens_overlap(5.0, distance)
    assert overlap_regions(first, second, normalise=False)[0] == pytest.approx(expected, abs=0.005)


def test_overlap_of_concentric_ellipses_is_the_ratio_of_areas():
    first = np.array([[[4.0, 0, 10], [0, 1.0, 20]]])
    second = np.array([[[8.0, 0, 10], [0, 2.0, 20]]])
    assert overlap_regions(first, second, normalise=False)[0] == pytest.approx(0.25, abs=0.005)


def test_truth_of_the_identity_pairs_every_region():
    regions = detected(grid_of_circles())
    truth = find_truth(regions, regions, np.eye(3))
    assert truth.num_correspondences == truth.num_normalised == 20
    assert truth.seen_first.all()
    assert truth.seen_second.all()
    np.testing.assert_allclose(truth.first[0, 0, 0], 4 * REGION_SCALES, rtol=1e-6)


def test_truth_knows_which_regions_the_other_image_shows():
    regions = detected(grid_of_circles(), side_px=400)
    shift = np.array([[1.0, 0, 150], [0, 1, 0], [0, 0, 1]])
    truth = find_truth(regions, regions, shift)
    assert truth.seen_first.sum() == 12  # columns at 100, 160, 220 move to 250, 310, 370; the others leave


def test_truth_takes_a_sample_of_a_dense_grid():
    regions = detected(grid_of_circles())
    truth = find_truth(regions, regions, np.eye(3), max_regions=7)
    assert len(truth.rows_first) == len(truth.first) == truth.num_correspondences == 7


def test_perfect_descriptors_score_one():
    regions = detected(grid_of_circles())
    truth = find_truth(regions, regions, np.eye(3))
    score = score_pair(truth, np.eye(20), np.eye(20))
    assert (score.ap, score.ap_normalised, score.right) == (1.0, 1.0, 20)


def test_wrong_descriptors_score_zero():
    regions = detected(grid_of_circles())
    truth = find_truth(regions, regions, np.eye(3))
    assert score_pair(truth, np.eye(20), np.roll(np.eye(20), 1, axis=0)).ap == 0.0


def test_no_region_scores_zero():
    nothing, regions = detected(np.empty((0, 2, 3))), detected(grid_of_circles())
    truth = find_truth(nothing, regions, np.eye(3))
    score = score_pair(truth, np.empty((0, 4)), np.ones((20, 4)))
    assert (score.ap, score.matches, score.correspondences) == (0.0, 0, 0)


def naive_greedy(distances):
    pairs, rows, columns = [], set(), set()
    for flat in np.argsort(distances, axis=None, kind="stable"):
        i, j = divmod(int(flat), distances.shape[1])
        if i not in rows and j not in columns:
            rows.add(i)
            columns.add(j)
            pairs.append((i, j))
    return pairs


@pytest.mark.parametrize("shape", [(30, 30), (12, 40), (40, 12), (1, 1)])
def test_match_greedily_equals_the_plain_loop(shape):
    distances = np.random.default_rng(shape[0]).random(shape)
    i, j = match_greedily(distances)
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == naive_greedy(distances)


def test_match_greedily_ends_when_all_distances_tie():
    i, j = match_greedily(np.zeros((6, 4)))
    assert sorted(j.tolist()) == [0, 1, 2, 3]
    assert len(set(i.tolist())) == 4


def test_measure_distances_are_squared_and_euclidean():
    first, second = np.array([[0.0, 0.0], [1.0, 0.0]]), np.array([[3.0, 4.0]])
    np.testing.assert_allclose(measure_distances(first, second), [[25.0], [20.0]])
