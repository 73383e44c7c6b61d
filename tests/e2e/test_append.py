"""What an append costs follows the append: what did not change is taken over."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from photo_runs import digests_of, index_here, read_commits, read_events

from ckn_scale.core.augmentations import encode_jpeg
from ckn_scale.demo import DISTRACTORS, read_photo
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
    return RunFolder.open(str(run)).versions.latest().certificate


def asked_in(run):
    """Ids of the images that were asked for, by the records of the last draw."""
    draw = read_draw(RunFolder.open(str(run)), certificate_of(run)["draw"])
    return {image.image_id for image in draw.asked}


def test_index_shards_that_did_not_change_are_taken_over(run, more):
    before = read_commits(run, "build_index")
    index_here(more, run, append=True)
    begun = read_events(run, "step_begins", step="build_index")[-1]
    assert (begun["shards"], begun["undone"]) == (7, 2), "the last one was not full, and one is new"
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
    other = replace(version, certificate={**version.certificate, "encoder": "another"})
    assert draw_queries(opened, read_segments(opened), other).taken_over == ()
    (run / version.certificate["outcomes"]["path"]).write_bytes(b"cut")
    assert draw_queries(opened, read_segments(opened), version).taken_over == ()
