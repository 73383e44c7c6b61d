"""One process, a pool, Ray actors on two nodes, a real S3 server: the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from conftest import digests_of, parse, tiny_options

from ckn_scale.storage.run_folder import RunFolder

TWO_NODES = Path(__file__).parent / "two_nodes.py"


def test_pool_gives_the_bytes_of_one_process(photos, reference_digests, command_line, tmp_path):
    result = command_line("index", photos, tmp_path / "run", *tiny_options(), "--workers", "2")
    assert result.returncode == 0, result.stderr
    assert digests_of(tmp_path / "run") == reference_digests
    commits = RunFolder.open(str(tmp_path / "run")).commits("encode_images").committed()
    assert len({commit.worker["pid"] for commit in commits.values()}) == 2


def test_ray_gives_the_same_bytes_and_each_actor_sees_its_own_gpu(
    photos, reference_digests, user_env, tmp_path
):
    run = tmp_path / "run"
    command = [sys.executable, str(TWO_NODES), str(photos), str(run)]
    result = subprocess.run(command, env=user_env, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads(result.stdout.splitlines()[-1])["nodes"] == 2
    assert digests_of(run) == reference_digests
    seen = {
        commit.worker["pid"]: commit.worker["gpus"]
        for commit in RunFolder.open(str(run)).commits("encode_images").committed().values()
    }
    assert len(seen) == 2, "both actors took part"
    assert all(len(gpus.split(",")) == 1 and gpus.isdigit() for gpus in seen.values()), seen


def test_s3_gives_the_same_bytes(photos, reference_digests, s3, command_line):
    run = s3.url("run")
    result = command_line("index", photos, run, *tiny_options(), "--workers", "2")
    assert result.returncode == 0, result.stderr
    assert parse(command_line("digest", run, "--json")) == reference_digests
    hits = parse(command_line("search", run, photos / "coffee-tilt.jpg", "-k", "2", "--json"))
    assert {Path(hit["uri"]).stem for hit in hits["results"][0]["hits"]} == {"coffee", "coffee-tilt"}


def test_a_finished_run_is_left_as_it_is(photos, reference, reference_digests, command_line):
    before = sorted(path for path in reference.rglob("*") if path.is_file() and "events" not in path.parts)
    result = command_line("index", photos, reference, *tiny_options(), "--workers", "0")
    assert result.returncode == 0, result.stderr
    after = sorted(path for path in reference.rglob("*") if path.is_file() and "events" not in path.parts)
    assert before == after
    assert digests_of(reference) == reference_digests
