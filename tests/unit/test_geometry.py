"""Geometry finds the map that some of the matches obey, says which, and never depends on company."""

from __future__ import annotations

import numpy as np
import pytest

from ckn_scale.core.fit_transforms import MAX_HYPOTHESES
from ckn_scale.core.geometry import Verification, verify_candidates, verify_matches
from ckn_scale.core.keypoints import Keypoints
from ckn_scale.core.packed_points import pack_frames, unpack_frames

SIZE = (640, 480)
AFFINE = np.array([[0.8, -0.3, 90.0], [0.25, 0.9, -20.0], [0, 0, 1]])
HOMOGRAPHY = np.array([[0.8, -0.2, 80.0], [0.15, 0.95, 10.0], [4e-4, -3e-4, 1]])


def project(transform: np.ndarray, points: np.ndarray) -> np.ndarray:
    there = np.concatenate([points, np.ones((len(points), 1))], axis=1) @ transform.T
    return there[:, :2] / there[:, 2:]


def make_frames(rng: np.random.Generator, count: int) -> np.ndarray:
    frames = np.empty((count, 2, 3))
    angles = rng.uniform(0, 2 * np.pi, count)
    turns = np.stack([np.cos(angles), -np.sin(angles), np.sin(angles), np.cos(angles)], axis=1)
    shapes = np.array([[1.2, 0], [0.1, 1 / 1.2]]) @ turns.reshape(-1, 2, 2)
    frames[:, :, :2] = rng.uniform(2, 12, (count, 1, 1)) * shapes
    frames[:, :, 2] = rng.uniform(20, np.array(SIZE) - 20, (count, 2))
    return frames


def carry(frames: np.ndarray, transform: np.ndarray) -> np.ndarray:
    """The frames in the other image, by differences: independent of the code under test."""
    there = np.empty_like(frames)
    centre, step = frames[:, :, 2], 1e-4
    there[:, :, 2] = project(transform, centre)
    for column in range(2):
        ahead = project(transform, centre + step * frames[:, :, column])
        there[:, :, column] = (ahead - there[:, :, 2]) / step
    return there


