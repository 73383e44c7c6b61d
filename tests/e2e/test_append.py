"""What an append costs follows the append: what did not change is taken over."""

from __future__ import annotations

import shutil

import pytest
from photo_runs import index_here, read_commits, read_events

from ckn_scale.core.views import encode_jpeg
from ckn_scale.demo import DISTRACTORS, read_photo
from ckn_scale.storage.run_folder import RunFolder


@pytest.fixture
def run(reference, tmp_path):
    return shutil.copytree(reference, tmp_path / "run", ignore=shutil.ignore_patterns("events", "nonces"))


@pytest.fixture
def more(tmp_path):
    """A folder with images that the run does not have."""
    folder = tmp_path / "more"
    folder.mkdir()
    for name in DISTRACTORS[5:8]:
        (folder / f"new-{name}.jpg").write_bytes(encode_jpeg(read_photo(name), 90))
    return folder


def test_index_shards_that_did_not_change_are_taken_over(run, more):
    before = set(read_commits(run, "build_index"))
    index_here(more, run, append=True)
    begun = read_events(run, "step_begins", step="build_index")[-1]
    assert (begun["shards"], begun["undone"]) == (7, 2), "the last one was not full, and one is new"
    taken_over = before & {commit.shard_id for commit in read_commits(run, "build_index").values()}
    assert len(taken_over) == len(before)
    manifest = RunFolder.open(str(run)).versions.latest()[1]["manifest"]
    assert (run / manifest).is_file()
