"""Actors, nodes and the head of a Ray cluster die, images kill and hang: the same bytes in the end.

The tests share one cluster and run in the order of the file; the last one kills its head.
"""

from __future__ import annotations

import os
import signal
import time

import cv2
import numpy as np
import pytest
from photo_runs import (
    assert_conserved,
    assert_some_skipped,
    digests_of,
    finish,
    index_command,
    index_here,
    read_commits,
    read_events,
    tiny_options,
    wait_for,
)
from poison import POISON, assert_two_rows_lost, copy_with_poison, poison_options
from ray_nodes import RayNodes, listen_to_signals, read_bytes

from ckn_scale.interrupts import SENTENCE


@pytest.fixture(scope="module")
def cluster(user_env):
    with RayNodes({**user_env, **POISON}, count=3) as nodes:
        yield nodes


@pytest.fixture
def start_driver(cluster, spawn):
    """`ckn-scale index` on the cluster, in the background."""

    def start(photos, run, workers, *options):
        command = index_command("index", photos, run, *tiny_options(), "--workers", str(workers), *options)
        command += ["--ray", "auto"]
        return spawn(command, env=cluster.driver_env, start_new_session=True, preexec_fn=listen_to_signals)

    return start


def _wait_until_encoding(run, driver, workers):
    """Until each worker has recorded a shard, and more are to be done; their pids."""

    def find_workers():
        pids = {commit.worker["pid"] for commit in read_commits(run).values()}
        return pids if len(pids) == workers else None

    return wait_for(find_workers, "every worker recorded a shard", driver)


def _list_actors(cluster, title=b"ShardActor"):
    workers = [pid for node in cluster.nodes for pid in cluster.list_workers(node)]
    return [pid for pid in workers if title in read_bytes(f"/proc/{pid}/cmdline")]


def _stop_in_a_shard(pid):
    """From now on the worker holds a shard: if it was between two, it has been handed the next."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.5)


def test_three_actors_on_three_nodes_give_the_same_bytes(
    cluster, photos, reference_digests, start_driver, tmp_path
):
    run = tmp_path / "run"
    finish(start_driver(photos, run, 3))
    assert digests_of(run) == reference_digests
    assert len({commit.worker["pid"] for commit in read_commits(run).values()}) == 3


def test_one_actor_gives_the_same_bytes(run, photos, reference_digests, start_driver):
    finish(start_driver(photos, run, 1))
    assert digests_of(run) == reference_digests


def test_interrupted_driver_leaves_no_actor_on_the_cluster(
    cluster, run, photos, reference_digests, start_driver
):
    driver = start_driver(photos, run, 2)
    _wait_until_encoding(run, driver, 2)
    os.killpg(driver.pid, signal.SIGINT)
    _, stderr = driver.communicate(timeout=60)
    assert driver.returncode == 130, stderr
    assert stderr.splitlines()[-1] == SENTENCE
    assert "Traceback" not in stderr
    wait_for(lambda: not _list_actors(cluster), "its actors are gone")
    finish(start_driver(photos, run, 2))
    assert digests_of(run) == reference_digests


def test_poison_images_cost_one_row_each_on_ray(photos, reference, start_driver, tmp_path):
    folder, run = copy_with_poison(photos, tmp_path / "photos"), tmp_path / "run"
    finish(start_driver(folder, run, 3, *poison_options(reference)))
    assert_two_rows_lost(run)


def test_killed_actor_is_replaced_and_its_shard_done_again(run, photos, reference_digests, start_driver):
    driver = start_driver(photos, run, 2)
    worker = _wait_until_encoding(run, driver, 2).pop()
    _stop_in_a_shard(worker)
    os.kill(worker, signal.SIGKILL)
    finish(driver)
    again = [
        event for kind in ("lost", "node_lost") for event in read_events(run, kind, step="encode_images")
    ]
    assert len(again) == 1
    assert digests_of(run) == reference_digests
    assert_conserved(run)


def test_a_network_is_trained_by_three_actors_though_one_is_killed(cluster, user_env, spawn, tmp_path):
    """The file has the bytes of one that a single process trained."""
    rng = np.random.default_rng(0)
    for name in ("a/0", "a/1", "b/0", "b/1"):
        path = tmp_path / "patches" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), rng.integers(0, 255, (64, 64, 3), np.uint8))
    command = index_command("train-network", "deepcompare-siam", tmp_path / "patches")
    options = ["--steps", "40", "--batch", "12"]
    alone = spawn([*command, tmp_path / "alone", *options, "--workers", "0"], env=user_env)
    together = [*command, tmp_path / "together", *options, "--workers", "3", "--ray", "auto"]
    driver = spawn(together, env=cluster.driver_env)
    busy = wait_for(lambda: _list_actors(cluster, b"CallActor.call"), "an actor computes", driver)
    os.kill(busy[0], signal.SIGKILL)
    for process in (alone, driver):
        finish(process)
    assert (tmp_path / "together").read_bytes() == (tmp_path / "alone").read_bytes()


def test_killed_node_is_left_and_the_work_goes_on_elsewhere(
    cluster, run, photos, reference_digests, start_driver
):
    driver = start_driver(photos, run, 3)
    workers = _wait_until_encoding(run, driver, 3)
    node = cluster.nodes[-1]
    for worker in workers.intersection(cluster.list_workers(node)):
        _stop_in_a_shard(worker)
    cluster.kill_node(node)
    finish(driver)
    node_lost = read_events(run, "node_lost", step="encode_images")
    assert node_lost, "the node took a shard with it"
    assert not read_events(run, "lost"), "which is not held against the shard"
    assert digests_of(run) == reference_digests
    assert_conserved(run)


def test_killed_head_ends_the_driver_and_a_rerun_elsewhere_goes_on(
    cluster, run, photos, reference_digests, start_driver
):
    driver = start_driver(photos, run, 2)
    workers = _wait_until_encoding(run, driver, 2)
    head, *others = cluster.nodes
    for worker in workers.intersection(pid for node in others for pid in cluster.list_workers(node)):
        _stop_in_a_shard(worker)  # actors need no head to go on: this one does not end the run meanwhile
    cluster.kill_node(head)
    driver.communicate(timeout=120)
    assert driver.returncode != 0
    assert 0 < len(read_commits(run)) < 11
    index_here(photos, run)
    assert_some_skipped(run)
    assert digests_of(run) == reference_digests
    assert_conserved(run)
