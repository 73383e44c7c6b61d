"""One process, a pool, a real S3 server: the same bytes."""

from __future__ import annotations

import os
from pathlib import Path

from photo_runs import OVERRIDES, digests_of, parse, read_commits, tiny_options

from ckn_scale import prepare_images
from ckn_scale.config import Resources, load_settings
from ckn_scale.pipeline import index_images
from ckn_scale.runners import worker
from ckn_scale.storage import image_sources


def test_pool_gives_the_bytes_of_one_process_and_shares_the_work(
    photos, reference_digests, tmp_path, monkeypatch
):
    for module in (image_sources, prepare_images, worker):
        monkeypatch.setattr(module, "read_image", _refuse)
    run = tmp_path / "run"
    index_images(str(photos), str(run), load_settings("tiny", None, OVERRIDES), Resources(workers=2))
    assert digests_of(run) == reference_digests
    for step in ("sample_patches", "draw_subpatches-1", "describe_patches-raw", "encode_images"):
        workers = [commit.worker for commit in read_commits(run, step).values()]
        assert len({worker["pid"] for worker in workers}) == 2, step
        assert all(worker["pid"] != os.getpid() and worker["host"] for worker in workers), step


def _refuse(uri: str, **options: str) -> bytes:
    raise AssertionError(f"the driver opened {uri}")


def test_s3_gives_the_same_bytes(photos, reference_digests, s3, command_line):
    run = s3.url("run")
    result = command_line("index", photos, run, *tiny_options(), "--workers", "2")
    assert result.returncode == 0, result.stderr
    assert parse(command_line("digest", run, "--json")) == reference_digests
    hits = parse(command_line("search", run, photos / "coffee-tilt.jpg", "-k", "2", "--json"))
    assert {Path(hit["uri"]).stem for hit in hits["results"][0]["hits"]} == {"coffee", "coffee-tilt"}


def test_a_finished_run_is_left_as_it_is(photos, reference, reference_digests, command_line):
    before = sorted(path for path in reference.rglob("*") if path.is_file() and "events" not in path.parts)
    result = command_line("index", photos, reference, *tiny_options(), "--workers", "0", "--keep-samples")
    assert result.returncode == 0, result.stderr
    after = sorted(path for path in reference.rglob("*") if path.is_file() and "events" not in path.parts)
    assert before == after
    assert digests_of(reference) == reference_digests
