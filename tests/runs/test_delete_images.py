"""Deleted images are in no answer of the versions after, whoever else works on the run, killed anywhere."""

from __future__ import annotations

import json
import os
import shutil
import signal

import numpy as np
import pyarrow.parquet as pq
import pytest
from dying_verbs import go_on, stop_at
from grown_runs import NEW, flip_bit, list_files, numbers_of
from photo_runs import digests_of, index_here, parse, tiny_options

from ckn_scale.core.faiss_library import import_faiss
from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import DISTRACTORS, read_photo
from ckn_scale.errors import CorruptData, InputError
from ckn_scale.failpoints import SHARD_VARIABLE
from ckn_scale.runs.collect_garbage import find_garbage
from ckn_scale.runs.delete_images import delete_images
from ckn_scale.runs.export import export_version
from ckn_scale.runs.status import list_failures, shards_with_failures, summarise_run
from ckn_scale.runs.verify import verify_run
from ckn_scale.runs.versions import list_versions, roll_back
from ckn_scale.search.engine import open_index
from ckn_scale.steps.publish_deletions import publish_deletions
from ckn_scale.storage.deletions import list_deleted, read_deletions
from ckn_scale.storage.index_files import read_ids, read_manifest
from ckn_scale.storage.run_folder import RunFolder


def uris_of(run):
    """Image ids by the last part of the URI, of all planned images."""
    from ckn_scale.storage.plans import iter_planned, read_segments

    opened = RunFolder.open(str(run))
    return {image.uri.rpartition("/")[2]: image for image in iter_planned(opened, read_segments(opened))}


def found_ids(run, photo, k=100):
    return [hit.image_id for hit in open_index(str(run)).search(photo, k)]


def states_of(run):
    return dict(RunFolder.open(str(run)).versions.latest().states)


def assert_well(run):
    """Verified, and each planned image in one state."""
    opened = RunFolder.open(str(run))
    found = verify_run(opened)
    assert (found.problems, found.notes) == ([], [])
    images = summarise_run(opened)["images"]
    assert images["planned"] == sum(images["states"].values())
    assert images["states"] == states_of(run)
    assert images["states"].get("ok", 0) == opened.versions.latest().rows


def test_a_deleted_image_is_in_no_answer(run, new_photos, command_line):
    photo, before = new_photos / f"new-{NEW[0]}.jpg", list_files(run)
    gone = uris_of(run)[photo.name].image_id
    assert found_ids(run, photo)[0] == gone
    result = command_line("delete", run, str(gone))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "1 image deleted\nversion 3 is current: 23 images\n"
    index = open_index(str(run))
    assert len(index) == 23
    assert gone not in [hit.image_id for hit in index.search(photo, 100)]
    assert (index.vector(gone), index.thumbnail(gone)) == (None, None)
    assert states_of(run) == {"deleted": 1, "ok": 23, "truncated": 1}
    after = list_files(run)
    assert {path: after[path] for path in before} == before, "nothing was altered or removed"
    assert not any(path.endswith((".faiss", ".arrow", ".parquet")) for path in after.keys() - before.keys())
    assert_well(run)


def test_what_was_deleted_stays_out_after_an_append_and_a_rerun(run, photos, new_photos, tmp_path):
    victims = [uris_of(run)[f"new-{NEW[0]}.jpg"], uris_of(run)["coffee.jpg"]]
    delete_images(RunFolder.open(str(run)), uris=[image.uri for image in victims])
    index_here(photos, run)
    index_here(new_photos, run, append=True)  # still has it
    assert numbers_of(run)[-1] == (3, 22, None), "nothing is new"
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.jpg").write_bytes(encode_jpeg(read_photo(DISTRACTORS[9]), 90))
    index_here(tmp_path / "more", run, append=True)
    assert numbers_of(run)[-1] == (4, 23, None)
    for image in victims:
        assert image.image_id not in found_ids(run, image.uri)
    assert_well(run)


def test_rollback_brings_deleted_images_back_and_the_next_version_does_not(run, new_photos):
    photo, opened = new_photos / f"new-{NEW[0]}.jpg", RunFolder.open(str(run))
    gone = uris_of(run)[photo.name].image_id
    delete_images(opened, [gone])
    assert roll_back(opened).restores == 2
    assert found_ids(run, photo)[0] == gone
    assert verify_run(opened).problems == []
    report = delete_images(opened, [0])
    assert (report.deleted, report.version, report.rows) == (1, 5, 22)
    assert gone not in found_ids(run, photo)
    assert roll_back(opened, 4).rows == 24
    assert index_here(new_photos, run, append=True).version == 7
    assert {0, gone} & set(found_ids(run, photo)) == set()
    assert_well(run)


