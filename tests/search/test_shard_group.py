from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
from synthetic_index import commit_thumbnails, publish_synthetic, random_units

from ckn_scale.errors import CorruptData
from ckn_scale.search import cache as cache_module
from ckn_scale.search.cache import FileCache
from ckn_scale.search.shard import Hit, ShardGroup, merge_hits
from ckn_scale.search.versions import assign_shards
from ckn_scale.storage.stored_files import write_file


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return publish_synthetic(tmp_path_factory.mktemp("group") / "run", random_units(60), 4)


def test_search_gives_hits_with_uri_score_and_kept_columns(index):
    hits = ShardGroup(index.run.store, index.manifest).search(index.vectors[33:34], 3)[0]
    assert hits[0] == Hit(33, "photos/0033.jpg", pytest.approx(1.0, abs=1e-6), {"label": "label 33"})
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


@pytest.mark.parametrize("num_groups", [1, 2, 3, 7])
def test_groups_merged_answer_like_one(index, num_groups):
    queries = random_units(5, seed=9)
    whole = ShardGroup(index.run.store, index.manifest).search(queries, 12)
    groups = [
        ShardGroup(index.run.store, index.manifest, shards)
        for shards in assign_shards(index.manifest, num_groups)
    ]
    assert sum(group.rows for group in groups) == 60
    answers = [group.search(queries, 12) for group in groups]
    for query in range(5):
        assert merge_hits([answer[query] for answer in answers], 12) == whole[query]


def test_more_hits_than_rows_gives_every_row_once(index):
    hits = ShardGroup(index.run.store, index.manifest).search(index.vectors[:1], 100)[0]
    assert sorted(hit.image_id for hit in hits) == list(range(60))


@pytest.mark.parametrize("num_shards", [1, 3, 8])
def test_copies_in_every_shard_come_by_ascending_id_in_batches_and_alone(tmp_path, num_shards):
    vectors = random_units(200)
    vectors[30:190:2] = vectors[30]
    index = publish_synthetic(tmp_path / "run", vectors, num_shards)
    group = ShardGroup(index.run.store, index.manifest)
    queries = np.concatenate([vectors[30:31], random_units(7, seed=4)])
    together = group.search(queries, 50)
    assert [hit.image_id for hit in together[0]] == list(range(30, 130, 2))
    assert [group.search(query[None], 50)[0] for query in queries] == together


def test_any_number_of_hits_may_be_asked_for(index):
    group = ShardGroup(index.run.store, index.manifest)
    assert group.search(index.vectors[:1], 10**12) == group.search(index.vectors[:1], 60)
    with pytest.raises(ValueError, match="k must be ≥ 1, got 0"):
        ShardGroup(index.run.store, index.manifest, []).search(index.vectors[:1], 0)


def test_an_id_is_looked_for_in_the_one_shard_whose_range_holds_it(index, monkeypatch):
    group, asked = ShardGroup(index.run.store, index.manifest), []
    for number, shard in enumerate(group.shards):
        monkeypatch.setattr(
            shard, "position", lambda i, n=number, find=shard.position: asked.append(n) or find(i)
        )
    assert [group.vector(image_id) is None for image_id in (-1, 0, 14, 15, 59, 60)] == [
        True, False, False, False, False, True,
    ]  # fmt: skip
    assert asked == [0, 0, 1, 3, 3]
    asked.clear()
    assert len(group.search(index.vectors[:1], 9)[0]) == len(asked) == 9


@pytest.mark.parametrize("num_shards", [1, 4, 60])
def test_deleted_images_are_never_found(tmp_path, num_shards):
    deleted = [0, 7, 33, 59]
    index = publish_synthetic(tmp_path / "run", random_units(60), num_shards, deleted=deleted)
    group = ShardGroup(index.run.store, index.manifest)
    hits = group.search(index.vectors[33:34], 100)[0]
    assert group.rows == len(hits) == 56
    assert not {hit.image_id for hit in hits} & set(deleted)
    assert group.vector(33) is None
    assert group.thumbnail(33) is None
    left = np.setdiff1d(np.arange(60), deleted)
    alone = publish_synthetic(tmp_path / "alone", index.vectors[left], 1)
    found = ShardGroup(alone.run.store, alone.manifest).search(index.vectors[33:34], 100)[0]
    assert [hit.image_id for hit in hits] == left[[hit.image_id for hit in found]].tolist()


