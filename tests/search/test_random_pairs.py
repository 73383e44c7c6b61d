"""Random pairs are the same whoever draws them, and never what can be found no more."""

from __future__ import annotations

import numpy as np
from synthetic_index import publish_synthetic, random_units
from synthetic_points import make_candidates, make_query, serialise_candidates

from ckn_scale.search.random_pairs import PairCounts, draw_others, expand_strengths
from ckn_scale.search.shard import ShardGroup


def open_group(folder, **options):
    sets, frames, _ = make_candidates(make_query(), [60] + [0] * 39, others=40)
    made = publish_synthetic(
        folder / "run",
        random_units(40),
        2,
        make_points=lambda ids: serialise_candidates(ids, sets, frames, rows=ids),
        **options,
    )
    return ShardGroup(made.run.store, made.manifest), made.vectors


def test_pairs_are_drawn_by_hash_among_what_can_be_found(tmp_path):
    group, _ = open_group(tmp_path, deleted=[4, 5, 6])
    drawn = draw_others(group, 3, 16)
    assert len(drawn) == 16
    assert np.array_equal(drawn, draw_others(group, 3, 16))
    assert not np.array_equal(drawn, draw_others(group, 8, 16)), "another query has others"
    every = draw_others(group, 3, 100)
    assert every.tolist() == [one for one in range(40) if one not in (3, 4, 5, 6)]


def test_pairs_are_counted_by_inliers_and_strength(tmp_path):
    group, vectors = open_group(tmp_path)
    counts, ids = PairCounts(), np.array([0, 10, 30])
    counts.add(group, make_query(), ids, group.compare(vectors[0], ids))
    assert sum(counts.inliers.values()) == sum(counts.strengths.values()) == 3
    assert max(counts.inliers) > 40
    assert sorted(counts.inliers)[0] <= 4
    report = counts.to_report()
    assert sum(count for _, count in report["inliers"]) == 3
    assert len(expand_strengths(counts.strengths)) == 3
    assert expand_strengths(counts.strengths).max() > expand_strengths(counts.strengths).min() + 4


def test_compare_gives_the_similarities_of_a_search(tmp_path):
    group, vectors = open_group(tmp_path)
    similarity, ids = group.find(vectors[:1], 40)
    assert group.compare(vectors[0], ids[0]).tolist() == similarity[0].tolist()