def test_images_may_be_named_by_uri_and_some_may_be_gone_already(run, new_photos, command_line):
    names = [str(new_photos / f"new-{name}.jpg") for name in NEW]
    listed = run.parent / "gone.txt"
    listed.write_text("\n".join(names[:2]) + "\n\n")
    first = parse(command_line("delete", run, "--uris", listed, "--json"))
    assert first == {"deleted": 2, "already": 0, "version": 3, "rows": 22}
    relative = os.path.relpath(names[2], run.parent)
    again = command_line(
        "delete", run, "--uris", "-", "--json", input=f"{names[0]}\n{relative}\n", cwd=run.parent
    )
    assert parse(again) == {"deleted": 1, "already": 1, "version": 4, "rows": 21}
    nothing = command_line("delete", run, "--uris", listed)
    assert nothing.stdout == "0 images deleted, 2 were before\nversion 4 is current: 21 images\n"


@pytest.mark.parametrize("named", [[99], [-1, 3]])
def test_unknown_ids_delete_nothing(run, named):
    with pytest.raises(InputError, match=rf"has no image {named[0]}: ids are 0 to 24; nothing was deleted"):
        delete_images(RunFolder.open(str(run)), named)
    assert numbers_of(run)[-1][0] == 2


def test_unknown_uris_and_no_images_at_all_are_bad_input(run, command_line):
    result = command_line("delete", run, "--uris", "-", input="".join(f"/nowhere/{i}\n" for i in range(5)))
    assert result.returncode == 2
    assert "has no image /nowhere/0, /nowhere/1, /nowhere/2 and 2 more; nothing was deleted" in result.stderr
    result = command_line("delete", run)
    assert (result.returncode, "no images were named" in result.stderr) == (2, True)
    assert command_line("delete", run, "--uris", "/nowhere.txt").returncode == 2
    assert numbers_of(run)[-1][0] == 2


def test_everything_may_be_deleted_and_searches_find_nothing(run, new_photos, command_line):
    photo = new_photos / f"new-{NEW[0]}.jpg"
    result = command_line("delete", run, *map(str, range(25)))
    assert result.stdout.endswith("0 images: the index is empty, and searches find nothing\n")
    assert states_of(run) == {"deleted": 25}
    assert found_ids(run, photo) == []
    assert parse(command_line("search", run, photo, "--json"))["results"][0]["hits"] == []
    assert_well(run)


def test_before_the_first_version_a_deletion_waits_for_it(photos, tmp_path, reference, command_line):
    run = shutil.copytree(reference, tmp_path / "run")
    shutil.rmtree(run / "index")
    shutil.rmtree(run / "commits" / "build_index")
    result = command_line("delete", run, "3")
    assert "no version published yet: the first one will be without them" in result.stdout
    assert index_here(photos, run).version == 1
    assert 3 not in found_ids(run, uris_of(run)["coffee.jpg"].uri)
    assert_well(run)


def test_a_failure_that_is_deleted_is_no_failure_any_more(run):
    opened = RunFolder.open(str(run))
    broken = uris_of(run)["broken.jpg"].image_id
    assert [row["image_id"] for row in list_failures(opened)] == [broken]
    delete_images(opened, [broken])
    assert states_of(run) == {"deleted": 1, "ok": 24}
    assert (list(list_failures(opened)), shards_with_failures(opened)) == ([], [])
    assert [row["image_id"] for row in list_failures(opened, "deleted")] == [broken]
    assert_well(run)


def test_versions_and_the_certificate_say_what_it_was_measured_on(run, command_line):
    opened = RunFolder.open(str(run))
    before = opened.versions.latest().certificate
    delete_images(opened, [0])
    delete_images(opened, [1])
    last = list_versions(opened)["versions"][-1]
    assert (last["deletions"], last["certificate"]["carried_from"]) == (2, 2)
    assert last["certificate"]["queries"] == before.queries
    assert "asked of version 2; images were deleted since" in command_line("status", run).stdout


@pytest.mark.parametrize("form", ["npy", "parquet", "faiss"])
def test_exports_leave_deleted_images_out(run, tmp_path, form):
    opened, out = RunFolder.open(str(run)), tmp_path / "out"
    broken = uris_of(run)["broken.jpg"].image_id
    delete_images(opened, [0, 7])
    export_version(opened, str(out), form)
    kept = [one for one in range(25) if one not in (0, 7, broken)]
    if form == "npy":
        assert np.load(out / "ids.npy").tolist() == kept
        assert np.load(out / "vectors.npy").shape[0] == len(kept)
    elif form == "parquet":
        assert pq.read_table(out / "vectors.parquet").column("image_id").to_pylist() == kept
    else:
        index = import_faiss().read_index(str(out / "index.faiss"))
        assert sorted(index.search(np.eye(index.d, dtype=np.float32)[:1], 100)[1][0].tolist())[-22:] == kept
        assert index.ntotal == len(kept)


