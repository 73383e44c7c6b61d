"""After a purge nothing is left of dead images but their rows of the plan; small index shards are one."""

from __future__ import annotations

import shutil
import signal

import numpy as np
import pyarrow.parquet as pq
import pytest
from dying_verbs import go_on, stop_at
from grown_runs import numbers_of
from photo_runs import digests_of, index_here, parse, read_commits
from test_delete_images import assert_well, found_ids, states_of, uris_of

from ckn_scale.config import Resources
from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import DISTRACTORS, read_photo
from ckn_scale.errors import InputError
from ckn_scale.failpoints import SHARD_VARIABLE
from ckn_scale.runners.driver import open_driver
from ckn_scale.runs.collect_garbage import find_garbage, find_purged_files
from ckn_scale.runs.delete_images import delete_images
from ckn_scale.runs.purge import purge_run
from ckn_scale.runs.versions import roll_back
from ckn_scale.search.engine import open_index
from ckn_scale.storage.index_files import read_manifest
from ckn_scale.storage.run_folder import RunFolder

DEAD = [4, 9, 23]


def purge_here(run, **options):
    opened = RunFolder.open(str(run))
    with open_driver(opened, Resources(workers=0), lambda progress: None) as driver:
        return purge_run(driver, **options)


def traces_of(run, image_ids):
    """Bytes that are of these images alone: parts of vectors, points and thumbnails, by what they are."""
    found = {}
    for stage, column in (("vectors", "vector"), ("descriptors", "codes"), ("thumbnails", "jpeg")):
        for path in sorted((run / stage).glob("*.parquet")):
            for row in pq.read_table(path, columns=["image_id", column]).to_pylist():
                if row["image_id"] in image_ids and row[column]:
                    found[stage, row["image_id"]] = (
                        row[column][:64] if stage != "thumbnails" else row[column][-64:]
                    )
    assert len(found) == 3 * len(image_ids)
    return found


