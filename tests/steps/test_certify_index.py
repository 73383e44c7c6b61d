from __future__ import annotations

import math

import numpy as np
import pytest

from ckn_scale.steps.certify_index import copy_level, judge_hits, wilson_lower


def test_wilson_lower_has_the_known_values():
    # 95 % one-sided, z = 1.6449: n = 100, p = 0.9 → (0.9 + 0.01353 − 1.6449·√(0.0009 + 6.76e-5)) / 1.02706
    assert wilson_lower(90, 100, 0.95) == pytest.approx(0.8396, abs=5e-4)
    assert wilson_lower(0, 0, 0.95) == 0.0
    assert wilson_lower(0, 50, 0.95) == pytest.approx(0.0, abs=1e-9)


def test_wilson_lower_rises_with_evidence_and_stays_below_the_share():
    assert wilson_lower(9, 10, 0.95) < wilson_lower(90, 100, 0.95) < wilson_lower(900, 1000, 0.95) < 0.9
    assert wilson_lower(10, 10, 0.95) < 1.0


@pytest.mark.parametrize(
    ("hits", "outcome"),
    [
        ([7, 1, 2], "first"),
        ([3, 7, 1], "behind copies"),
        ([3, 4, 7], "behind copies"),
        ([3, 1, 7], "missed"),
        ([1, 7], "missed"),
        ([3, 4], "missed"),
        ([], "missed"),
    ],
)
def test_only_copies_may_stand_before_the_planted_image(hits, outcome):
    assert judge_hits(7, hits, {3, 4}.__contains__) == outcome


def test_copies_stand_out_of_the_collection_at_large():
    rng = np.random.default_rng(0)
    unrelated = rng.normal(0.05, 0.03, 500)
    level = copy_level([*unrelated, *np.full(60, 0.4)])  # a tenth of the collection are copies
    assert unrelated.max() < level < 0.4


def test_an_encoder_that_finds_all_images_alike_has_no_copies():
    rng = np.random.default_rng(0)
    alike = rng.normal(0.99, 0.002, 500)
    assert copy_level(list(alike)) > alike.max()


def test_nothing_is_a_copy_in_a_collection_of_one():
    assert copy_level([]) == math.inf
