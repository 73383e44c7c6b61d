"""Two people at once on one run: other code, other images, one asleep while the other publishes."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from photo_runs import (
    OVERRIDES,
    assert_conserved,
    finish,
    index_command,
    index_here,
    read_commits,
    tiny_options,
    wait_for,
)

from ckn_scale import step as step_module
from ckn_scale.config import load_settings
from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import read_photo
from ckn_scale.errors import RunFailed, RunMismatch
from ckn_scale.failpoints import SHARD_VARIABLE
from ckn_scale.step import process_shard, redo_shard
from ckn_scale.steps import publish
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.steps.plan_images import plan_images
from ckn_scale.steps.publish import publish_version, read_candidate
from ckn_scale.storage.index_files import read_manifest, write_manifest
from ckn_scale.storage.run_folder import RunFolder


@pytest.fixture
def more(tmp_path):
    """A folder of two images to append."""
    folder = tmp_path / "more"
    folder.mkdir()
    for name in ("ihc", "retina"):
        (folder / f"{name}.jpg").write_bytes(encode_jpeg(read_photo(name), 92))
    return folder


@pytest.fixture
def start(user_env, spawn):
    """`ckn-scale …` in the background, stopped before a record; call what it returns to wake and end it."""

    def start_stopped(*arguments, before):
        env = {**user_env, SHARD_VARIABLE: f"data_written:{before}:STOP"}
        driver = spawn(index_command(*arguments, *tiny_options()), env=env)
        wait_for(lambda: _is_stopped(driver.pid), f"it stops before {before}", driver)

        def wake():
            driver.send_signal(signal.SIGCONT)
            return finish(driver)

        return wake

    return start_stopped


def _is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _versions(run):
    return [
        (version.number, version.rows, version.segments)
        for version in RunFolder.open(str(run)).versions.all()
    ]


def test_a_driver_that_slept_through_an_append_publishes_nothing_older(run, photos, more, start):
    wake = start("index", photos, run, "--workers", "0", before="publish:1")
    assert _versions(run) == []
    index_here(more, run, append=True)
    assert _versions(run) == [(1, 23, 2)]
    stdout, stderr = wake()
    assert _versions(run) == [(1, 23, 2)], "the 21 rows that it had built are published by nobody"
    assert "version 1" in stdout
    assert "starting over" in stderr
    assert_conserved(run)


def test_two_drivers_with_the_same_build_publish_one_version(run, photos, monkeypatch, caplog):
    rivals = [lambda: index_here(photos, run)]
    monkeypatch.setattr(publish, "hit_failpoint", lambda *place: rivals.pop()() if rivals else None)
    assert index_here(photos, run).version == 1
    assert not rivals, "the other published in the moment before the record"
    assert _versions(run) == [(1, 21, 1)]
    assert "starting over" not in caplog.text


def test_plan_append_that_lost_its_record_plans_its_images_after_the_winner(run, photos, more, start):
    other = more.with_name("other")
    other.mkdir()
    (other / "rocket.jpg").write_bytes(encode_jpeg(read_photo("rocket"), 70))
    wake = start("plan", more, run, "--append", before="plan:2")
    plan_images(str(run), load_settings("tiny", None, OVERRIDES), str(other), append=True)
    stdout, stderr = wake()
    assert "another process has just planned images" in stderr
    assert "segment 2: 1 images" in stdout
    assert "segment 3: 2 images" in stdout


def test_an_append_while_another_builds_is_encoded_and_published_by_either(run, photos, more, monkeypatch):
    """The plan grows, and nothing of it is encoded, in the moment before an index shard is committed."""

    def plan_more(place, step, _):
        if (place, step) == ("data_written", "build_index"):
            monkeypatch.setattr(step_module, "hit_failpoint", lambda *_: None)
            plan_images(str(run), load_settings("tiny", None, OVERRIDES), str(more), append=True)

    monkeypatch.setattr(step_module, "hit_failpoint", plan_more)
    report = index_here(photos, run)
    assert _versions(run) == [(1, 23, 2)]
    assert report.states == {"ok": 23, "truncated": 1}
    assert_conserved(run)


def test_a_manifest_with_other_rows_than_images_is_not_published(reference, tmp_path):
    run = RunFolder.open(str(shutil.copytree(reference, tmp_path / "run")))
    candidate = read_candidate(run)
    record = run.versions.latest()
    manifest = read_manifest(run.store, record.manifest)
    fewer = replace(manifest, rows=20, shards=(replace(manifest.shards[0], rows=20),))
    written = write_manifest(run.store, run.index_folder(candidate.build, "ab"), fewer)
    with pytest.raises(RunFailed, match=r"has 20 rows, but 21 images are ok, neither deleted nor replaced"):
        publish_version(run, candidate, written, record.certificate)
    assert run.versions.numbers() == [1]


class NewerEncodeImages(EncodeImages):
    """The same step in a later release, which computes something else."""

    version = EncodeImages.version + 1


def test_a_shard_lost_to_another_release_is_refused(run, monkeypatch):
    run = RunFolder.open(str(run))

    def let_the_other_commit(place, *_):
        monkeypatch.setattr(step_module, "hit_failpoint", lambda *_: None)
        process_shard(NewerEncodeImages(run), 3)

    monkeypatch.setattr(step_module, "hit_failpoint", let_the_other_commit)
    with pytest.raises(RunMismatch, match=r"encode_images shard 3 was made by .* another release"):
        process_shard(EncodeImages(run), 3)
    (committed,) = read_commits(run.url).values()
    assert committed.fingerprint == NewerEncodeImages(run).fingerprint


def test_another_release_does_not_retry_a_shard(reference, tmp_path):
    run = RunFolder.open(str(shutil.copytree(reference, tmp_path / "run")))
    committed = read_commits(run.url)
    with pytest.raises(RunMismatch, match="another release"):
        redo_shard(NewerEncodeImages(run), committed[3], "retry of failures")
    assert read_commits(run.url) == committed


def test_no_build_is_named_over_a_shard_of_another_release(reference, tmp_path):
    run = RunFolder.open(str(shutil.copytree(reference, tmp_path / "run")))
    newer = replace(read_commits(run.url)[3], generation=2, fingerprint=NewerEncodeImages(run).fingerprint)
    run.commits("encode_images").commit(newer)
    with pytest.raises(RunMismatch, match="encode_images shard 3"):
        read_candidate(run)
