"""Workers on Ray hold what they compute on: GPUs only where the run computes on them, a core per thread."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

import pytest
from photo_runs import copy_trained, digests_of, index_command, read_commits, tiny_options
from ray_nodes import RayNodes

from ckn_scale.config import Resources
from ckn_scale.errors import InputError
from ckn_scale.pipeline import resolve_settings
from ckn_scale.runners.ray_actors import count_needs, count_room
from ckn_scale.steps.plan_images import plan_images

NODES = [
    {"Alive": True, "Resources": {"CPU": 16.0, "GPU": 4.0}},
    {"Alive": True, "Resources": {"CPU": 7.0}},
    {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
]


@pytest.mark.parametrize(
    ("device", "threads", "needs", "room"),
    [
        ("cpu", 1, {"CPU": 1}, 23),
        ("cpu", 4, {"CPU": 4}, 5),
        ("cpu", 20, {"CPU": 20}, 0),
        ("cuda", 1, {"CPU": 5, "GPU": 1.0}, 3),
    ],
)
def test_workers_ask_for_what_they_compute_on(device, threads, needs, room):
    assert count_needs({"device": device, "threads": threads}, Resources(read_ahead=4)) == needs
    assert count_room(NODES, needs) == room


@pytest.fixture(scope="module")
def cluster(user_env):
    """Four cores and two GPUs, as far as Ray knows."""
    with RayNodes(user_env, count=2, num_cpus=2, num_gpus=1) as nodes:
        yield nodes


@contextmanager
def driver(cluster, *arguments):
    command = [*index_command("-v", "index", *arguments), *tiny_options(), "--ray", "auto"]
    with subprocess.Popen(command, env=cluster.driver_env, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:  # one that is asked for more than there is would wait for minutes
            process.kill()


def test_gpus_are_left_alone_by_a_run_that_does_not_compute_on_them(
    cluster, reference, reference_digests, photos, tmp_path
):
    run = copy_trained(reference, tmp_path / "run")
    with driver(cluster, photos, run, "--workers", "4") as index:
        _, said = index.communicate(timeout=240)
    assert index.returncode == 0, said
    assert said.count("an actor is ready") == 4, said
    assert "have room for" not in said
    assert {commit.worker["gpus"] for commit in read_commits(run).values()} == {""}
    assert digests_of(run) == reference_digests


@pytest.mark.timeout(100)
def test_gpus_are_given_to_a_run_that_computes_on_them(cluster, photos, tmp_path):
    with driver(cluster, photos, tmp_path / "run", "--workers", "2", "--device", "cuda") as index:
        found = next(line for line in index.stderr if "workers ask for" in line)
        assert "2 workers ask for 5 CPU and 1 GPU each" in found
        assert "(2 CPU and 1 GPU, 2 CPU and 1 GPU) have room for 0" in found


def test_gpu_that_torch_does_not_see_is_refused_by_name(cluster, photos, tmp_path):
    code = (
        "import sys\nfrom ckn_scale.config import Resources\n"
        "from ckn_scale.pipeline import resolve_settings\n"
        "from ckn_scale.pipeline import open_driver\n"
        "from ckn_scale.steps.plan_images import plan_images\n"
        "photos, run = sys.argv[1:]\n"
        "print(resolve_settings(run, 'tiny', ray='auto').numerics.device)\n"
        "planned = plan_images(run, resolve_settings(run, 'tiny', device='cuda', ray='auto'), photos)\n"
        "print(resolve_settings(run, 'tiny', ray='auto').numerics.device)\n"
        "with open_driver(planned, Resources(workers=2, ray='auto', read_ahead=1), print):\n    pass\n"
    )
    command = [sys.executable, "-c", code, str(photos), str(tmp_path / "run")]
    result = subprocess.run(command, env=cluster.driver_env, capture_output=True, text=True, timeout=240)
    assert result.stdout.split() == ["cpu", "cuda"], "what a task of the cluster sees, then what the run says"
    assert "torch sees no GPU in this process (CUDA_VISIBLE_DEVICES=0)" in result.stderr


def test_cluster_of_our_own_has_a_core_for_each_thread_and_workers_hold_them(photos, user_env, tmp_path):
    code = (
        "import sys, ray\nfrom photo_runs import wait_for\n"
        "from ckn_scale.config import Resources, load_settings\n"
        "from ckn_scale.pipeline import open_driver\n"
        "from ckn_scale.steps.plan_images import plan_images\n"
        "photos, run = sys.argv[1:]\n"
        "planned = plan_images(run, load_settings('tiny', None, ['numerics.threads=2']), photos)\n"
        "with open_driver(planned, Resources(workers=2, ray='local'), print) as driver:\n"
        "    print(driver.executor.free, ray.cluster_resources()['CPU'])\n"
        "    wait_for(lambda: not ray.available_resources().get('CPU'), 'all cores are held', timeout_s=20)\n"
    )
    command = [sys.executable, "-c", code, str(photos), str(tmp_path / "run")]
    result = subprocess.run(command, env=user_env, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["2", "4.0"]


def test_device_is_chosen_by_what_is_named_then_by_the_run_then_by_torch(reference, photos, tmp_path):
    def device(run, *overrides, **named):
        return resolve_settings(str(run), "tiny", None, overrides, **named).numerics.device

    assert device(tmp_path / "new") == "cpu", "there is no GPU here"
    assert device(tmp_path / "new", "numerics.device=cuda") == "cuda"
    assert device(tmp_path / "new", device="cuda") == "cuda"
    assert device(reference) == "cpu"
    plan_images(str(tmp_path / "begun"), resolve_settings("", "tiny", device="cuda"), str(photos))
    assert device(tmp_path / "begun") == "cuda"
    with pytest.raises(InputError, match=r"--device cuda, but the models of .* were learned on cpu"):
        device(tmp_path / "new", device="cuda", models=str(reference))