def test_find_and_describe_are_a_search_in_two_steps(tmp_path):
    index = publish_synthetic(tmp_path / "run", random_units(60), 4, deleted=[3])
    group = ShardGroup(index.run.store, index.manifest)
    allowed = [shard.index.ids % 2 == 1 for shard in group.shards]
    similarity, ids = group.find(index.vectors[:3], 100, allowed=allowed)
    assert sorted(ids[0].tolist()) == [image_id for image_id in range(1, 60, 2) if image_id != 3]
    hits = group.search(index.vectors[:3], 100, allowed=allowed)
    assert [group.describe(*each) for each in zip(ids, similarity, strict=True)] == hits
    assert group.find(index.vectors[:3], 4, allowed=[~mask & False for mask in allowed])[1].shape == (3, 0)


def test_merge_hits_breaks_ties_by_id():
    near, far = [Hit(9, "i", 0.5), Hit(3, "c", 0.2)], [Hit(4, "d", 0.5)]
    assert [hit.image_id for hit in merge_hits([near, far], 2)] == [4, 9]
    assert merge_hits([], 2) == []


def test_thumbnails_come_by_id(index):
    group = ShardGroup(index.run.store, index.manifest)
    assert group.thumbnail(41) == b"jpeg-41"
    assert group.thumbnail(0) is None  # indexed, but has none
    assert group.thumbnail(60) is None
    np.testing.assert_array_equal(group.vector(59), index.vectors[59])
    assert group.vector(60) is None


def test_a_thumbnail_written_again_is_found_and_a_damaged_one_is_refused(tmp_path):
    index = publish_synthetic(tmp_path / "run", random_units(9), 2)
    group = ShardGroup(index.run.store, index.manifest)
    assert group.thumbnail(7) == b"jpeg-7"
    commit_thumbnails(index.run, 9, generation=2, prefix=b"again")
    assert [group.thumbnail(one) for one in (0, 1, 4, 5, 8)] == [
        None, b"again-1", b"again-4", b"again-5", b"again-8",
    ]  # fmt: skip
    commit_thumbnails(index.run, 9, generation=3)
    for path in (tmp_path / "run" / "thumbnails").iterdir():
        path.write_bytes(b"damaged")
    with pytest.raises(CorruptData, match=r"thumbnails/00001.* has sha256"):
        group.thumbnail(7)
    assert group.search(index.vectors[7:8], 1)[0][0].image_id == 7


def test_a_group_holds_its_own_shards_only(index):
    group = ShardGroup(index.run.store, index.manifest, [1])
    assert group.rows == 15
    assert group.vector(0) is None
    assert ShardGroup(index.run.store, index.manifest, []).search(index.vectors[:2], 3) == [[], []]
    with pytest.raises(ValueError, match=r"has no shards \[8\]"):
        ShardGroup(index.run.store, index.manifest, [8])


@pytest.mark.parametrize("kind", ["index", "table"])
def test_a_damaged_file_is_refused_before_it_is_opened(tmp_path, kind):
    index = publish_synthetic(tmp_path / "run", random_units(6), 2)
    file = getattr(index.manifest.shards[1], kind)
    path = index.run.store.local_path(file.path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptData, match=f"{file.path} has sha256"):
        ShardGroup(index.run.store, index.manifest)
    path.unlink()
    with pytest.raises(CorruptData, match="is missing, but the manifest names it"):
        ShardGroup(index.run.store, index.manifest)


def test_index_and_side_table_of_different_images_are_refused(index):
    first, second = index.manifest.shards[:2]
    crossed = dataclasses.replace(first, table=second.table)
    manifest = type(index.manifest)("b", index.manifest.dim, first.rows, {}, (crossed,))
    with pytest.raises(CorruptData, match="do not hold the same images"):
        ShardGroup(index.run.store, manifest)


def test_assign_shards_balances_rows_and_covers_all(index):
    groups = assign_shards(index.manifest, 3)
    assert sorted(shard for group in groups for shard in group) == [0, 1, 2, 3]
    assert sorted(map(len, groups)) == [1, 1, 2]
    assert assign_shards(index.manifest, 6)[4:] == [[], []]
    with pytest.raises(ValueError, match="num_groups must be ≥ 1, got 0"):
        assign_shards(index.manifest, 0)


class FarStore:
    """A store that is not on this machine's disk, and counts what is fetched from it."""

    def __init__(self, store):
        self._store = store
        self.reads = 0

    def local_path(self, path):
        return None

    def read_range(self, path, start, length):
        self.reads += 1
        return self._store.read_range(path, start, length)


