from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from synthetic_index import DIM, add_short_codes, publish_synthetic, random_units

from ckn_scale.core.short_codes import learn_quantiser
from ckn_scale.errors import CorruptData
from ckn_scale.search.filters import Filter, only_ids
from ckn_scale.search.shard import ShardGroup
from ckn_scale.storage.index_files import read_manifest, write_manifest
from ckn_scale.storage.models import save_model

ROWS = 600
CUTS = {"one": [], "even": [200, 400], "unequal, one empty": [3, 3, 590]}
PLAIN = [("exact", None), ("signs", None)]  # without short codes
KINDS = [(stored, lists) for stored in ("exact", "signs") for lists in (0, 6)]


def make_vectors() -> np.ndarray:
    vectors = random_units(ROWS)
    vectors[100:500:20] = vectors[100]  # copies in all shards
    return vectors


def open_group(folder, stored, lists, cuts, depth=40, probes=3, deleted=(7, 120, 599)):
    vectors = make_vectors()
    index = publish_synthetic(folder, vectors, 1, deleted=deleted, kind=stored, cuts=CUTS[cuts])
    if lists is None:
        plain = ShardGroup(index.run.store, index.manifest)
        return plain, plain, index, index.manifest
    manifest = add_short_codes(index, lists=lists, depth=depth, probes=probes)
    manifest = read_manifest(index.run.store, write_manifest(index.run.store, "written", manifest))
    return ShardGroup(index.run.store, manifest), ShardGroup(index.run.store, index.manifest), index, manifest


@pytest.mark.parametrize(("stored", "lists"), PLAIN + KINDS)
@pytest.mark.parametrize("cuts", ["even", "unequal, one empty"])
def test_sharded_answers_are_those_of_one_shard(tmp_path, stored, lists, cuts):
    whole, *_ = open_group(tmp_path / "whole", stored, lists, "one")
    parts, *_ = open_group(tmp_path / "parts", stored, lists, cuts)
    queries = np.concatenate([make_vectors()[[100, 7, 300]], random_units(9, seed=5)])
    for k in (1, 10, 35, 100, 10**6):
        assert parts.search(queries, k) == whole.search(queries, k)
        assert [parts.search(query[None], k)[0] for query in queries] == whole.search(queries, k)
    some = Filter.parse("uri>=photos/0050.jpg", "uri<photos/0450.jpg")
    expected = whole.search(queries, 20, allowed=whole.allow(some))
    assert parts.search(queries, 20, allowed=parts.allow(some)) == expected
    assert all(50 <= hit.image_id < 450 for hits in expected for hit in hits)


@pytest.mark.parametrize(("stored", "lists"), KINDS)
def test_a_shortlist_of_all_rows_answers_like_a_comparison_of_all(tmp_path, stored, lists):
    group, plain, *_ = open_group(tmp_path, stored, lists, "unequal, one empty", depth=ROWS)
    queries = random_units(5, seed=5)
    assert group.search(queries, 25) == plain.search(queries, 25)
    assert group.search(queries, 10**6) == plain.search(queries, 10**6)


@pytest.mark.parametrize(("stored", "lists"), KINDS)
def test_scores_are_those_of_the_rows_and_deleted_images_stay_away(tmp_path, stored, lists):
    group, plain, *_ = open_group(tmp_path, stored, lists, "even")
    queries = np.concatenate([make_vectors()[[120, 7]], random_units(3, seed=5)])
    every = [{hit.image_id: hit.score for hit in hits} for hits in plain.search(queries, ROWS)]
    for hits, scores in zip(group.search(queries, 30), every, strict=True):
        assert len(hits) == 30
        assert all(hit.score == scores[hit.image_id] for hit in hits)
        assert not {7, 120, 599} & {hit.image_id for hit in hits}
    copies = [hit.image_id for hit in group.search(queries[:1], 19)[0]]
    assert copies == [image_id for image_id in range(100, 500, 20) if image_id != 120]


@pytest.mark.parametrize(("stored", "lists"), KINDS)
def test_a_filter_that_admits_few_compares_them_all(tmp_path, stored, lists):
    group, plain, *_ = open_group(tmp_path, stored, lists, "even", depth=10, probes=1)
    few = only_ids([5, 7, 301, 302, 598])
    query = -make_vectors()[5:6]
    found = group.search(query, 10, allowed=group.allow(few))
    assert found == plain.search(query, 10, allowed=plain.allow(few))
    assert {hit.image_id for hit in found[0]} == {5, 301, 302, 598}
    assert group.search(query, 3, allowed=group.allow(only_ids([7]))) == [[]]


def test_a_group_of_some_shards_and_of_none(tmp_path):
    group, _, index, manifest = open_group(tmp_path, "signs", 6, "even")
    part = ShardGroup(index.run.store, manifest, [1])
    assert {hit.image_id for hit in part.search(random_units(1, seed=3), 500)[0]} == set(range(200, 400))
    assert ShardGroup(index.run.store, manifest, []).search(random_units(2), 3) == [[], []]
    assert group.search(np.empty((0, DIM), np.float32), 3) == []


def test_what_belongs_to_other_vectors_is_refused(tmp_path):
    _, _, index, manifest = open_group(tmp_path, "exact", 0, "even")
    other = np.random.default_rng(0).standard_normal((40, 2 * DIM)).astype(np.float32)
    wrong = save_model(index.run.store, "quantiser", learn_quantiser(other, 0).to_part())
    spec = replace(manifest.short_codes, quantiser=wrong)
    with pytest.raises(CorruptData, match=r"is for vectors of 32 numbers, the index has 16"):
        ShardGroup(index.run.store, replace(manifest, short_codes=spec))
    first, second, third = manifest.shards
    crossed = (first, second, replace(third, codes=replace(third.codes, sha256="0" * 64)))
    with pytest.raises(CorruptData, match="has sha256"):
        ShardGroup(index.run.store, replace(manifest, shards=crossed))
    path = index.run.store.local_path(first.codes.path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptData):
        ShardGroup(index.run.store, manifest)
    with pytest.raises(ValueError, match="not those of all of its shards"):
        write_manifest(
            index.run.store, "x", replace(manifest, shards=(replace(first, codes=None), second, third))
        )
