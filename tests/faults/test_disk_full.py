"""The disk is full in the middle of a run: a clear sentence, exit code 1; with room, a rerun goes on."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess

import pytest
from photo_runs import (
    assert_conserved,
    assert_some_skipped,
    copy_trained,
    digests_of,
    index_here,
    read_commits,
    tiny_options,
)

ROOM_BYTES = 200_000  # for some shards, not for all


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of its own; root may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_full_disk_is_said_and_survived(reference, photos, reference_digests, command_line, small_disk):
    run = copy_trained(reference, small_disk / "run")
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096 - ROOM_BYTES))
    _assert_fails_for_room(command_line("index", photos, run, *tiny_options(), "--workers", "0"))
    ballast.unlink()
    _assert_rerun_finishes(run, photos, reference_digests)


def test_file_size_limit_is_said_and_survived(reference, photos, reference_digests, command_line, tmp_path):
    run = copy_trained(reference, tmp_path / "run")
    commits = read_commits(reference)
    largest = [max(file.size_bytes for file in commits[one].files.values()) for one in sorted(commits)]
    _copy_shard(reference, run, commits[0])
    limit = max(largest[1:]) - 1  # too little for some shard after the first, which is there
    result = command_line(
        "index",
        photos,
        run,
        *tiny_options(),
        "--workers",
        "0",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    _assert_fails_for_room(result)
    _assert_rerun_finishes(run, photos, reference_digests)


def _copy_shard(source, target, commit):
    """What is committed of one encoded shard."""
    record = f"commits/encode_images/{commit.shard_id:05d}.1.json"
    for path in [*(file.path for file in commit.files.values()), record]:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / path, target / path)


def _assert_fails_for_room(result):
    assert result.returncode == 1, (result.stdout, result.stderr)
    last = result.stderr.splitlines()[-1]
    assert "no room to write" in last
    assert "free space and run again" in last
    assert "Traceback" not in result.stderr


def _assert_rerun_finishes(run, photos, reference_digests):
    assert 0 < len(read_commits(run)) < 11
    index_here(photos, run)
    assert_some_skipped(run)
    assert digests_of(run) == reference_digests
    assert_conserved(run)
