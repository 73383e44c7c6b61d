"""Records of deletions, on a disk and on S3: each one counts, whoever writes beside it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from synthetic_index import publish_synthetic, random_units

from ckn_scale.errors import CorruptData
from ckn_scale.storage.deletions import (
    BY_SYNC,
    BY_USER,
    NO_DEAD,
    DeadImages,
    adjust_states,
    find_dead,
    find_purged,
    find_tombstones,
    list_deleted,
    read_deletions,
    record_deletion,
)
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.run_records import PlanSource, Purge, Segment
from ckn_scale.storage.shards import Commit
from ckn_scale.storage.stored_files import StoredFile

FILE = StoredFile("a", "b", 0)


def segment(number, first_id, size, replaced=(), shards_before=0):
    source = PlanSource(("x",), 1, "c", "")
    return Segment(number, first_id, size, shards_before, 4, (FILE,), FILE, FILE, source, replaced, {})


def test_deletions_are_the_union_of_their_records(run):
    assert (read_deletions(run), list_deleted(run, []).tolist()) == ([], [])
    assert record_deletion(run, np.array([7, 3, 3]), BY_USER) == 1
    assert record_deletion(run, np.array([5, 3]), BY_SYNC) == 2
    records = read_deletions(run)
    assert [(one.number, one.why, one.ids.rows) for one in records] == [(1, "user", 2), (2, "sync", 2)]
    assert list_deleted(run, records).tolist() == [3, 5, 7]
    assert list_deleted(run, records[1:]).tolist() == [3, 5]


def test_many_who_delete_at_once_all_count(run):
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda one: record_deletion(run, np.array([one]), BY_USER), range(12)))
    assert sorted(numbers) == list(range(1, 13))
    assert list_deleted(run, read_deletions(run)).tolist() == list(range(12))


@pytest.mark.parametrize("broken", ["record", "ids", "gone"])
def test_what_is_damaged_is_refused(run, store, damage, broken):
    record_deletion(run, np.array([1]), BY_USER)
    record_deletion(run, np.array([2]), BY_USER)
    first = read_deletions(run)[0]
    if broken == "gone":
        store.delete(run.deletions.path(1))
    else:
        damage(run.deletions.path(1) if broken == "record" else first.ids.path, b"{}")
    with pytest.raises(CorruptData):
        list_deleted(run, read_deletions(run))


def test_an_image_is_deleted_or_replaced_and_purged_up_to_a_record(run):
    segments = [segment(1, 0, 8), segment(2, 8, 3, replaced=(2, 5), shards_before=2)]
    record_deletion(run, np.array([5, 6]), BY_USER)
    record_deletion(run, np.array([9]), BY_SYNC)
    dead = find_dead(run, segments, read_deletions(run))
    assert (dead.deleted.tolist(), dead.replaced.tolist(), dead.ids.tolist()) == (
        [5, 6, 9],
        [2],
        [2, 5, 6, 9],
    )
    assert find_purged(run, segments, None) is NO_DEAD
    assert find_purged(run, segments, Purge(1, 1, 1, (0,), 2)).ids.tolist() == [5, 6]
    assert dead.of_range(3, 9).ids.tolist() == [5, 6]


def test_dead_images_are_counted_as_such_whatever_they_were_before(run):
    segments = [segment(1, 0, 8), segment(2, 8, 3, replaced=(2,), shards_before=2)]
    encoded = {
        0: Commit("encode_images", 0, 1, "a", "f", {}, states={"ok": 4}),
        1: Commit(
            *("encode_images", 1, 1, "a", "f", {}),
            states={"ok": 3, "corrupt": 1},
            report={"not_ok": {"corrupt": [6]}},
        ),
    }
    dead = DeadImages(np.array([3, 5, 6, 9]), np.array([2]))
    assert adjust_states(run, segments, encoded, dead) == {
        0: {"deleted": 1, "ok": 2, "replaced": 1},
        1: {"deleted": 2, "ok": 2},
    }, "the shard of 9 is not encoded yet"


def test_tombstones_are_the_dead_that_shards_hold(store_url):
    index = publish_synthetic(store_url, random_units(20), 3)
    store = RunFolder.open(store_url).store
    held = find_tombstones(store, index.manifest.shards, np.array([0, 3, 19, 20, 77]))
    assert held.tolist() == [0, 3, 19]
    assert find_tombstones(store, index.manifest.shards, np.empty(0, np.int64)).tolist() == []
