"""Which failures keep a version from being published: those of images that no version holds yet."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from photo_runs import index_here

from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import read_photo
from ckn_scale.errors import RunFailed
from ckn_scale.steps.publish import Candidate, count_failures
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.run_records import Failures, PlanSource, Segment, Version
from ckn_scale.storage.shards import Commit
from ckn_scale.storage.stored_files import StoredFile

SOURCE = PlanSource(("photos",), 1, "0", "")


def test_broken_images_are_not_published_and_not_held_against_a_later_append(reference, tmp_path):
    """One of 22 is broken in version 1, three of four in the first append, none in the second."""
    run = RunFolder.open(str(shutil.copytree(reference, tmp_path / "run")))
    folders = [tmp_path / "bad", tmp_path / "good"]
    for folder in folders:
        folder.mkdir()
    for name in ("clock_motion", "coins", "rocket"):
        (folders[0] / f"{name}.jpg").write_bytes(encode_jpeg(read_photo(name), 80)[:900])
    (folders[0] / "ihc.jpg").write_bytes(encode_jpeg(read_photo("ihc"), 80))
    (folders[1] / "retina.jpg").write_bytes(encode_jpeg(read_photo("retina"), 80))

    with pytest.raises(RunFailed) as refusal:
        index_here(folders[0], run.url, append=True)
    for words in ("3 of 4 new images", "3 truncated", "max_failed_share = 0.1", "failures", "--accept"):
        assert words in str(refusal.value)
    assert run.versions.numbers() == [1]

    assert index_here(folders[0], run.url, append=True, accept=True).version == 2
    record = run.versions.read(2)
    assert (record.rows, record.segments, record.generation) == (22, 2, 1)
    assert record.failures.new_failed == {"truncated": 3}
    assert (record.failures.share, record.failures.limit) == (0.75, 0.1)

    report = index_here(folders[1], run.url, append=True)
    assert (report.version, report.states) == (3, {"ok": 23, "truncated": 4})


def candidate(*states, current=None):
    """A segment of one shard for each."""
    file = StoredFile("a", "b", 0, 0)
    segments, encoded, first_id = [], {}, 0
    for number, counts in enumerate(states):
        size = sum(counts.values())
        segments.append(
            Segment(number + 1, first_id, size, number, size, (file,), file, file, SOURCE, (), {})
        )
        encoded[number] = Commit("encode_images", number, 1, "ab", "cd", {"vectors": file}, states=counts)
        first_id += size
    return Candidate(1, tuple(segments), 1, encoded, "build", current)


def held(segments, **states):
    return Version(1, "build", StoredFile("a", "b", 0), states["ok"], segments, 1, states)


@pytest.mark.parametrize(
    ("states", "current", "expected", "share"),
    [
        ([{"ok": 90, "corrupt": 10}], None, Failures(100, {"corrupt": 10}, 0, 0), 0.1),
        ([{"ok": 5, "corrupt": 5}], held(1, ok=5, corrupt=5), Failures(0, {}, 5, 0), 0.0),
        ([{"ok": 5, "corrupt": 5}, {"ok": 10}], held(1, ok=5, corrupt=5), Failures(10, {}, 5, 0), 0.0),
        ([{"ok": 10}, {"missing": 1, "ok": 1}], held(1, ok=10), Failures(2, {"missing": 1}, 10, 0), 0.5),
        ([{"ok": 6, "missing": 4}], held(1, ok=8, corrupt=2), Failures(0, {}, 8, 2), 0.25),
        ([{"ok": 9, "missing": 1}], held(1, ok=8, missing=2), Failures(0, {}, 8, 0), 0.0),
    ],
    ids=["first", "nothing new", "old failures", "new failures", "lost since", "repaired"],
)
def test_count_failures_looks_at_what_no_version_holds_and_at_what_was_lost(states, current, expected, share):
    found = count_failures(candidate(*states, current=current), limit=0.1)
    assert found == replace(expected, limit=0.1)
    assert found.share == share
