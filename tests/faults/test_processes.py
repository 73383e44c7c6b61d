"""Processes of one machine die, stop, or meet each other on one run: the same bytes in the end."""

from __future__ import annotations

import functools
import os
import signal
import time

import pytest
from photo_runs import (
    assert_conserved,
    assert_some_skipped,
    digests_of,
    finish,
    index_command,
    index_here,
    list_records,
    read_commits,
    read_events,
    tiny_options,
    wait_for,
)
from ray_nodes import list_children

from ckn_scale.failpoints import SHARD_VARIABLE
from ckn_scale.storage.run_folder import RunFolder


@pytest.fixture
def start_driver(photos, user_env, spawn):
    """`ckn-scale index` on a run, in the background."""

    def start(run, workers, **env):
        command = index_command("index", photos, run, *tiny_options(), "--workers", str(workers))
        return spawn(command, env={**user_env, **env})

    return start


def test_killed_pool_worker_is_replaced_and_its_shard_done_again(run, reference_digests, start_driver):
    driver = start_driver(run, workers=2)
    wait_for(lambda: list_records(run), "a shard is encoded", driver)
    worker = next(iter(read_commits(run).values())).worker["pid"]
    os.kill(worker, signal.SIGSTOP)
    time.sleep(0.5)  # if it was between two shards, it has been handed the next one now
    os.kill(worker, signal.SIGKILL)
    finish(driver)
    lost = read_events(run, "lost", step="encode_images")
    assert [f"worker {worker} was lost" in event["reason"] for event in lost] == [True]
    assert digests_of(run) == reference_digests
    assert_conserved(run)


@pytest.mark.parametrize("place", ["data_written", "recorded"])
def test_death_before_or_after_a_record_loses_and_doubles_nothing(
    run, photos, reference_digests, start_driver, place
):
    driver = start_driver(run, workers=0, **{SHARD_VARIABLE: f"{place}:encode_images:3"})
    driver.communicate(timeout=240)
    assert driver.returncode == -signal.SIGKILL
    assert len(list((run / "vectors").glob("00003-*"))) == 1, "its data were written"
    assert (3 in read_commits(run)) == (place == "recorded")
    index_here(photos, run)
    assert_some_skipped(run)
    assert len(list((run / "vectors").glob("00003-*"))) == (2 if place == "data_written" else 1)
    assert digests_of(run) == reference_digests
    assert_conserved(run)


def test_stopped_worker_that_wakes_after_another_committed_its_shard_loses(
    run, photos, reference_digests, start_driver
):
    late = start_driver(run, workers=1, **{SHARD_VARIABLE: "data_written:encode_images:2:STOP"})
    sleeper = wait_for(lambda: _find_stopped_child(late.pid), "the worker stops before its record", late)
    written = next((run / "vectors").glob("00002-*")).name
    index_here(photos, run)
    committed = read_commits(run)
    assert_some_skipped(run)
    assert committed[2].worker["pid"] == os.getpid()
    os.kill(sleeper, signal.SIGCONT)
    finish(late)
    assert read_commits(run) == committed, "the late commit lost"
    assert (run / "vectors" / written).exists(), "and its file is left to gc"
    assert digests_of(run) == reference_digests
    assert_conserved(run)


def test_two_drivers_that_start_at_once_make_one_run(photos, reference_digests, start_driver, tmp_path):
    run = tmp_path / "run"
    drivers = [start_driver(run, workers=1) for _ in range(2)]
    for driver in drivers:
        finish(driver)
    assert digests_of(run) == reference_digests
    assert_conserved(run)
    assert all(record.name.endswith(".1.json") for record in list_records(run))
    assert RunFolder.open(str(run)).versions.numbers() == [1], "one of them published"


def test_two_drivers_in_the_middle_of_a_run_share_it(run, reference_digests, start_driver):
    sleepers = []
    for shard in range(2):  # each has committed a shard before the race for the others begins
        driver = start_driver(run, workers=1, **{SHARD_VARIABLE: f"recorded:encode_images:{shard}:STOP"})
        find = functools.partial(_find_stopped_child, driver.pid)
        sleepers.append((driver, wait_for(find, f"shard {shard} is committed", driver)))
    assert set(read_commits(run)) == {0, 1}
    for _, sleeper in sleepers:
        os.kill(sleeper, signal.SIGCONT)
    for driver, _ in sleepers:
        finish(driver)
    assert digests_of(run) == reference_digests
    assert_conserved(run)
    assert {commit.worker["pid"] for commit in read_commits(run).values()} == {pid for _, pid in sleepers}
    assert all(record.name.endswith(".1.json") for record in list_records(run))
    assert RunFolder.open(str(run)).versions.numbers() == [1], "one of them published"


def _find_stopped_child(pid: int) -> int | None:
    """A child process in state T."""
    for child in list_children(pid):
        with open(f"/proc/{child}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "T":
                return child
    return None