def test_files_of_a_far_store_are_fetched_once_and_a_bad_copy_again(index, tmp_path):
    far, file = FarStore(index.run.store), index.manifest.shards[0].index
    cache = FileCache(tmp_path / "cache")
    copy = cache.fetch(far, file)
    assert copy.name == file.sha256
    assert cache.fetch(far, file) == copy
    assert far.reads == 1
    copy.write_bytes(b"x" * file.size_bytes)
    assert cache.fetch(far, file).read_bytes() == index.run.store.read(file.path)
    assert far.reads == 2
    assert [path.name for path in copy.parent.iterdir()] == [file.sha256]


@pytest.fixture
def settled(monkeypatch):
    """As if files had been written a while ago."""
    monkeypatch.setattr(cache_module, "SETTLED_NS", -1)


def count_hashes(monkeypatch):
    hashed, real = [], cache_module._hash_file
    monkeypatch.setattr(cache_module, "_hash_file", lambda path: hashed.append(path) or real(path))
    return hashed


@pytest.mark.usefixtures("settled")
def test_a_file_is_read_for_its_hash_once_and_again_when_it_changed(index, tmp_path, monkeypatch):
    file = write_file(index.run.store, "once/file", b"x" * 1000, 1)
    path, hashed = index.run.store.local_path(file.path), count_hashes(monkeypatch)
    for _ in range(3):
        assert FileCache(tmp_path / "cache").fetch(index.run.store, file) == path
    assert len(hashed) == 1
    before = path.stat()
    path.write_bytes(b"x" * 999 + b"y")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if nothing had been written
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(CorruptData, match="has sha256"):
        FileCache(tmp_path / "cache").fetch(index.run.store, file)
    path.write_bytes(b"x" * 1000)
    assert FileCache(tmp_path / "cache").fetch(index.run.store, file) == path
    assert len(hashed) == 3
    FileCache(tmp_path / "other").fetch(index.run.store, file)
    assert len(hashed) == 4, "another node has not looked yet"


@pytest.mark.usefixtures("settled")
def test_a_note_that_is_damaged_or_of_another_file_costs_a_check(index, tmp_path, monkeypatch):
    one, other = (write_file(index.run.store, f"notes/{name}", name.encode() * 9, 1) for name in "ab")
    cache, hashed = FileCache(tmp_path / "cache"), count_hashes(monkeypatch)
    cache.fetch(index.run.store, one)
    (note,) = (tmp_path / "cache" / "checked").iterdir()
    note.write_text("{")
    cache.fetch(index.run.store, one)
    assert len(hashed) == 2
    crossed = type(one)(one.path, other.sha256, one.size_bytes)
    with pytest.raises(CorruptData, match="has sha256"):
        cache.fetch(index.run.store, crossed)
    index.run.store.local_path(one.path).unlink()
    with pytest.raises(CorruptData, match="is missing"):
        cache.fetch(index.run.store, one)


def test_what_changed_a_moment_ago_is_not_remembered(index, tmp_path, monkeypatch):
    file, hashed = write_file(index.run.store, "fresh/file", b"z", 1), count_hashes(monkeypatch)
    for _ in range(2):
        FileCache(tmp_path / "cache").fetch(index.run.store, file)
    assert len(hashed) == 2
    (tmp_path / "plain").write_text("")
    monkeypatch.setattr(cache_module, "SETTLED_NS", -1)
    FileCache(tmp_path / "plain").fetch(index.run.store, file)  # no folder to remember it in


def test_a_far_file_of_other_bytes_never_enters_the_cache(index, tmp_path):
    far, shard = FarStore(index.run.store), index.manifest.shards[0]
    wrong = type(shard.index)(shard.index.path, "0" * 64, shard.index.size_bytes)
    with pytest.raises(CorruptData, match="has sha256"):
        FileCache(tmp_path / "cache").fetch(far, wrong)
    assert list((tmp_path / "cache" / "00").iterdir()) == []


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("CKN_SCALE_CACHE", str(tmp_path))
    assert FileCache().folder == tmp_path
    monkeypatch.delenv("CKN_SCALE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert FileCache().folder == tmp_path / "xdg" / "ckn_scale"


def test_search_from_several_threads_is_the_same(index):
    from concurrent.futures import ThreadPoolExecutor

    group, queries = ShardGroup(index.run.store, index.manifest), random_units(24, seed=5)
    alone = [group.search(query[None], 5) for query in queries]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda query: group.search(query[None], 5), queries)) == alone
    assert isinstance(alone[0][0][0].image_id, int)
    assert np.isfinite([hit.score for hit in alone[0][0]]).all()