def holders_of(run, traces):
    """Files that have one of the traces, as it is or inside a table."""
    holders = set()
    for path in (path for path in run.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if path.suffix == ".parquet":
            data += b"".join(
                value if isinstance(value, bytes) else b""
                for row in pq.read_table(path).to_pylist()
                for value in row.values()
            )
        if any(trace in data for trace in traces.values()):
            holders.add(str(path.relative_to(run)))
    return holders


def test_a_purge_leaves_nothing_of_deleted_images(run, command_line):
    opened = RunFolder.open(str(run))
    traces, uri = (
        traces_of(run, DEAD),
        open_index(str(run)).search_vector(open_index(str(run)).vector(4), 1)[0].uri,
    )
    living = digests_of(run)["plan"]
    delete_images(opened, DEAD)
    assert len({path.split("/")[0] for path in holders_of(run, traces)}) >= 4, (
        "index, vectors, descriptors, thumbnails"
    )
    result = command_line("purge", run, "--workers", "0", "--quiet")
    assert result.returncode == 0, result.stderr
    assert "nothing is kept of 3 deleted or replaced images but their rows of the plan" in result.stdout
    assert holders_of(run, traces) == set()
    assert numbers_of(run)[-1] == (4, 21, None)
    assert states_of(run) == {"deleted": 3, "ok": 21, "truncated": 1}
    assert digests_of(run)["plan"] == living
    assert uri in [image.uri for image in uris_of(run).values()]
    manifest = read_manifest(opened.store, opened.versions.latest().manifest)
    assert (manifest.tombstones, manifest.rows) == (None, 21)
    assert not set(DEAD) & set(found_ids(run, uri))
    assert_well(run)
    assert find_garbage(opened, grace_s=0) == find_purged_files(opened) == []
    again = parse(command_line("purge", run, "--workers", "0", "--quiet", "--json"))
    assert (again["version"], again["files_removed"]) == (4, 0)


def test_living_rows_are_the_same_bytes_and_are_found_as_before(run):
    index = open_index(str(run))
    vectors = {one: index.vector(one) for one in range(25) if one not in DEAD}
    before = {path.name for path in (run / "vectors").iterdir()}
    delete_images(RunFolder.open(str(run)), DEAD)
    answers = open_index(str(run)).search_vectors(np.array([vectors[0], vectors[24]]), 30)
    purge_here(run)
    index = open_index(str(run))
    assert index.search_vectors(np.array([vectors[0], vectors[24]]), 30) == answers
    for image_id, vector in vectors.items():
        np.testing.assert_array_equal(index.vector(image_id), vector)
    touched = [commit for commit in read_commits(run).values() if commit.generation > 1]
    assert len(touched) == 3
    assert all(commit.reason == "purge 1" for commit in touched)
    assert len(before & {path.name for path in (run / "vectors").iterdir()}) == len(before) - 3


def test_replaced_images_go_too_and_small_shards_are_joined(reference, photos, tmp_path):
    own, run = shutil.copytree(photos, tmp_path / "own"), tmp_path / "run"
    options = {"models": str(reference), "accept": True}
    index_here(own, run, **options)
    old = uris_of(run)["coffee.jpg"].image_id
    for number in range(3):
        (own / "coffee.jpg").write_bytes(encode_jpeg(read_photo(DISTRACTORS[7 + number]), 95))
        index_here(own, run, append=True, **options)
    before = len(
        read_manifest(
            RunFolder.open(str(run)).store, RunFolder.open(str(run)).versions.latest().manifest
        ).shards
    )
    report = purge_here(run, accept=True)
    assert (report.purged, states_of(run)["replaced"]) == (3, 3)
    assert report.index_shards < before, "each append was a shard of its own"
    assert not {old, 22, 23} & set(found_ids(run, own / "coffee.jpg"))
    assert found_ids(run, own / "coffee.jpg")[0] == 24
    assert_well(run)


def test_versions_from_before_a_purge_are_refused_with_a_sentence(run, command_line):
    opened = RunFolder.open(str(run))
    delete_images(opened, DEAD)
    purge_here(run)
    for number in (1, 2, 3):
        result = command_line("rollback", run, str(number))
        assert result.returncode == 2
        assert f"version {number} is from before a purge, which removed what it holds" in result.stderr
    with pytest.raises(InputError, match="version 3 is from before a purge"):
        roll_back(opened)
    with pytest.raises(InputError, match="version 2 is from before a purge"):
        open_index(str(run), 2)
    delete_images(opened, [0])
    assert roll_back(opened).restores == 4, "since the purge all is as ever"
    assert 0 in found_ids(run, uris_of(run)["coffee.jpg"].uri)


def test_with_a_grace_time_old_files_stay_until_the_next_purge(run):
    opened = RunFolder.open(str(run))
    traces = traces_of(run, DEAD)
    delete_images(opened, DEAD)
    report = purge_here(run, grace_s=3600)
    assert (report.files_removed, report.files_left > 6) == (0, True)
    assert holders_of(run, traces)
    assert sorted(find_garbage(opened, grace_s=0)) == sorted(find_purged_files(opened))
    assert purge_here(run).files_removed == report.files_left
    assert holders_of(run, traces) == set()
    assert_well(run)


def test_what_is_damaged_after_a_purge_is_rebuilt_without_dead_images(run, new_photos):
    traces = traces_of(run, DEAD)
    delete_images(RunFolder.open(str(run)), DEAD)
    purge_here(run)
    whole = digests_of(run)
    commit = read_commits(run)[2]
    for file in commit.files.values():
        (run / file.path).unlink()
    index_here(new_photos, run, append=True, check_all=True)
    assert (digests_of(run), holders_of(run, traces)) == (whole, set())
    assert_well(run)


def test_nothing_to_purge_publishes_nothing(run):
    report = purge_here(run)
    once = numbers_of(run)
    assert (report.purged, report.files_removed >= 0) == (0, True)
    assert purge_here(run).version == report.version
    assert numbers_of(run) == once


# Killed anywhere, and others at work

KILLS = [
    *("data_written:purge:1", "recorded:purge:1", "data_written:encode_images:4", "recorded:encode_images:4"),
    *("data_written:build_index", "data_written:publish:4", "published:purge:4"),
]


@pytest.mark.parametrize("place", KILLS)
def test_a_purge_killed_anywhere_and_called_again_ends_as_one_that_was_not(
    run, tmp_path, command_line, place
):
    traces = traces_of(run, DEAD)
    delete_images(RunFolder.open(str(run)), DEAD)
    whole = shutil.copytree(run, tmp_path / "whole")
    purge_here(whole)
    killed = command_line("purge", run, "--workers", "0", "--quiet", env={SHARD_VARIABLE: place})
    assert killed.returncode == -signal.SIGKILL
    assert purge_here(run).version == 4
    assert digests_of(run) == digests_of(whole)
    assert holders_of(run, traces) == set()
    assert_well(run)


@pytest.mark.parametrize(
    "place", ["data_written:purge:1", "data_written:encode_images:4", "data_written:publish:4"]
)
def test_a_purge_beside_an_append_and_a_delete_ends_as_one_of_their_orders(run, tmp_path, place):
    traces = traces_of(run, DEAD)
    delete_images(RunFolder.open(str(run)), DEAD)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "c.jpg").write_bytes(encode_jpeg(read_photo(DISTRACTORS[8]), 90))
    sleeper = stop_at(place, "purge", run, "--workers", "0", "--quiet")
    index_here(tmp_path / "more", run, append=True)
    delete_images(RunFolder.open(str(run)), [0])
    go_on(sleeper)
    assert_well(run)
    assert states_of(run) == {"deleted": 4, "ok": 21, "truncated": 1}
    assert found_ids(run, tmp_path / "more" / "c.jpg")[0] == 25
    assert not {0, *DEAD} & set(found_ids(run, tmp_path / "more" / "c.jpg"))
    purge_here(run)
    assert holders_of(run, traces) == set()
    assert_well(run)