# Killed anywhere, and others at work


KILLS = ["data_written:delete:1", "recorded:delete:1", "data_written:publish:3"]


@pytest.mark.parametrize("place", KILLS)
def test_a_delete_killed_anywhere_and_called_again_ends_as_one_that_was_not(
    run, tmp_path, command_line, place
):
    whole = shutil.copytree(run, tmp_path / "whole")
    assert delete_images(RunFolder.open(str(whole)), [4, 23]).rows == 22
    killed = command_line("delete", run, "4", "23", env={SHARD_VARIABLE: place})
    assert killed.returncode == -signal.SIGKILL
    again = parse(command_line("delete", run, "4", "23", "--json"))
    assert (again["deleted"] + again["already"], again["version"], again["rows"]) == (2, 3, 22)
    assert digests_of(run) == digests_of(whole)
    assert_well(run)


@pytest.mark.parametrize("place", KILLS)
def test_two_deletes_at_once_are_both_done(run, place):
    sleeper = stop_at(place, "delete", run, "4", "23")
    delete_images(RunFolder.open(str(run)), [3, 23])
    go_on(sleeper)
    opened = RunFolder.open(str(run))
    assert list_deleted(opened, read_deletions(opened)).tolist() == [3, 4, 23]
    assert opened.versions.latest().rows == 21
    assert_well(run)


@pytest.mark.parametrize("place", KILLS)
def test_a_delete_beside_an_append_does_not_undo_it(run, tmp_path, place):
    more = tmp_path / "more"
    more.mkdir()
    (more / "a.jpg").write_bytes(encode_jpeg(read_photo(DISTRACTORS[9]), 90))
    sleeper = stop_at(place, "delete", run, "4", "23")
    index_here(more, run, append=True)
    go_on(sleeper)
    alone = shutil.copytree(run, tmp_path / "alone")
    assert_well(run)
    assert (states_of(run)["deleted"], RunFolder.open(str(run)).versions.latest().rows) == (2, 23)
    assert {4, 23} & set(found_ids(run, more / "a.jpg")) == set()
    index_here(more, alone, append=True)
    assert digests_of(alone) == digests_of(run)


def test_an_append_that_slept_through_a_delete_does_not_bring_the_image_back(run, tmp_path):
    more = tmp_path / "more"
    more.mkdir()
    (more / "a.jpg").write_bytes(encode_jpeg(read_photo(DISTRACTORS[9]), 90))
    options = [*tiny_options(), "--append", "--workers", "0", "--quiet"]
    sleeper = stop_at("data_written:publish:3", "index", more, run, *options)
    assert delete_images(RunFolder.open(str(run)), [4]).version == 3
    go_on(sleeper)
    assert numbers_of(run)[-1] == (4, 24, None)
    assert 4 not in found_ids(run, more / "a.jpg")
    assert_well(run)


# Damage


def test_a_damaged_record_of_deletions_is_refused_and_found(run):
    opened = RunFolder.open(str(run))
    delete_images(opened, [4])
    flip_bit(run / "deletions" / "000001.json")
    for call in (lambda: delete_images(opened, [3]), lambda: publish_deletions(opened)):
        with pytest.raises(CorruptData, match="images that were deleted would come back"):
            call()
    assert "deletions/000001.json" in {found.path for found in verify_run(opened).problems}
    (run / "deletions" / "000001.json").unlink()
    problems = {found.path: found.what for found in verify_run(opened).problems}
    assert problems["deletions/000001.json"] == "it is gone"


def test_tombstones_that_lack_a_deleted_image_are_found(run):
    opened = RunFolder.open(str(run))
    delete_images(opened, [4])
    delete_images(opened, [3])
    manifest = read_manifest(opened.store, opened.versions.latest().manifest)
    assert read_ids(opened.store, manifest.tombstones).tolist() == [3, 4]
    (run / manifest.tombstones.path).write_bytes(b"")
    assert manifest.tombstones.path in {found.path for found in verify_run(opened).problems}
    with pytest.raises(CorruptData):
        open_index(str(run))


def test_garbage_collection_leaves_what_was_deleted(run):
    opened = RunFolder.open(str(run))
    delete_images(opened, [4])
    assert find_garbage(opened, grace_s=0) == []
    assert json.loads((run / "deletions" / "000001.json").read_text())["why"] == "user"
