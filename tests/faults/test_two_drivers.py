"""Two people at once on one run: other code, other images, one asleep while the other publishes."""

from __future__ import annotations

import shutil

import pytest
from photo_runs import copy_trained, read_commits

from ckn_scale.errors import RunMismatch
from ckn_scale.steps import base
from ckn_scale.steps.base import process_shard, redo_shard
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.storage.run_folder import RunFolder


class NewerEncodeImages(EncodeImages):
    """The same step in a later release, which computes something else."""

    version = EncodeImages.version + 1


def test_a_shard_lost_to_another_release_is_refused(reference, tmp_path, monkeypatch):
    run = RunFolder.open(str(copy_trained(reference, tmp_path / "run")))

    def let_the_other_commit(place, *_):
        monkeypatch.setattr(base, "reach", lambda *_: None)
        process_shard(NewerEncodeImages(run), 3)

    monkeypatch.setattr(base, "reach", let_the_other_commit)
    with pytest.raises(RunMismatch, match=r"encode_images shard 3 was made by .* another release"):
        process_shard(EncodeImages(run), 3)
    (standing,) = read_commits(run.url).values()
    assert standing.fingerprint == NewerEncodeImages(run).fingerprint


def test_another_release_does_not_retry_a_shard(reference, tmp_path):
    run = RunFolder.open(str(shutil.copytree(reference, tmp_path / "run")))
    standing = read_commits(run.url)
    with pytest.raises(RunMismatch, match="another release"):
        redo_shard(NewerEncodeImages(run), standing[3], "retry of failures")
    assert read_commits(run.url) == standing