def make_matches(
    transform: np.ndarray, right: int, wrong: int, seed: int = 0, noise_px: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Right ones first; wrong ones lie anywhere, but far from where they should."""
    rng = np.random.default_rng(seed)
    first = make_frames(rng, right + wrong)
    second = carry(first, transform)
    second[:, :, 2] += rng.normal(0, noise_px, (len(second), 2))
    away = rng.uniform(0, 2 * np.pi, wrong)
    second[right:, :, 2] += rng.uniform(60, 200, (wrong, 1)) * np.stack([np.cos(away), np.sin(away)], axis=1)
    second[right:, :, :2] = make_frames(rng, wrong)[:, :, :2]
    return first, second


def error_px(found: Verification, transform: np.ndarray) -> float:
    assert found.transform is not None
    x, y = np.meshgrid(np.linspace(0, SIZE[0], 9), np.linspace(0, SIZE[1], 9))
    grid = np.stack([x.ravel(), y.ravel()], axis=1)
    return float(np.linalg.norm(project(found.transform, grid) - project(transform, grid), axis=1).max())


def assert_same(one: Verification, other: Verification) -> None:
    np.testing.assert_array_equal(one.inliers, other.inliers)
    assert (one.kind, one.box) == (other.kind, other.box)
    if one.transform is None:
        assert other.transform is None
    else:
        np.testing.assert_array_equal(one.transform, other.transform)


@pytest.mark.parametrize(("right", "wrong"), [(30, 0), (30, 70), (12, 150), (40, 360)])
def test_verify_matches_recovers_an_affine_map(right, wrong):
    first, second = make_matches(AFFINE, right, wrong)
    found = verify_matches(first, second, SIZE, SIZE)
    assert set(range(right)) <= set(found.inliers.tolist())
    assert len(found.inliers) <= right + 2  # a wrong one may lie where it should by chance
    assert error_px(found, AFFINE) < 1e-3
    assert found.transform.shape == (3, 3)
    assert found.inliers.dtype == np.int64


@pytest.mark.parametrize(("right", "wrong"), [(40, 0), (40, 60), (40, 360)])
def test_verify_matches_recovers_a_homography(right, wrong):
    first, second = make_matches(HOMOGRAPHY, right, wrong)
    found = verify_matches(first, second, SIZE, SIZE)
    assert found.kind == "homography"
    assert set(range(right)) <= set(found.inliers.tolist())
    assert error_px(found, HOMOGRAPHY) < 0.01


def test_verify_matches_averages_noise():
    """Frames as they are stored, in nine bytes, with positions two pixels off."""
    first, second = make_matches(AFFINE, 60, 60, noise_px=2.0)
    width, height = 1000, 1000
    stored = [
        unpack_frames(
            pack_frames(Keypoints(one.astype(np.float32), np.ones(120)), width, height), width, height
        )
        for one in (first, second)
    ]
    found = verify_matches(stored[0].frames, stored[1].frames, SIZE, SIZE)
    assert len(set(found.inliers.tolist()) & set(range(60))) >= 57
    assert error_px(found, AFFINE) < 4


def test_verify_matches_needs_many_for_a_homography():
    first, second = make_matches(HOMOGRAPHY, 6, 0)
    found = verify_matches(first, second, SIZE, SIZE)
    assert found.kind == "affine"
    assert found.transform[2].tolist() == [0, 0, 1]


def test_the_box_surrounds_the_inliers_in_the_second_image():
    first, second = make_matches(AFFINE, 25, 25)
    found = verify_matches(first, second, SIZE, SIZE)
    points = second[found.inliers, :, 2]
    assert found.box == (*points.min(axis=0), *points.max(axis=0))


def test_a_match_must_land_near_in_both_images():
    """A map that shrinks everything onto one place would explain whatever lies there."""
    rng = np.random.default_rng(0)
    first, second = make_frames(rng, 40), make_frames(rng, 40)
    second[:, :, 2] = rng.uniform((295, 195), (305, 205), (40, 2))
    second[:, :, :2] = 0.01 * np.eye(2)
    assert len(verify_matches(first, second, SIZE, SIZE).inliers) <= 4


def test_a_mirror_image_is_no_map():
    first, _ = make_matches(AFFINE, 20, 0)
    second = carry(first, np.array([[-1.0, 0, 640], [0, 1, 0], [0, 0, 1]]))
    assert_same(verify_matches(first, second, SIZE, SIZE), Verification(np.empty(0, np.int64)))


def test_inliers_reach_as_far_as_the_share_says():
    first, second = make_matches(AFFINE, 30, 0)
    second[0, :, 2] += (10, 0)  # the longer side is 640
    near = verify_matches(first, second, SIZE, SIZE, inlier_share=0.02)
    assert near.inliers.tolist() == list(range(30))
    assert verify_matches(first, second, SIZE, SIZE, inlier_share=0.01).inliers.tolist() == list(range(1, 30))


@pytest.mark.parametrize("transform", [AFFINE, HOMOGRAPHY], ids=["affine", "homography"])
@pytest.mark.parametrize("wrong", [40, 2 * MAX_HYPOTHESES])
def test_the_order_of_matches_hardly_matters(transform, wrong):
    first, second = make_matches(transform, 50, wrong, noise_px=1.5)
    plain = verify_matches(first, second, SIZE, SIZE)
    assert_same(plain, verify_matches(first, second, SIZE, SIZE))
    order = np.random.default_rng(1).permutation(len(first))
    mixed = verify_matches(first[order], second[order], SIZE, SIZE)
    assert set(range(50)) <= set(plain.inliers) & set(order[mixed.inliers])
    assert mixed.kind == plain.kind
    assert error_px(mixed, transform) < 2 * error_px(plain, transform) + 1


def test_a_candidate_gets_the_same_alone_and_in_company():
    cases = [(AFFINE, 30, 70), (HOMOGRAPHY, 60, 20), (AFFINE, 0, 90), (AFFINE, 1, 0), (HOMOGRAPHY, 40, 180)]
    pairs = [
        make_matches(transform, right, wrong, seed, noise_px=1.0)
        for seed in range(6)
        for transform, right, wrong in cases
    ]
    pairs.insert(3, (np.empty((0, 2, 3)), np.empty((0, 2, 3))))
    first, second = (np.concatenate([pair[side] for pair in pairs]) for side in range(2))
    offsets = np.cumsum([0, *(len(pair[0]) for pair in pairs)])
    sizes = np.array([(640 + 10 * k, 480) for k in range(len(pairs))])
    together = verify_candidates(first, second, offsets, SIZE, sizes)
    assert len(together) == len(pairs)
    for pair, size, found in zip(pairs, sizes.tolist(), together, strict=True):
        assert_same(found, verify_matches(*pair, SIZE, tuple(size)))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_matches_keep_what_their_frames_say(count):
    first, second = make_matches(AFFINE, count, 0)
    found = verify_matches(first, second, SIZE, SIZE)
    assert found.inliers.tolist() == list(range(count))
    assert error_px(found, AFFINE) < 0.1


def test_no_match_gives_nothing():
    nothing = np.empty((0, 2, 3), np.float32)
    found = verify_matches(nothing, nothing, SIZE, SIZE)
    assert_same(found, Verification(np.empty(0, np.int64)))
    assert verify_candidates(nothing, nothing, np.array([0]), SIZE, np.empty((0, 2))) == []


def test_equal_matches_are_one_hypothesis():
    first, second = make_matches(AFFINE, 1, 0)
    found = verify_matches(np.repeat(first, 20, axis=0), np.repeat(second, 20, axis=0), SIZE, SIZE)
    assert found.inliers.tolist() == list(range(20))
    assert error_px(found, AFFINE) < 0.1


def test_points_on_a_line_leave_the_rest_to_the_frames():
    first, _ = make_matches(AFFINE, 30, 0)
    first[:, 1, 2] = 100 + 0.3 * first[:, 0, 2]
    found = verify_matches(first, carry(first, AFFINE), SIZE, SIZE)
    assert found.inliers.tolist() == list(range(30))
    assert error_px(found, AFFINE) < 0.1


def test_frames_without_area_propose_nothing():
    first, second = make_matches(AFFINE, 20, 0)
    first[::2, :, :2] = 0
    assert len(verify_matches(first, second, SIZE, SIZE).inliers) == 20
    first[:, :, :2] = 0
    assert len(verify_matches(first, second, SIZE, SIZE).inliers) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first": np.zeros((4, 2, 2))}, r"\(N, 2, 3\) twice, got \(4, 2, 2\)"),
        ({"second": np.zeros((3, 2, 3))}, r"got \(4, 2, 3\) and \(3, 2, 3\)"),
        ({"first": np.full((4, 2, 3), np.nan)}, "must be finite"),
        ({"offsets": np.array([0, 3])}, "from 0 to the 4 matches"),
        ({"offsets": np.array([1, 4])}, "from 0 to the 4 matches"),
        ({"offsets": np.array([0, 5, 4]), "second_sizes_px": np.ones((2, 2))}, "must not decrease"),
        ({"second_sizes_px": np.ones((2, 2))}, r"1 candidates need as many sizes \(C, 2\), got \(2, 2\)"),
        ({"inlier_share": 0.0}, "between 0 and 1, got 0.0"),
    ],
)
def test_bad_input_is_refused_with_its_value(change, message):
    given = {
        "first": np.ones((4, 2, 3)),
        "second": np.ones((4, 2, 3)),
        "offsets": np.array([0, 4]),
        "first_size_px": SIZE,
        "second_sizes_px": np.array([SIZE]),
    }
    with pytest.raises(ValueError, match=message):
        verify_candidates(**(given | change))


def test_input_stays_as_it_is():
    first, second = make_matches(HOMOGRAPHY, 30, 30)
    before = first.copy(), second.copy()
    verify_matches(first, second, SIZE, SIZE)
    np.testing.assert_array_equal(first, before[0])
    np.testing.assert_array_equal(second, before[1])


def test_a_fit_never_stretches_more_than_a_hypothesis_may():
    """Frames that say nothing of it, on positions that one map twenty times as tall would explain."""
    rng = np.random.default_rng(0)
    first = np.tile(np.eye(2, 3), (80, 1, 1))
    first[:, :, 2] = rng.uniform((20, 0), (620, 22), (80, 2))
    second = first.copy()
    second[:, 1, 2] *= 20
    assert len(verify_matches(first, second, SIZE, SIZE).inliers) < 40
    second[:, 1, 2] /= 4
    assert len(verify_matches(first, second, SIZE, SIZE).inliers) == 80
