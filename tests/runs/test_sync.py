"""A run follows its source: what is new is added, what changed replaced, what is gone deleted."""

from __future__ import annotations

import shutil
import signal

import pytest
from dying_verbs import go_on, stop_at
from grown_runs import numbers_of
from photo_runs import digests_of, index_here, tiny_options
from test_delete_images import assert_well, found_ids, states_of, uris_of

from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import DISTRACTORS, read_photo
from ckn_scale.errors import InputError, RunMismatch
from ckn_scale.failpoints import SHARD_VARIABLE
from ckn_scale.runs.delete_images import delete_images
from ckn_scale.storage.run_folder import RunFolder

OPTIONS = [*tiny_options(), "--sync", "--workers", "0", "--quiet"]


@pytest.fixture(scope="session")
def synced_photos(photos, tmp_path_factory):
    return shutil.copytree(photos, tmp_path_factory.mktemp("own") / "photos")


@pytest.fixture(scope="session")
def indexed(synced_photos, reference, tmp_path_factory):
    run = tmp_path_factory.mktemp("synced") / "run"
    index_here(synced_photos, run, models=str(reference))
    return run


@pytest.fixture
def run(indexed, tmp_path):
    return shutil.copytree(indexed, tmp_path / "run")


@pytest.fixture
def own(synced_photos, tmp_path_factory):
    """The run's source; put back as it was afterwards."""
    kept = shutil.copytree(
        synced_photos, tmp_path_factory.mktemp("kept") / "photos", copy_function=shutil.copy2
    )
    yield synced_photos
    for path in synced_photos.iterdir():
        path.unlink()
    for path in kept.iterdir():
        shutil.copy2(path, synced_photos / path.name)


def photo(number):
    return encode_jpeg(read_photo(DISTRACTORS[number]), 90)


def change(own):
    """One file is gone, one has other content, one is new."""
    (own / "coffee.jpg").unlink()
    (own / "rocket.jpg").write_bytes(photo(9))
    (own / "added.jpg").write_bytes(photo(8))


def test_a_sync_adds_replaces_and_deletes_in_one_version(run, own, command_line):
    before = uris_of(run)
    change(own)
    result = command_line("index", own, run, *OPTIONS)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("1 added, 1 replaced, 1 deleted, 20 as before\nversion 2 of ")
    assert states_of(run) == {"deleted": 1, "ok": 21, "replaced": 1, "truncated": 1}
    after = uris_of(run)
    assert after["rocket.jpg"].image_id > before["rocket.jpg"].image_id
    assert found_ids(run, own / "rocket.jpg")[0] == after["rocket.jpg"].image_id
    assert not {before[name].image_id for name in ("rocket.jpg", "coffee.jpg")} & set(
        found_ids(run, own / "rocket.jpg")
    )
    assert_well(run)
    again = index_here(own, run, sync=True)
    assert (again.version, str(again.changes)) == (2, "0 added, 0 replaced, 0 deleted, 22 as before")


def test_what_was_gone_and_is_back_is_a_new_image(run, own):
    first, kept = uris_of(run)["coffee.jpg"], (own / "coffee.jpg").read_bytes()
    (own / "coffee.jpg").unlink()
    assert index_here(own, run, sync=True).changes.deleted == 1
    (own / "coffee.jpg").write_bytes(kept)
    report = index_here(own, run, sync=True)
    assert (report.changes.added, report.changes.unchanged, report.version) == (1, 21, 3)
    assert found_ids(run, own / "coffee.jpg")[0] == uris_of(run)["coffee.jpg"].image_id > first.image_id
    assert first.image_id not in found_ids(run, own / "coffee.jpg")
    assert_well(run)


def test_what_was_deleted_by_hand_stays_out_until_it_changes_or_is_asked_for(run, own):
    coffee, rocket = (uris_of(run)[name] for name in ("coffee.jpg", "rocket.jpg"))
    delete_images(RunFolder.open(str(run)), [coffee.image_id, rocket.image_id])
    report = index_here(own, run, sync=True)
    assert (report.version, report.changes.kept_out, report.changes.added) == (2, 2, 0)
    (own / "rocket.jpg").write_bytes(photo(9))
    report = index_here(own, run, sync=True)
    assert (report.version, report.changes.kept_out, report.changes.added) == (3, 1, 1)
    assert index_here(own, run, append=True).changes.kept_out == 1
    assert coffee.image_id not in found_ids(run, own / "coffee.jpg")
    report = index_here(own, run, append=True, undelete=True)
    assert (report.version, report.changes.added) == (4, 1)
    assert found_ids(run, own / "coffee.jpg")[0] == uris_of(run)["coffee.jpg"].image_id > coffee.image_id
    assert_well(run)


