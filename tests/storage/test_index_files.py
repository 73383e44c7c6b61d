from __future__ import annotations

import dataclasses
import re

import numpy as np
import pyarrow as pa
import pytest
from synthetic_index import publish_synthetic, random_units, side_rows

from ckn_scale.core.vector_index import build_exact
from ckn_scale.errors import CorruptData
from ckn_scale.storage.index_files import (
    ROWS_PER_BATCH,
    IndexManifest,
    make_side_table,
    open_side_table,
    read_ids,
    read_manifest,
    write_index_shard,
    write_manifest,
    write_tombstones,
)
from ckn_scale.storage.store import Store
from ckn_scale.storage.stored_files import StoredFile


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "run"))


def write_shard(store, ids, folder="index/b-1", shard=3):
    vectors = random_units(len(ids))
    return write_index_shard(store, folder, shard, build_exact(vectors, ids).to_bytes(), side_rows(ids))


def test_a_shard_records_rows_ids_sizes_and_hashes(store):
    shard = write_shard(store, np.array([4, 7, 9]))
    assert (shard.shard, shard.rows, shard.first_id, shard.last_id) == (3, 3, 4, 9)
    assert shard.index.path == "index/b-1/shard-00003.faiss"
    assert store.size(shard.table.path) == shard.table.size_bytes


def test_a_shard_without_rows_is_written_too(store):
    shard = write_shard(store, np.array([], dtype=np.int64))
    assert (shard.rows, shard.first_id, shard.last_id) == (0, -1, -1)


def test_a_side_table_comes_back_mapped_and_does_not_depend_on_its_chunks(store):
    ids = np.arange(ROWS_PER_BATCH + 10)
    whole = side_rows(ids)
    cut = pa.concat_tables([whole.slice(0, 7), whole.slice(7)])
    first = write_index_shard(store, "index/b-1", 0, b"", whole)
    second = write_index_shard(store, "index/b-2", 0, b"", cut)
    assert first.table.sha256 == second.table.sha256
    before = pa.total_allocated_bytes()
    table = open_side_table(store.local_path(first.table.path))
    assert pa.total_allocated_bytes() - before < 1000
    assert table.equals(whole)


def test_a_manifest_comes_back_equal(store):
    shard = write_shard(store, np.array([4, 7, 9]))
    models = {"encoder": StoredFile("models/x", "00", 1)}
    shard = dataclasses.replace(shard, points=StoredFile("index/b-1/points", "00", 1))
    tombstones = write_tombstones(store, "index/b-1", np.array([4, 9]))
    manifest = IndexManifest("b", 16, 1, models, (shard,), generation=2, tombstones=tombstones)
    file = write_manifest(store, "index/b-1", manifest)
    assert read_manifest(store, file) == manifest
    assert read_ids(store, manifest.tombstones).tolist() == [4, 9]
    assert read_ids(store, shard.ids).tolist() == [4, 7, 9]


def test_without_tombstones_there_is_no_file_of_them(store):
    assert write_tombstones(store, "index/b-1", np.empty(0, np.int64)) is None
    assert read_ids(store, None).tolist() == []


def test_a_changed_or_missing_manifest_is_damage(tmp_path):
    index = publish_synthetic(tmp_path / "run", random_units(4), 1)
    file = index.run.versions.latest().manifest
    path = index.run.store.local_path(file.path)
    path.write_bytes(path.read_bytes().replace(b'"rows": 4', b'"rows": 5'))
    with pytest.raises(CorruptData, match="its sha256 is not the recorded one"):
        read_manifest(index.run.store, file)
    path.unlink()
    with pytest.raises(CorruptData, match="is gone, though a record names it"):
        read_manifest(index.run.store, file)


def test_a_manifest_of_a_later_format_is_refused(store):
    file = write_manifest(store, "index/b-1", IndexManifest("b", 16, 0, {}, (), format=9))
    with pytest.raises(CorruptData, match="has format 9; this release reads 3"):
        read_manifest(store, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 8}, "says 8 rows, its shards hold 3"),
        ({"metric": "l2"}, "metric must be inner_product, got l2"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(store, change, message):
    manifest = IndexManifest("b", 16, 3, {}, (write_shard(store, np.array([4, 7, 9])),))
    with pytest.raises(ValueError, match=message):
        write_manifest(store, "index/b-1", dataclasses.replace(manifest, **change))


def test_shards_of_one_number_are_refused(store):
    shard = write_shard(store, np.array([4, 7, 9]))
    with pytest.raises(ValueError, match=re.escape("must differ, got [3, 3]")):
        write_manifest(store, "index/b-1", IndexManifest("b", 16, 6, {}, (shard, shard)))


def test_shards_whose_ids_overlap_are_refused(store):
    shards = (write_shard(store, np.array([4, 9])), write_shard(store, np.array([9, 12]), shard=5))
    with pytest.raises(ValueError, match="apart from each other, got 9 before 9"):
        write_manifest(store, "index/b-1", IndexManifest("b", 16, 4, {}, shards))


def test_side_tables_of_another_form_are_refused(store):
    with pytest.raises(ValueError, match="needs the column uri"):
        write_index_shard(store, "index/b-1", 0, b"", side_rows(np.arange(2)).drop_columns(["uri"]))
    with pytest.raises(ValueError, match="must ascend"):
        write_index_shard(store, "index/b-1", 0, b"", side_rows(np.array([2, 1])))
    with pytest.raises(ValueError, match="may not be named 'uri'"):
        make_side_table([1], ["a"], pa.table({"uri": ["b"]}))


def test_kept_columns_may_be_missing():
    assert make_side_table([1, 2], ["a", "b"]).column_names == ["image_id", "uri"]
