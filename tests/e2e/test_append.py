"""What an append costs follows the append: what did not change is taken over."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace

import pytest
from photo_runs import OVERRIDES, digests_of, index_here, read_commits, read_events

from ckn_scale.config import Resources, load_settings
from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import DISTRACTORS, read_photo
from ckn_scale.pipeline import index_images
from ckn_scale.steps.certify_index import CertifyIndex
from ckn_scale.steps.draw_queries import draw_queries, read_draw
from ckn_scale.storage.plans import read_segments
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


def certificate_of(run):
    return asdict(RunFolder.open(str(run)).versions.latest().certificate)


def asked_in(run):
    """Ids of the images that were asked for, by the records of the last draw."""
    draw = read_draw(RunFolder.open(str(run)), certificate_of(run)["draw"])
    return {image.image_id for image in draw.asked}


def test_index_shards_that_did_not_change_are_taken_over(run, more):
    before = read_commits(run, "build_index")
    index_here(more, run, append=True)
    begun = read_events(run, "step_begins", step="build_index")[-1]
    assert (begun["shards"], begun["undone"]) == (7, 1), "what is new is a shard of its own"
    after = read_commits(run, "build_index")
    assert all(after[number] == commit for number, commit in before.items())


def test_a_version_after_an_append_is_asked_for_what_is_new(run, more):
    first = certificate_of(run)
    assert (first["taken_over"], first["new_asked"]) == (0, first["asked"])
    index_here(more, run, append=True)
    second = certificate_of(run)
    assert asked_in(run) == {22, 23, 24}
    assert (second["asked"], second["new_asked"]) == (3, 3)
    assert second["taken_over"] == second["queries"] - 3 > 0
    assert second["queries"] >= first["queries"]
    planted = read_events(run, "step_begins")[-2]
    assert (planted["step"].partition("-")[0], planted["undone"]) == ("plant_queries", 1)


def test_an_append_killed_before_it_is_certified_goes_on(run, more, monkeypatch):
    uninterrupted = shutil.copytree(run, run.parent / "uninterrupted")
    index_here(more, uninterrupted, append=True)
    monkeypatch.setattr(CertifyIndex, "apply", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        index_here(more, run, append=True)
    monkeypatch.undo()
    index_here(more, run, append=True)
    assert digests_of(run) == digests_of(uninterrupted)
    mine, other = certificate_of(run), certificate_of(uninterrupted)
    assert {**mine, "outcomes": 0, "draw": 0} == {**other, "outcomes": 0, "draw": 0}
    begun = read_events(run, "step_begins")
    assert [event["undone"] for event in begun if event["step"].startswith("plant_queries")] == [1, 0]


def test_nothing_is_taken_over_from_another_encoder_or_a_damaged_record(run):
    opened = RunFolder.open(str(run))
    version = opened.versions.latest()
    other = replace(version, certificate=replace(version.certificate, encoder="another"))
    assert draw_queries(opened, read_segments(opened), [], other).taken_over == ()
    (run / version.certificate.outcomes.path).write_bytes(b"cut")
    assert draw_queries(opened, read_segments(opened), [], version).taken_over == ()


@pytest.fixture
def few_older(monkeypatch):
    """As in a large index: of the shards that stood before, an append asks only two."""
    monkeypatch.setattr("ckn_scale.steps.draw_queries.OLDER_SHARDS", 2)


def test_the_certificate_says_of_how_much_of_the_index_its_queries_were_asked(
    run, more, few_older, command_line
):
    first = certificate_of(run)
    assert (first["asked_rows"], first["asked_shards"]) == (first["rows"], first["index_shards"]) == (21, 6)
    assert (first["everywhere"], first["everywhere_first"]) == (first["queries"], first["first"])
    assert "of a part" not in command_line("status", run).stdout
    index_here(more, run, append=True)
    second = certificate_of(run)
    asked = read_events(run, "step_begins")[-1]
    assert (asked["step"], asked["shards"]) == (f"certify_index-{second['draw']}", 3)
    assert (second["asked_shards"], second["index_shards"]) == (3, 7), "one is new, two drawn of six"
    assert second["asked_rows"] == second["fewest_rows"] < second["rows"] == 24
    assert second["everywhere"] == second["queries"] - 3, "those taken over have seen the rest before"
    said = command_line("status", run).stdout
    assert f"3 of a part, at least {second['fewest_rows']} rows" in said


def test_what_was_not_asked_is_remembered_by_later_versions(run, more, few_older):
    index_here(more, run, append=True)
    before = certificate_of(run)
    (more / "new-again.jpg").write_bytes(encode_jpeg(read_photo(DISTRACTORS[8]), 90))
    index_here(more, run, append=True)
    after = certificate_of(run)
    assert (after["asked"], after["rows"]) == (1, 25)
    assert after["everywhere"] <= after["queries"] - 1 - 3, "those of the append before were not asked again"
    assert before["rows"] - before["fewest_rows"] <= after["rows"] - after["fewest_rows"]


def test_workers_ask_what_the_driver_drew(run, more, few_older):
    alone = shutil.copytree(run, run.parent / "alone")
    index_here(more, alone, append=True)
    settings = load_settings("tiny", None, OVERRIDES)
    index_images(str(more), str(run), settings, Resources(workers=2), append=True)
    assert digests_of(run) == digests_of(alone)
    mine, other = certificate_of(run), certificate_of(alone)
    assert {**mine, "outcomes": 0, "draw": 0} == {**other, "outcomes": 0, "draw": 0}


def test_an_append_asks_anew_where_vectors_of_queries_are_lost(run, more):
    first = certificate_of(run)
    lost = next((run / "queries" / first["draw"]).glob("00000-*.parquet"))
    lost.write_bytes(b"damage")
    report = index_here(more, run, append=True)
    second = certificate_of(run)
    assert report.version == 2
    assert (second["taken_over"], second["everywhere"]) == (0, second["queries"])
    assert second["queries"] >= first["queries"]
