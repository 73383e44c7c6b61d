"""The steps one by one, additions, other runs' models, retries, garbage: as a user calls them."""

from __future__ import annotations

import csv
import json
import shutil

import numpy as np
import pytest
from photo_runs import OVERRIDES, digests_of, index_here, parse, plan_here, read_commits, tiny_options

import ckn_scale
from ckn_scale.core.augmentations import render_view
from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import read_photo
from ckn_scale.storage.run_folder import RunFolder


@pytest.fixture
def own_photos(photos, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(photos, tmp_path / "photos")


@pytest.fixture
def own_run(reference, tmp_path):
    return shutil.copytree(reference, tmp_path / "run")


def test_steps_one_by_one_make_the_same_bytes(photos, reference_digests, command_line, tmp_path):
    run = tmp_path / "run"
    planned = command_line("plan", photos, run, *tiny_options())
    assert planned.returncode == 0, planned.stderr
    for word in (
        "22 images in 11 shards",
        "memory of a worker",
        "run folder",
        "cores that keep one device busy",
    ):
        assert word in planned.stdout
    for verb in ("sample", "train", "encode", "build", "publish"):
        result = command_line(verb, run, "--workers", "0", "--quiet")
        assert result.returncode == 0, (verb, result.stderr)
        assert result.stderr == ""
    assert digests_of(run) == reference_digests
    assert _sampled(run) == {"images"}, "the rest was needed until it was published"
    status = command_line("status", run).stdout
    assert "encoding: " in status
    assert "predicted: " in status


def test_dry_run_writes_nothing(photos, command_line, tmp_path):
    result = command_line("index", photos, tmp_path / "run", *tiny_options(), "--dry-run")
    assert "22 images in 11 shards" in result.stdout
    assert not (tmp_path / "run").exists()


def test_encode_before_train_is_told(photos, command_line, tmp_path):
    plan_here(photos, tmp_path / "run")
    result = command_line("encode", tmp_path / "run", "--workers", "0")
    assert result.returncode == 2
    assert "ckn-scale train" in result.stderr


def test_appended_images_are_encoded_with_the_models_of_the_run(
    own_photos, own_run, reference_digests, command_line
):
    (own_photos / "retina.jpg").write_bytes(encode_jpeg(read_photo("retina"), 92))
    listed = [*tiny_options(), "--workers", "0", "--append"]
    result = command_line("index", own_photos, own_run, *listed)
    assert result.returncode == 0, result.stderr
    run = RunFolder.open(str(own_run))
    # another folder: other URIs, so all of them are new; what was there stays as it was
    assert [segment.num_images for segment in run.plan.all()] == [22, 23]
    assert digests_of(own_run)["models"] == reference_digests["models"]
    found = parse(command_line("search", own_run, own_photos / "retina.jpg", "-k", "1", "--json"))
    assert found["version"] == 2
    assert found["results"][0]["hits"][0]["uri"].endswith("retina.jpg")
    again = command_line("index", own_photos, own_run, *listed)
    assert again.returncode == 0, again.stderr
    assert len(run.plan.all()) == 2, "nothing is new the second time"


def test_changed_image_replaces_the_old_one(own_photos, command_line, tmp_path):
    run = tmp_path / "own"
    options = [*tiny_options(), "--workers", "0", "--quiet", "--accept"]
    assert command_line("index", own_photos, run, *options).returncode == 0
    (own_photos / "coffee.jpg").write_bytes(encode_jpeg(read_photo("retina"), 95))
    assert command_line("index", own_photos, run, *options, "--append").returncode == 0
    found = parse(command_line("search", run, own_photos / "coffee.jpg", "-k", "50", "--json"))
    named = [hit["image_id"] for hit in found["results"][0]["hits"] if hit["uri"].endswith("/coffee.jpg")]
    assert named == [22], "the new content under its new id, and not the old"


def test_models_of_another_run_are_used_without_training(
    photos, reference, reference_digests, command_line, tmp_path
):
    run = tmp_path / "run"
    options = ["--models", str(reference), *tiny_options(), "--workers", "0", "--quiet"]
    result = command_line("index", photos, run, *options)
    assert result.returncode == 0, result.stderr
    assert digests_of(run) == reference_digests
    assert not (run / "samples" / "patches").exists()


def test_kept_columns_travel_to_the_hits(photos, reference, command_line, tmp_path):
    names = sorted(path.name for path in photos.glob("*.jpg") if path.name != "broken.jpg")
    with (tmp_path / "list.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["uri", "title", "price"])
        rows.writerows([str(photos / name), f"title of {name}", 12] for name in names)
    kept = ["--keep", "title", "--keep", "price"]
    options = ["--models", str(reference), *kept, "--workers", "0", "--quiet", "--accept"]
    result = command_line("index", tmp_path / "list.csv", tmp_path / "run", *tiny_options(), *options)
    assert result.returncode == 0, result.stderr
    found = parse(command_line("search", tmp_path / "run", photos / "coffee.jpg", "-k", "1", "--json"))
    assert found["results"][0]["hits"][0]["columns"] == {"title": "title of coffee.jpg", "price": 12}
    plain = command_line("search", tmp_path / "run", photos / "coffee.jpg", "-k", "1").stdout
    assert plain.splitlines()[2].endswith("/coffee.jpg  title=title of coffee.jpg  price=12")


def test_search_asks_for_several_images_and_for_a_part_of_one(photos, reference, command_line, tmp_path):
    names = ["coffee.jpg", "broken.jpg", "rocket.jpg", "absent.jpg"]
    asked = [photos / name for name in names]
    several = command_line("search", reference, *asked, "-k", "1", "--json")
    assert several.returncode == 1, "two of them cannot be used"
    results = json.loads(several.stdout)["results"]
    assert [result["query"] for result in results] == list(map(str, asked))
    states = [result.get("error", {}).get("state") for result in results]
    assert states == [None, "truncated", None, "missing"]
    firsts = [result["hits"][0]["uri"] for result in results if result["hits"]]
    assert firsts == [str(photos / "coffee.jpg"), str(photos / "rocket.jpg")]
    # A photograph beside another: the box tells which is meant.
    pixels = np.zeros((400, 1200, 3), np.uint8)
    for left, name in ((0, "coffee"), (600, "rocket")):
        photo = read_photo(name)[:400, :600]
        pixels[: photo.shape[0], left : left + photo.shape[1]] = photo
    (tmp_path / "two.jpg").write_bytes(encode_jpeg(pixels, 92))
    for box, name in (("0,0,600,400", "coffee"), ("600,0,1200,400", "rocket")):
        found = parse(command_line("search", reference, tmp_path / "two.jpg", "--box", box, "--json"))
        assert f"/{name}" in found["results"][0]["hits"][0]["uri"]


def test_search_says_what_is_found_and_that_nothing_is(photos, reference, command_line, tmp_path):
    turned = render_view(read_photo("coffee"), "turn", 5)
    (tmp_path / "planted.jpg").write_bytes(encode_jpeg(turned, 85))
    (tmp_path / "unrelated.jpg").write_bytes(encode_jpeg(read_photo("retina"), 90))
    asked = [tmp_path / "planted.jpg", tmp_path / "unrelated.jpg"]
    planted, unrelated = parse(command_line("search", reference, *asked, "-k", "4", "--json"))["results"]
    assert [planted["found"], unrelated["found"]] == [True, False]
    best = planted["hits"][0]
    assert best["uri"].endswith(("/coffee.jpg", "/coffee-tilt.jpg"))
    assert best["match"] is True
    x1, y1, x2, y2 = best["box"]
    assert 0 <= x1 < x2
    assert 0 <= y1 < y2
    assert len(unrelated["hits"]) == 4
    assert not any(hit["match"] for hit in unrelated["hits"])
    said = command_line("search", reference, *asked, "-k", "4").stdout
    assert "found: " in said
    assert "nothing found (a match has ≥ " in said
    assert "1 in 1,000,000 pairs of unrelated images" in said
    plain = parse(command_line("search", reference, asked[0], "--no-verify", "--json"))["results"][0]
    assert "found" not in plain
    assert plain["hits"][0].keys() == {"image_id", "uri", "score", "columns"}
    wrong = command_line("search", reference, asked[0], "--filter", "year>2000")
    assert wrong.returncode == 2
    assert "no such column" in wrong.stderr


@pytest.mark.parametrize("box", ["10,10", "1,2,3,x", "9,0,3,5", "0,0,nan,5"])
def test_a_box_that_is_none_is_told(reference, photos, command_line, box):
    result = command_line("search", reference, photos / "coffee.jpg", "--box", box)
    assert result.returncode == 2
    assert result.stderr == f"ckn-scale: --box takes X1,Y1,X2,Y2 with X1 < X2 and Y1 < Y2, got '{box}'\n"


def test_failures_are_retried_as_the_next_generation(own_photos, command_line, tmp_path):
    run = tmp_path / "own"
    options = [*tiny_options(), "--workers", "0", "--quiet"]
    hidden = tmp_path / "hidden.jpg"
    plan_here(own_photos, run)
    shutil.move(own_photos / "coffee.jpg", hidden)
    assert command_line("index", own_photos, run, *options).returncode == 0
    assert _sampled(run) == {"images"}
    (missing,) = [
        json.loads(line) for line in _lines(command_line("failures", run, "--reason", "missing", "--json"))
    ]
    assert missing["uri"].endswith("coffee.jpg")
    shutil.move(hidden, own_photos / "coffee.jpg")
    assert _lines(command_line("failures", run, "--reason", "missing", "--retry", "--workers", "0")) == []
    generations = [
        commit.generation for commit in RunFolder.open(str(run)).commits("encode_images").committed().values()
    ]
    assert sorted(generations)[-2:] == [1, 2]
    assert command_line("publish", run, "--workers", "0").returncode == 0
    status = parse(command_line("status", run, "--json"))
    assert status["images"]["states"] == {"ok": 21, "truncated": 1}
    assert status["version"] == 2


@pytest.mark.parametrize("door", ["python", "index", "publish"])
def test_samples_go_once_published_unless_they_are_kept(
    photos, own_run, reference_digests, command_line, door
):
    """Each call finds all done, and leaves or removes what is left of the sample."""

    def call(**keep):
        if door == "python":
            ckn_scale.index(photos, own_run, preset="tiny", overrides=OVERRIDES, workers=0, **keep)
            return
        named = [photos, own_run, *tiny_options()] if door == "index" else [own_run]
        options = ["--workers", "0", "--quiet", *(["--keep-samples"] if keep else [])]
        result = command_line(door, *named, *options)
        assert result.returncode == 0, result.stderr

    call(keep_samples=True)
    assert {"images", "patches", "subpatches", "descriptors"} <= _sampled(own_run)
    call()
    assert _sampled(own_run) == {"images"}
    assert digests_of(own_run) == reference_digests


@pytest.mark.parametrize("door", ["python", "index"])
def test_device_that_is_named_wins_over_the_settings(photos, own_run, reference_digests, command_line, door):
    """The run computes on the CPU, so that cuda would be refused."""
    if door == "python":
        overrides = [*OVERRIDES, "numerics.device=cuda"]
        ckn_scale.index(photos, own_run, preset="tiny", overrides=overrides, workers=0, device="cpu")
    else:
        options = [*tiny_options(), "--set", "numerics.device=cuda", "--device", "cpu"]
        result = command_line("index", photos, own_run, *options, "--workers", "0")
        assert result.returncode == 0, result.stderr
    assert digests_of(own_run) == reference_digests


def _sampled(run):
    """What is left of the sample."""
    return {path.parent.name for path in (run / "samples").rglob("*.parquet")}


def test_gc_removes_only_what_no_record_needs(photos, own_run, reference_digests, command_line):
    orphan = own_run / "vectors" / "00001-0123456789abcdef0123456789abcdef.parquet"
    uncommitted = own_run / "vectors" / "00099-0123456789abcdef0123456789abcdef.parquet"
    orphan.write_bytes(b"a lost attempt")
    uncommitted.write_bytes(b"of a shard that has no record")
    number = min(read_commits(own_run, "build_index"))
    lost_build = own_run / "index" / f"{number}-0123456789abcdef" / "shard-00000.faiss"
    lost_build.parent.mkdir()
    lost_build.write_bytes(b"a lost attempt")
    (own_run / "vectors" / ".new-0123456789abcdef").write_bytes(b"a write that was cut off")
    assert "0 files" in command_line("gc", own_run).stdout, "younger than the grace time"
    result = command_line("gc", own_run, "--grace-h", "0", "--samples")
    assert result.returncode == 0, result.stderr
    assert (orphan.exists(), uncommitted.exists(), lost_build.exists()) == (False, True, False)
    assert not list(own_run.rglob(".new-*"))
    assert _sampled(own_run) == {"images"}
    for folder in (own_run / "index", *(own_run / "commits").glob("certify_index-*")):
        shutil.rmtree(folder)
    index_here(photos, own_run)  # builds, certifies and publishes with what is left
    assert digests_of(own_run) == reference_digests


def test_status_has_the_form_scripts_rely_on(reference, command_line):
    status = parse(command_line("status", reference, "--json"))
    assert {"step", "done", "total"} <= status["steps"][0].keys()
    assert all(step["done"] == step["total"] for step in status["steps"])
    assert status["images"]["planned"] == sum(status["images"]["states"].values()) == 22
    assert "images/s" in command_line("status", reference).stdout


def test_log_json_is_one_object_per_line(own_run, command_line):
    result = command_line("-v", "--log-json", "delete", own_run, "0")
    records = [json.loads(line) for line in result.stderr.splitlines()]
    assert any(record["message"].startswith("version 2 has 20 rows") for record in records), result.stderr


def _lines(result):
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()
