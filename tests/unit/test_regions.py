"""Overlap of elliptic regions and their pairing."""

from __future__ import annotations

import numpy as np
import pytest

from ckn_scale.core.regions import (
    centres_inside,
    overlap_regions,
    pair_regions,
    project_frames,
    take_one_to_one,
)


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
