"""Answers with evidence are the same however the index is cut, and only what was found is called found."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from synthetic_index import publish_synthetic, random_units
from synthetic_points import OTHER_SIZE, TRANSFORM, make_candidates, make_query, serialise_candidates

from ckn_scale.core.calibration import Calibration
from ckn_scale.core.evidence import HEAD
from ckn_scale.errors import CorruptData, InputError
from ckn_scale.search.engine import Index
from ckn_scale.search.evidence import Query, score_points_of, verify_points_of
from ckn_scale.search.shard import ShardGroup

NUM_IMAGES = 240
SHARED = {7: 60, 40: 35, 41: 35, 90: 20}  # points that images share with the query; 40 and 41 equally many
POINTLESS = (5, 80)
NO_MODEL = SimpleNamespace(points=None)


@pytest.fixture(scope="module")
def points():
    counts = [SHARED.get(one, 0) for one in range(NUM_IMAGES)]
    return make_candidates(make_query(), counts, others=60)


@pytest.fixture(scope="module")
def vectors():
    return random_units(NUM_IMAGES, seed=3)


def open_cut(folder, points, vectors, num_shards, encoder=NO_MODEL, **options):
    sets, frames, _ = points

    def make_points(ids):
        file = serialise_candidates(ids, sets, frames, rows=ids)
        assert len(file)
        return file

    made = publish_synthetic(folder / "run", vectors, num_shards, make_points=make_points, **options)
    shards = ShardGroup(made.run.store, made.manifest)
    return Index(made.version, encoder, shards, run_url=made.run.url)


@pytest.fixture(scope="module")
def index(points, vectors, tmp_path_factory):
    return open_cut(tmp_path_factory.mktemp("whole"), points, vectors, 1)


def query_like(vectors, image_id):
    return Query(vectors[image_id], make_query())


def as_forms(answers):
    return [[hit.to_form() for hit in answer] for answer in answers]


def test_what_shares_points_is_found_with_its_place(index, vectors):
    answer = index.search_queries([query_like(vectors, 0)], k=8)[0]
    assert answer.found is True
    assert [hit.image_id for hit in answer if hit.match] == [7, 40, 41, 90][: sum(h.match for h in answer)]
    best = answer[0]
    assert best.image_id == 7
    assert best.inliers > 40
    np.testing.assert_allclose(np.array(best.transform)[:2], TRANSFORM[:2], atol=2, rtol=0.03)
    assert 0 <= best.box[0] < best.box[2] <= OTHER_SIZE[0]
    assert best.score > 0.9
    scores = [hit.score for hit in answer]
    assert scores == sorted(scores, reverse=True)
    assert 0 <= scores[-1] < 0.1
    assert answer[-1].box is None


def test_nothing_is_found_for_what_nothing_shows(index, vectors):
    unrelated = Query(vectors[0], make_query(seed=77))
    answer = index.search_queries([unrelated], k=5)[0]
    assert answer.found is False
    assert len(answer) == 5
    assert not any(hit.match for hit in answer)
    assert max(hit.score for hit in answer) < 0.5  # though the vector of one is its own


@pytest.mark.parametrize("num_shards", [2, 7, 260])  # the last one has empty shards
def test_an_answer_does_not_depend_on_the_cut(num_shards, index, points, vectors, tmp_path):
    cut = open_cut(tmp_path, points, vectors, num_shards)
    queries = [query_like(vectors, 0), Query(vectors[9], make_query(seed=77)), query_like(vectors, 90)]
    for k in (1, 10, NUM_IMAGES + 5):
        expected = as_forms(index.search_queries(queries, k))
        assert as_forms(cut.search_queries(queries, k)) == expected
        assert [len(hits) for hits in expected] == [min(k, NUM_IMAGES)] * 3


def test_groups_give_the_same_evidence_as_the_whole(index, points, vectors, tmp_path):
    cut = open_cut(tmp_path, points, vectors, 5)
    whole, query, manifest = index._shards, make_query(), cut._shards
    ids = np.array([90, 3, 7, 41, 150, 0])
    scores, evidence = score_points_of(whole, query, ids), verify_points_of(whole, query, ids)
    assert score_points_of(manifest, query, ids).tolist() == scores.tolist()
    for one, other in zip(verify_points_of(manifest, query, ids), evidence, strict=True):
        assert (one.inliers, one.box, one.kind) == (other.inliers, other.box, other.kind)
        assert np.array_equal(one.transform, other.transform)


def test_batched_queries_get_what_they_get_alone(index, vectors):
    queries = [query_like(vectors, one) for one in (0, 12, 40)]
    together = as_forms(index.search_queries(queries, 10))
    assert together == [as_forms(index.search_queries([one], 10))[0] for one in queries]


def test_without_verification_vectors_decide(index, vectors):
    answer = index.search_queries([query_like(vectors, 12)], 3, verify=False)[0]
    assert answer.found is None
    assert answer[0].image_id == 12
    assert answer[0].match is answer[0].inliers is answer[0].box is None
    assert answer[0].to_form().keys() == {"image_id", "uri", "score", "columns"}


def test_verified_forms_have_what_scripts_rely_on(index, vectors):
    form = index.search_queries([query_like(vectors, 0)], 1)[0][0].to_form()
    assert {"image_id", "uri", "score", "match", "inliers", "box", "transform"} <= form.keys()
    assert form["match"] is True
    assert len(form["box"]) == 4


def test_only_the_head_is_verified_and_the_rest_keeps_its_place(index, vectors):
    answer = index.search_queries([query_like(vectors, 0)], NUM_IMAGES)[0]
    assert len(answer) == NUM_IMAGES > HEAD
    assert sorted(hit.image_id for hit in answer) == list(range(NUM_IMAGES))


def test_a_filter_keeps_what_it_admits(index, vectors):
    answer = index.search_queries([query_like(vectors, 0)], 5, filter="image_id in 40,41,3")[0]
    assert [hit.image_id for hit in answer] == [40, 41, 3]
    assert answer.found
    with pytest.raises(InputError, match="no such column"):
        index.search_queries([query_like(vectors, 0)], 5, filter="year>2000")


def test_deleted_images_are_in_no_answer(points, vectors, tmp_path):
    index = open_cut(tmp_path, points, vectors, 3, deleted=[7, 150])
    answer = index.search_queries([query_like(vectors, 0)], NUM_IMAGES)[0]
    assert {7, 150}.isdisjoint(hit.image_id for hit in answer)
    assert answer[0].image_id in (40, 41)


def test_images_without_points_and_queries_without_points_are_answered(points, vectors, tmp_path):
    sets, frames, _ = points

    def make_points(ids):
        kept = np.array([one for one in ids if one not in POINTLESS])
        file = serialise_candidates(kept, sets, frames, rows=kept)
        return file if len(kept) == len(ids) else _without(ids, sets, frames)

    made = publish_synthetic(tmp_path / "run", vectors, 4, make_points=make_points)
    index = Index(made.version, SimpleNamespace(), ShardGroup(made.run.store, made.manifest))
    answer = index.search_queries([query_like(vectors, 5)], NUM_IMAGES)[0]
    assert [hit.inliers for hit in answer if hit.image_id in POINTLESS] == [0, 0]
    nothing = replace(make_query(), words=make_query().words[:0], codes=make_query().codes[:0])
    answer = index.search_queries([Query(vectors[5], nothing)], 3)[0]
    assert answer.found is False
    assert len(answer) == 3


def _without(ids, sets, frames):
    """The points of these images, as if the detector had found none in some."""
    from ckn_scale.core.selective_matching import PointSets

    counts = [0 if one in POINTLESS else int(np.diff(sets.offsets)[one]) for one in ids]
    parts = [slice(sets.offsets[one], sets.offsets[one] + n) for one, n in zip(ids, counts, strict=True)]
    rows = np.concatenate([np.arange(part.start, part.stop) for part in parts])
    return serialise_candidates(
        ids, PointSets(sets.words[rows], sets.codes[rows], np.cumsum([0, *counts])), frames[rows]
    )


def test_an_index_without_points_is_searched_by_vectors_and_says_so(vectors, tmp_path):
    made = publish_synthetic(tmp_path / "run", vectors, 2)
    index = Index(made.version, SimpleNamespace(), ShardGroup(made.run.store, made.manifest), run_url="run")
    assert not index.can_verify
    assert index.search_queries([query_like(vectors, 3)], 2)[0].found is None
    with pytest.raises(InputError, match="no points to verify by"):
        index.search_queries([query_like(vectors, 3)], 2, verify=True)


def test_a_damaged_file_of_points_is_refused(points, vectors, tmp_path):
    index = open_cut(tmp_path, points, vectors, 2)
    path = next((tmp_path / "run" / "index").rglob("*.points"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptData):
        open_again(tmp_path, index)


def open_again(folder, index):
    from ckn_scale.search.versions import open_version
    from ckn_scale.storage.run_folder import RunFolder

    run = RunFolder.open(str(folder / "run"))
    return ShardGroup(run.store, open_version(run, index.version).manifest)


def test_points_of_other_images_are_refused(points, vectors, tmp_path):
    sets, frames, _ = points

    def make_points(ids):
        return serialise_candidates(ids + 1, sets, frames, rows=ids)

    made = publish_synthetic(tmp_path / "run", vectors, 2, make_points=make_points)
    with pytest.raises(CorruptData, match="same images"):
        ShardGroup(made.run.store, made.manifest)


def test_a_stricter_calibration_finds_less(index, vectors):
    strict = Index(
        1, SimpleNamespace(), index._shards, calibration=Calibration({"1e-06": 45}, slope=3.0, middle=2.0)
    )
    answer = strict.search_queries([query_like(vectors, 0)], 8)[0]
    assert [hit.image_id for hit in answer if hit.match] == [7]


def test_expansion_finds_what_only_a_hit_shows(vectors, tmp_path):
    """Image 7 shares 60 points with the query; image 90 shares others with 7 and nothing with the query."""
    query = make_query()
    counts = [60 if one == 7 else 0 for one in range(NUM_IMAGES)]
    sets, frames, sizes = make_candidates(query, counts, others=60)
    part = slice(*sets.offsets[7:9])
    other = slice(*sets.offsets[90:92])
    lone = np.flatnonzero(~np.isin(sets.codes[part].view("V16").ravel(), query.codes.view("V16").ravel()))
    rows, chosen = np.arange(other.start, other.stop), part.start + lone[: other.stop - other.start]
    words, codes, moved = sets.words.copy(), sets.codes.copy(), frames.copy()
    words[rows[: len(chosen)]], codes[rows[: len(chosen)]] = sets.words[chosen], sets.codes[chosen]
    moved[rows[: len(chosen)]] = frames[chosen]
    order = np.lexsort((words, sets.image_of))
    changed = (replace(sets, words=words[order], codes=codes[order]), moved[order], sizes)
    centroids = np.random.default_rng(0).normal(size=(100, 128)).astype(np.float32) / 11
    indexes = [
        open_cut(
            tmp_path / str(cut),
            changed,
            vectors,
            cut,
            encoder=SimpleNamespace(points=SimpleNamespace(centroids=centroids)),
        )
        for cut in (1, 4)
    ]
    asked = [Query(vectors[11], query)]
    plain, expanded = (indexes[0].search_queries(asked, NUM_IMAGES, expand=one)[0] for one in (False, True))
    places = [[hit.image_id for hit in answer].index(90) for answer in (plain, expanded)]
    assert places[1] < 3 < places[0]
    assert as_forms(indexes[1].search_queries(asked, NUM_IMAGES, expand=True)) == as_forms([expanded])
    told_apart, cut = (one.search_queries(asked, NUM_IMAGES, expand="discriminative")[0] for one in indexes)
    assert [hit.image_id for hit in told_apart].index(90) < 3
    assert as_forms([cut]) == as_forms([told_apart]) != as_forms([expanded])


def test_expansion_without_a_hit_is_the_plain_answer_and_needs_verification(index, vectors):
    unrelated = [Query(vectors[0], make_query(seed=77))]
    assert as_forms(index.search_queries(unrelated, 9, expand=True)) == as_forms(
        index.search_queries(unrelated, 9)
    )
    with pytest.raises(InputError, match="exclude each other"):
        index.search_queries(unrelated, 9, expand=True, verify=False)
    with pytest.raises(ValueError, match="True, False or 'discriminative', got 'mean'"):
        index.search_queries(unrelated, 9, expand="mean")
