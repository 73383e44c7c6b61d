"""How index shards are cut: within segments, and by the last purge."""

from __future__ import annotations

import pytest

from ckn_scale.errors import RunFailed
from ckn_scale.storage.builds import cut_index_shards, number_index_shards, position_of
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.run_records import PlanSource, Purge, Segment
from ckn_scale.storage.shards import Commit
from ckn_scale.storage.stored_files import StoredFile

FILE = StoredFile("a", "b", 0)


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(str(tmp_path / "run"), {"index": {"shards_per_index_shard": 3}})


def plan(*shards):
    segments, first = [], 0
    for number, count in enumerate(shards, start=1):
        source = PlanSource(("x",), 1, "c", "")
        segments.append(Segment(number, 2 * first, 2 * count, first, 2, (FILE,), FILE, FILE, source, (), {}))
        first += count
    return segments


def encode(count, **changed):
    files = {one: StoredFile(f"v{one}", changed.get(f"s{one}", f"{one}"), 1) for one in range(count)}
    return {
        one: Commit("encode_images", one, 1, "a", "f", {"vectors": file, "thumbnails": file})
        for one, file in files.items()
    }


def test_shards_are_cut_within_a_segment(run):
    assert cut_index_shards(run, plan(7), None) == [range(3), range(3, 6), range(6, 7)]
    assert cut_index_shards(run, plan(7, 1, 4), None)[2:] == [
        *(range(6, 7), range(7, 8), range(8, 11), range(11, 12))
    ]


def test_a_purge_says_how_shards_are_cut_and_later_segments_have_their_own(run):
    purge = Purge(1, 0, 2, (0, 3), 8)
    assert cut_index_shards(run, plan(7, 1, 4), purge) == [
        *(range(3), range(3, 8), range(8, 11), range(11, 12))
    ]


def test_an_append_leaves_the_numbers_before_it_and_new_content_is_a_new_number(run):
    before = number_index_shards(run, plan(7), encode(7), None)
    after = number_index_shards(run, plan(7, 1), encode(8), None)
    assert (after[:3], [position_of(one) for one in after]) == (before, [0, 1, 2, 3])
    changed = number_index_shards(run, plan(7), encode(7, s4="other"), None)
    assert [a == b for a, b in zip(before, changed, strict=True)] == [True, False, True]
    with pytest.raises(RunFailed, match="1 of 8 shards are not encoded yet"):
        number_index_shards(run, plan(7, 1), encode(7), None)
