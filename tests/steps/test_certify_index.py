from __future__ import annotations

import math

import numpy as np
import pytest

from ckn_scale.core.evidence import HEAD, SHORTLIST, Evidence
from ckn_scale.core.ranking import Ranking
from ckn_scale.steps.certify_index import Before, PlantedQuery, copy_level, judge, wilson_lower
from ckn_scale.storage.stored_files import StoredFile


def test_wilson_lower_has_the_known_values():
    # 95 % one-sided, z = 1.6449: n = 100, p = 0.9 → (0.9 + 0.01353 − 1.6449·√(0.0009 + 6.76e-5)) / 1.02706
    assert wilson_lower(90, 100, 0.95) == pytest.approx(0.8396, abs=5e-4)
    assert wilson_lower(0, 0, 0.95) == 0.0
    assert wilson_lower(0, 50, 0.95) == pytest.approx(0.0, abs=1e-9)


def test_wilson_lower_rises_with_evidence_and_stays_below_the_share():
    assert wilson_lower(9, 10, 0.95) < wilson_lower(90, 100, 0.95) < wilson_lower(900, 1000, 0.95) < 0.9
    assert wilson_lower(10, 10, 0.95) < 1.0


@pytest.mark.parametrize(
    ("copies", "others", "outcome"),
    [
        (0, 0, "first"),
        (1, 0, "behind copies"),
        (99, 0, "behind copies"),
        (100, 0, "missed"),
        (0, 1, "missed"),
        (3, 1, "missed"),
    ],
)
def test_only_copies_may_stand_before_the_planted_image(copies, others, outcome):
    assert judge(Before(copies=copies, others=others)) == outcome


def test_an_original_that_would_not_be_verified_is_missed():
    assert judge(Before(nearer=SHORTLIST - 1, ahead=HEAD - 1)) == "first"
    assert judge(Before(nearer=SHORTLIST)) == judge(Before(ahead=HEAD)) == "missed"


def make_candidates(inliers: dict[int, int]) -> Ranking:
    ids, similarity = np.array([9, 3, 7, 8, 1]), np.array([0.6, 0.5, 0.5, 0.5, 0.4], np.float32)
    evidence = {one: Evidence(inliers=count) for one, count in inliers.items()}
    return Ranking(ids, similarity, np.full(5, 0.1), evidence, {})


def test_what_comes_before_an_original_is_stronger_or_at_a_tie_has_a_smaller_id():
    file = StoredFile("", "", 1, 1)
    query = PlantedQuery(7, 0, np.ones(2), file, np.ones(2), None, 0.5, selective=0.1, inliers=20)
    alike = make_candidates(dict.fromkeys([9, 3, 7, 8, 1], 20))
    assert query.list_before(alike).tolist() == [9, 3]
    assert query.count_nearer(alike) == (2, 2)
    verified = make_candidates({7: 20, 1: 90})
    assert query.list_before(verified).tolist() == [1], "geometry decides"
    assert query.count_nearer(verified) == (2, 2), "and says nothing about the shortlist and the head"


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
