"""Planted copies are found, and nothing else; the same bytes however the work is cut, killed and resumed."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pyarrow.parquet as pq
import pytest
from photo_runs import OVERRIDES, index_here, parse, read_events

from ckn_scale import pipeline
from ckn_scale.config import Resources, load_settings
from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import DISTRACTORS, PHOTOS, read_photo
from ckn_scale.runners.driver import open_driver
from ckn_scale.runs.copies import group_copies
from ckn_scale.runs.status import summarise_run
from ckn_scale.runs.verify import verify_run
from ckn_scale.search.versions import open_version
from ckn_scale.steps import find_copies
from ckn_scale.storage.index_files import write_manifest, write_tombstones
from ckn_scale.storage.records import new_attempt
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.run_records import Version

COPIED = PHOTOS[:4]
KINDS = ("", "-dup", "-half", "-crop")


def write_photo(folder, name, pixels, quality=90):
    (folder / f"{name}.jpg").write_bytes(encode_jpeg(np.ascontiguousarray(pixels), quality))


def plant_copies(folder: Path) -> Path:
    """Of four photographs the same once more, one half as large and one cropped; eleven others."""
    folder.mkdir()
    for name in COPIED:
        photo = read_photo(name)
        height, width = photo.shape[:2]
        write_photo(folder, name, photo)
        write_photo(folder, f"{name}-dup", photo)
        write_photo(folder, f"{name}-half", cv2.resize(photo, (width // 2, height // 2), None, 0, 0, 3), 80)
        write_photo(folder, f"{name}-crop", photo[height // 20 :, : -width // 20])
    for name in (*PHOTOS[4:8], *DISTRACTORS[:7]):
        write_photo(folder, name, read_photo(name))
    return folder


@pytest.fixture(scope="module")
def planted(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    index_here(plant_copies(folder / "photos"), folder / "run", models=str(reference), accept=True)
    return folder / "run"


@pytest.fixture
def run(planted, tmp_path):
    return shutil.copytree(planted, tmp_path / "run")


def find(run, *, workers=0, **options):
    opened = RunFolder.open(str(run))
    with open_driver(opened, Resources(workers=workers), lambda progress: None) as driver:
        step = pipeline.find_copies(driver, open_version(opened).record.manifest, **options)
        return group_copies(step)


def name_groups(found):
    groups: dict[int, set[str]] = {}
    for row in found.table.to_pylist():
        groups.setdefault(row["group"], set()).add(Path(row["uri"]).stem)
    return sorted(groups.values(), key=min)


EXPECTED = sorted(({name + kind for kind in KINDS} for name in COPIED), key=min)


def publish_changed(run, **changes):
    """The next version: the current manifest with changes."""
    opened = RunFolder.open(str(run))
    current = open_version(opened)
    folder = opened.index_folder("changed", new_attempt())
    if "tombstones" in changes:
        changes["tombstones"] = write_tombstones(opened.store, folder, changes["tombstones"])
        changes["rows"] = current.manifest.rows - changes["tombstones"].rows
    manifest = replace(current.manifest, **changes)
    file = write_manifest(opened.store, folder, manifest)
    opened.versions.append(Version(0, manifest.build, file, manifest.rows, 1, 1, {"ok": manifest.rows}))


def test_the_command_finds_planted_copies_and_writes_them(run, tmp_path, command_line):
    out = tmp_path / "out"
    said = parse(command_line("copies", run, "--output", out, "--json", "--max-groups-shown", "2"))
    assert (said["images"], said["groups"], said["removable"]) == (27, 4, 12)
    assert said["verified"] >= 12
    assert len(said["largest"]) == 2
    table = pq.read_table(out / "copies.parquet").to_pylist()
    with (out / "copies.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["uri"] for row in table] == [row["uri"] for row in rows]
    assert [row["group"] for row in table] == [int(row["group"]) for row in rows]
    for group in {row["group"] for row in table}:
        members = [row for row in table if row["group"] == group]
        assert group == min(row["image_id"] for row in members)
        assert [row["representative"] for row in members].count(True) == 1
        assert {row["images"] for row in members} == {4}
        best = {Path(row["uri"]).stem: row["score"] for row in members}
        assert [score for name, score in best.items() if not name.endswith(("half", "crop"))] == [1, 1]
    sheet = cv2.imread(str(out / "copies.png"))
    assert sheet.shape[0] > 2 * 160
    assert sheet.shape[1] > 4 * 160

    again = command_line("copies", run, "--output", out)
    assert (again.returncode, "is there already" in again.stderr) == (2, True)
    printed = command_line("copies", run)
    assert (printed.returncode, "4 groups of 16 images; 12 could go" in printed.stdout) == (0, True)
    assert "find_copies" not in json.dumps(summarise_run(RunFolder.open(str(run)))["steps"])
    assert list(verify_run(RunFolder.open(str(run))).problems) == []


def test_a_search_shows_the_best_of_copies_when_it_is_asked_to(planted, command_line):
    photo = planted.parent / "photos" / f"{COPIED[0]}.jpg"
    (asked,) = parse(command_line("search", planted, photo, "-k", "27", "--group-copies", "--json"))[
        "results"
    ]
    assert len(asked["hits"]) == 27 - 12
    assert sorted(len(hit["copies"]) for hit in asked["hits"] if "copies" in hit) == [3, 3, 3, 3]
    printed = command_line("search", planted, photo, "-k", "2", "--group-copies").stdout
    assert printed.splitlines()[2].endswith("and 3 near-copies")


def test_groups_are_the_planted_ones_at_any_cut_and_on_any_worker(planted, run, reference, tmp_path):
    found = find(run)
    assert name_groups(found) == EXPECTED
    other = tmp_path / "other"
    cut = [*OVERRIDES, "index.shards_per_index_shard=4"]
    pipeline.index_images(
        str(planted.parent / "photos"),
        str(other),
        load_settings("tiny", None, cut),
        Resources(workers=0),
        models=str(reference),
        accept=True,
    )
    shards = [len(open_version(RunFolder.open(str(one))).manifest.shards) for one in (run, other)]
    assert shards[0] != shards[1]
    assert find(other, workers=2).table.equals(found.table)


def test_images_of_one_scene_are_copies_only_where_that_is_wanted(reference, tmp_path):
    """The reference has a tilted view of each photograph."""
    opened = RunFolder.open(str(shutil.copytree(reference, tmp_path / "run")))
    with open_driver(opened, Resources(workers=0), lambda progress: None) as driver:
        step = pipeline.find_copies(driver, open_version(opened).record.manifest)
    found = {share: name_groups(group_copies(step, share)) for share in (0.0, 0.15, 0.99)}
    assert len(found[0.0]) >= len(found[0.15]) >= 1
    assert found[0.99] == []
    for group in found[0.0]:
        assert len({name.removesuffix("-tilt") for name in group}) == 1


def test_a_score_that_copies_must_have(run):
    assert name_groups(find(run, min_score=0.99)) == sorted(
        ({name, f"{name}-dup"} for name in COPIED), key=min
    )
    assert find(run, min_score=1.0).groups == 4  # equal vectors are always enough


def test_deleted_images_are_no_copies(run):
    found = find(run)
    ids = {Path(row["uri"]).stem: row["image_id"] for row in found.table.to_pylist()}
    gone = sorted([ids[COPIED[0]], *(ids[COPIED[1] + kind] for kind in KINDS[1:])])
    publish_changed(run, tombstones=np.array(gone))
    left = find(run)
    assert left.images == 23
    expected = [group for group in EXPECTED if COPIED[1] not in group]
    assert name_groups(left) == [group - {COPIED[0]} for group in expected]


def test_without_points_copies_are_found_by_vectors_and_this_is_said(run, command_line):
    shards = open_version(RunFolder.open(str(run))).manifest.shards
    publish_changed(run, shards=tuple(replace(shard, points=None) for shard in shards))
    found = find(run, min_score=0.99)
    assert found.verified is None
    assert found.table.column("inliers").null_count == len(found.table) == 8
    said = command_line("copies", run, "--min-score", "0.99")
    assert "by vectors alone: the run keeps no points" in said.stdout


@pytest.mark.parametrize("place", ["data_written:find_copies", "recorded:find_copies", "data_written:output"])
def test_killed_and_called_again_gives_the_same_bytes(place, planted, run, tmp_path, command_line):
    whole, out = tmp_path / "whole", tmp_path / "out"
    options = ("--workers", "0", "--quiet")
    kill = {"CKN_SCALE_FAILPOINT": f"{place}_folder" if place.endswith("output") else place}
    assert command_line("copies", run, "--output", out, *options, env=kill).returncode == -9
    assert not out.exists()
    assert command_line("copies", run, "--output", out, *options).returncode == 0
    fresh = shutil.copytree(planted, tmp_path / "fresh")
    assert command_line("copies", fresh, "--output", whole, *options).returncode == 0
    for name in ("copies.csv", "copies.parquet", "copies.png"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_after_an_append_only_what_is_new_is_compared(run, tmp_path, monkeypatch):
    monkeypatch.setattr(find_copies, "NUM_REFERENCES", 12)  # so that the first segment is large enough
    find(run)
    more = tmp_path / "more"
    more.mkdir()
    write_photo(more, f"{COPIED[0]}-late", read_photo(COPIED[0]), 70)
    write_photo(more, DISTRACTORS[8], read_photo(DISTRACTORS[8]))
    index_here(more, run, append=True, accept=True)
    found = find(run)
    groups = name_groups(found)
    assert [group for group in groups if f"{COPIED[0]}-late" in group] == [
        {f"{COPIED[0]}-late", *(COPIED[0] + kind for kind in KINDS)}
    ]
    begun = [event for event in read_events(run, "step_begins") if event["step"].startswith("find_copies")]
    assert begun[-1]["step"] == begun[0]["step"]
    assert 0 < begun[-1]["undone"] < begun[-1]["shards"]
    shutil.rmtree(run / "copies")
    for folder in (run / "commits").iterdir():
        if folder.name.startswith(("find_copies", "draw_references")):
            shutil.rmtree(folder)
    assert find(run).table.equals(found.table)


@pytest.mark.parametrize(
    ("names", "rows"),
    [(DISTRACTORS[:7], 7), (PHOTOS[:1], 1), ((), 0)],
    ids=["no copies", "one image", "none ok"],
)
def test_a_run_without_copies_says_so(names, rows, reference, tmp_path, command_line):
    photos = tmp_path / "photos"
    photos.mkdir()
    for name in names:
        write_photo(photos, name, read_photo(name))
    (photos / "broken.jpg").write_bytes(b"no image")
    index_here(photos, tmp_path / "run", models=str(reference), accept=True)
    result = command_line("copies", tmp_path / "run", "--output", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert f"version 1: {rows} images; 0 pairs of near-copies" in result.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["copies.csv", "copies.parquet"]
    assert len(pq.read_table(tmp_path / "out" / "copies.parquet")) == 0


def test_copies_asks_for_a_published_version_and_a_local_folder(run, tmp_path, command_line):
    for arguments, sentence in (
        ((run, "--version", "9"), "has no version 9"),
        ((run, "--output", "s3://bucket/out"), "results go to a local folder"),
        ((run, "--output", run / "out"), "lies in the run folder"),
        ((tmp_path,), "is not a run folder"),
        ((run, "--min-score", "1.5"), "less than or equal to 1"),
    ):
        result = command_line("copies", *arguments, "--workers", "0")
        assert (result.returncode, sentence in result.stderr) == (2, True), result.stderr


def test_copies_on_ray_are_those_of_one_process(run, tmp_path, command_line):
    result = command_line(
        "copies", run, "--ray", "local", "--workers", "2", "--output", tmp_path / "out", "--quiet"
    )
    assert result.returncode == 0, result.stderr
    assert pq.read_table(tmp_path / "out" / "copies.parquet").equals(find(run).table)
