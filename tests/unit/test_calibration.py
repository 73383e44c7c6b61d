"""Thresholds are those of the tail that chance makes, also where real matches hide among random pairs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ckn_scale.core.calibration import Calibration, fit_calibration, fit_tail, list_thresholds


def draw_inliers(pairs: int, mean: float, seed: int = 0) -> np.ndarray:
    """Geometric from 2 on, as the tails of random pairs are."""
    return np.random.default_rng(seed).geometric(1 / (1 + mean), pairs) + 1


@pytest.mark.parametrize("mean", [0.6, 1.0, 2.0])
def test_thresholds_fitted_on_a_part_hold_on_the_rest(mean):
    inliers = draw_inliers(1_002_000, mean)
    tail = fit_tail(Counter(inliers[:2000].tolist()))
    held_out = inliers[2000:]
    for rate in (1e-3, 1e-4):
        assert np.mean(held_out >= tail.threshold(rate)) <= rate
    exact = 2 + np.log(1e-6) / np.log(mean / (1 + mean))
    assert exact <= tail.threshold(1e-6) <= 1.5 * exact + 3  # not more than caution asks for


def test_real_matches_among_random_pairs_do_not_raise_the_threshold():
    inliers = draw_inliers(2000, 1.0)
    clean = fit_tail(Counter(inliers.tolist()))
    inliers[::50] = np.random.default_rng(1).integers(40, 300, 40)  # two of a hundred show the same
    mixed = fit_tail(Counter(inliers.tolist()))
    assert 38 <= mixed.outliers <= 45
    assert clean.threshold(1e-6) - 2 <= mixed.threshold(1e-6) <= clean.threshold(1e-6) + 3


def test_weak_real_matches_do_not_stretch_the_tail_one_by_one():
    """A small collection of groups: one pair in sixty shows the same scene, some of them barely."""
    inliers = draw_inliers(709, 0.4)
    clean = fit_tail(Counter(inliers.tolist()))
    inliers[:11] = [10, 10, 12, 14, 17, 20, 28, 30, 34, 90, 95]
    assert fit_tail(Counter(inliers.tolist())).threshold(1e-6) <= clean.threshold(1e-6) + 3


def test_real_matches_of_all_strengths_do_not_raise_the_threshold():
    """Of 10,948 pictures rendered from 1,820 photographs: one pair in fifty shares a photograph."""
    chance = {1: 41, 2: 617, 3: 829, 4: 164, 5: 42, 6: 17, 7: 2, 8: 1, 9: 1}
    shared = {
        10: 5,
        11: 7,
        14: 2,
        15: 2,
        16: 1,
        17: 1,
        18: 2,
        21: 2,
        23: 1,
        24: 1,
        29: 1,
        30: 2,
        39: 1,
        89: 1,
    }
    clean, mixed = fit_tail(chance), fit_tail({**chance, **shared})
    assert abs(mixed.threshold(1e-6) - clean.threshold(1e-6)) <= 4
    assert 25 <= mixed.outliers <= 33


def test_few_pairs_leave_the_defaults_and_many_overrule_them():
    default = fit_tail({})
    assert 8 <= default.threshold(1e-6) <= 30
    few = fit_tail(Counter(draw_inliers(20, 1.0).tolist()))
    assert abs(few.threshold(1e-6) - default.threshold(1e-6)) <= 5
    long = fit_tail(Counter(draw_inliers(20_000, 3.0).tolist()))
    assert long.threshold(1e-6) > default.threshold(1e-6) + 10


def test_the_rate_of_a_threshold_is_at_most_what_was_asked_for():
    tail = fit_tail(Counter(draw_inliers(2000, 1.0).tolist()))
    for rate in (1e-2, 1e-3, 1e-6, 1e-9):
        assert tail.rate(tail.threshold(rate)) <= rate < tail.rate(tail.threshold(rate) - 1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        tail.threshold(0)


def test_stricter_rates_ask_for_more():
    assert list(list_thresholds(fit_tail({})).values()) == sorted(list_thresholds(fit_tail({})).values())


def test_scores_rise_from_random_pairs_to_planted_views():
    rng = np.random.default_rng(0)
    random, planted = rng.uniform(-10, -7, 400), rng.uniform(-3, 4, 100)
    fitted = fit_calibration({2: 400}, planted, random)
    scores = fitted.score(np.array([-10.0, -7, -6, -4, -3, 4]))
    assert (np.diff(scores) > 0).all()
    assert scores[1] < 0.1
    assert scores[4] > 0.9
    assert ((scores >= 0) & (scores <= 1)).all()


def test_what_is_stronger_than_random_pairs_scores_high_however_easy_planted_views_are():
    rng = np.random.default_rng(0)
    random = -13 + rng.gamma(2.0, 0.4, 1400)
    random[:14] = rng.uniform(-9, -4, 14)  # real ones, which their inliers give away
    inliers = Counter({2: 1386, 25: 14})
    fitted = fit_calibration(inliers, planted=np.full(100, 5.0), random=random)
    chance, weak, strong = fitted.score(np.array([np.quantile(random, 0.9), -7.0, 5.0]))
    assert chance < 0.2
    assert weak > 0.8
    assert strong > 0.99
    hard = fit_calibration(inliers, planted=np.full(100, -10.5), random=random)
    assert hard.score(np.array([-10.5]))[0] >= 0.5


def test_without_measurements_the_curve_is_the_default():
    fitted, default = fit_calibration({}, np.empty(0), np.empty(0)), Calibration()
    assert (fitted.slope, fitted.middle) == pytest.approx((default.slope, default.middle))
    assert fitted.thresholds == default.thresholds
    assert default.is_match(np.array([0, default.min_inliers - 1, default.min_inliers])).tolist() == [
        False,
        False,
        True,
    ]