def test_images_of_another_source_are_left_alone(run, own, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "b.jpg").write_bytes(photo(8))
    index_here(other, run, append=True)
    report = index_here(own, run, sync=True)
    assert (report.version, report.changes.deleted) == (2, 0)
    with pytest.raises(RunMismatch, match="was planned from"):
        index_here(tmp_path, run, sync=True)


@pytest.mark.parametrize("gone", [6, 22])
def test_a_source_that_lost_much_deletes_nothing_unless_accepted(run, own, command_line, gone):
    for path in sorted(own.iterdir())[:gone]:
        path.unlink()
    (own / "notes.txt").write_text("no image")
    result = command_line("index", own, run, *OPTIONS)
    assert result.returncode == 1
    assert f"nothing was changed: {gone} of the 22 images" in result.stderr
    assert "max_gone_share = 0.2" in result.stderr
    assert (numbers_of(run)[-1][0], list((run / "deletions").glob("*.json"))) == (1, [])
    (own / "notes.txt").unlink()
    report = index_here(own, run, sync=True, accept=True)
    assert (report.version, report.states["deleted"]) == (2, gone)
    assert_well(run)


def test_a_source_that_is_not_there_deletes_nothing_even_if_accepted(run, own, tmp_path):
    moved = own.rename(tmp_path / "moved")
    try:
        with pytest.raises(InputError, match="does not exist"):
            index_here(own, run, sync=True, accept=True)
    finally:
        moved.rename(own)
    assert numbers_of(run)[-1][0] == 1


def test_an_edited_list_is_followed(run, own, tmp_path, reference):
    listed, listing = tmp_path / "list.txt", tmp_path / "listing"
    names = sorted(str(path) for path in own.iterdir())
    listed.write_text("\n".join(names[:12]))
    index_here(listed, listing, models=str(reference), accept=True)
    listed.write_text("\n".join(names[1:14]))
    report = index_here(listed, listing, sync=True, accept=True)
    assert (report.changes.added, report.changes.deleted, report.version) == (2, 1, 2)
    assert_well(listing)


def test_the_first_sync_of_a_folder_is_an_index(own, reference, tmp_path):
    report = index_here(own, tmp_path / "new", sync=True, models=str(reference))
    assert (report.version, report.changes) == (1, None)


# Killed anywhere, and others at work

KILLS = [
    *("data_written:delete:1", "recorded:delete:1", "data_written:plan:2", "data_written:encode_images"),
    *("data_written:build_index", "data_written:publish:2"),
]


@pytest.mark.parametrize("place", KILLS)
def test_a_sync_killed_anywhere_and_called_again_ends_as_one_that_was_not(
    run, own, tmp_path, command_line, place
):
    change(own)
    whole = shutil.copytree(run, tmp_path / "whole")
    index_here(own, whole, sync=True)
    killed = command_line("index", own, run, *OPTIONS, env={SHARD_VARIABLE: place})
    assert killed.returncode == -signal.SIGKILL
    assert index_here(own, run, sync=True).version == 2
    assert digests_of(run) == digests_of(whole)
    assert_well(run)


@pytest.mark.parametrize("place", ["data_written:delete:1", "data_written:plan:2", "data_written:publish:2"])
def test_a_sync_beside_a_delete_and_an_append_ends_as_one_of_their_orders(run, own, tmp_path, place):
    change(own)
    more = tmp_path / "more"
    more.mkdir()
    (more / "c.jpg").write_bytes(photo(7))
    sleeper = stop_at(place, "index", own, run, *OPTIONS)
    victim = uris_of(run)["astronaut.jpg"].image_id if "astronaut.jpg" in uris_of(run) else 0
    delete_images(RunFolder.open(str(run)), [victim])
    if "plan" not in place:
        index_here(more, run, append=True)
    go_on(sleeper)
    assert_well(run)
    states = states_of(run)
    assert (states["deleted"], states["replaced"]) == (2, 1)
    assert states["ok"] == 20 + ("plan" not in place)
    assert victim not in found_ids(run, own / "rocket.jpg")
