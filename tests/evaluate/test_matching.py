"""Mikolajczyk's protocol on regions whose overlap is known."""

from __future__ import annotations

import numpy as np
import pytest

from ckn_scale.core.keypoints import Keypoints
from ckn_scale.evaluate.matching import (
    REGION_SCALES,
    centres_inside,
    find_truth,
    match_greedily,
    measure_distances,
    overlap_regions,
    pair_regions,
    project_frames,
    score_pair,
    take_one_to_one,
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


def circle(x: float, y: float, radius: float) -> np.ndarray:
    return np.array([[[radius, 0, x], [0, radius, y]]], float)


def random_frames(num: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    frames = rng.normal(size=(num, 2, 3))
    frames[:, :, :2] += 3 * np.eye(2)
    frames[:, :, 2] *= 2
    return frames


def test_overlap_of_circles_by_hand() -> None:
    assert overlap_regions(circle(0, 0, 5), circle(0, 0, 5), normalise=False)[0] == pytest.approx(1, abs=2e-3)
    assert overlap_regions(circle(0, 0, 1), circle(0, 0, 2), normalise=False)[0] == pytest.approx(
        0.25, abs=2e-3
    )
    assert overlap_regions(circle(0, 0, 1), circle(3, 0, 1), normalise=False)[0] == 0
    lens = 2 * np.arccos(0.5) - 0.5 * np.sqrt(3)  # two unit circles one apart
    expected = lens / (2 * np.pi - lens)
    assert overlap_regions(circle(0, 0, 1), circle(0, 1, 1), normalise=False)[0] == pytest.approx(
        expected, abs=2e-3
    )


def test_overlap_agrees_with_counting_pixels() -> None:
    first, second = random_frames(20, 0), random_frames(20, 1)
    overlap = overlap_regions(first, second, normalise=False)
    y, x = np.mgrid[-15:15:600j, -15:15:600j]
    points = np.stack([x.ravel(), y.ravel()])
    for i in range(20):
        inside = [
            (np.square(np.linalg.inv(f[i, :, :2]) @ (points - f[i, :, 2:])).sum(axis=0) <= 1)
            for f in (first, second)
        ]
        assert overlap[i] == pytest.approx(
            (inside[0] & inside[1]).sum() / (inside[0] | inside[1]).sum(), abs=0.02
        )


def test_overlap_is_the_same_after_any_affine_map() -> None:
    first, second = random_frames(30, 2), random_frames(30, 3)
    homography = np.array([[1.2, 0.7, 3], [-0.4, 0.9, -5], [0, 0, 1]])
    mapped = [project_frames(f, homography) for f in (first, second)]
    np.testing.assert_allclose(
        overlap_regions(*mapped, normalise=False), overlap_regions(first, second, normalise=False), atol=0.01
    )


def test_normalised_overlap_enlarges_around_the_centres() -> None:
    """Circles of radius 3 that are 3 apart are compared as circles of radius 30 that are 3 apart."""
    small = overlap_regions(circle(0, 0, 3), circle(3, 0, 3))
    large = overlap_regions(circle(0, 0, 30), circle(3, 0, 30), normalise=False)
    np.testing.assert_allclose(small, large, atol=1e-6)


def test_project_frames_has_the_homographys_derivative() -> None:
    homography = np.array([[1.1, 0.2, 5], [-0.1, 0.9, 3], [1e-3, -5e-4, 1]])
    frames = random_frames(5, 4)
    projected = project_frames(frames, homography)

    def move(points: np.ndarray) -> np.ndarray:
        lifted = np.concatenate([points, np.ones((len(points), 1))], axis=1) @ homography.T
        return lifted[:, :2] / lifted[:, 2:]

    np.testing.assert_allclose(projected[:, :, 2], move(frames[:, :, 2]))
    tiny = 1e-5
    for axis in (0, 1):
        numeric = (move(frames[:, :, 2] + tiny * frames[:, :, axis]) - move(frames[:, :, 2])) / tiny
        np.testing.assert_allclose(projected[:, :, axis], numeric, rtol=1e-3, atol=1e-4)


def test_centres_inside_counts_the_border_in() -> None:
    frames = np.concatenate([circle(x, y, 1) for x, y in ((0, 0), (9, 4), (9.1, 4), (5, -0.1))])
    assert centres_inside(frames, 5, 10).tolist() == [True, True, False, False]


def test_pair_regions_takes_each_once_and_the_best_first() -> None:
    first = np.concatenate([circle(0, 0, 10), circle(40, 0, 10)])
    second = np.concatenate([circle(2, 0, 10), circle(0.5, 0, 10), circle(100, 0, 10)])
    i, j = pair_regions(first, second, normalise=False)
    assert (i.tolist(), j.tolist()) == ([0], [1])


def test_pair_regions_finds_what_all_pairs_would() -> None:
    first, second = random_frames(40, 5), random_frames(40, 6)
    i, j = (a.ravel() for a in np.indices((40, 40)))
    overlap = overlap_regions(first[i], second[j])
    good = overlap >= 0.5
    expected = take_one_to_one(i[good], j[good], np.argsort(-overlap[good], kind="stable"))
    found = pair_regions(first, second)
    assert set(zip(*map(tuple, found), strict=True)) == set(zip(*map(tuple, expected), strict=True))


def test_pair_regions_of_none() -> None:
    none = np.empty((0, 2, 3))
    assert len(pair_regions(none, circle(0, 0, 1))[0]) == 0
    assert len(pair_regions(circle(0, 0, 1), none)[0]) == 0
