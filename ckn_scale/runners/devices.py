"""Where a run computes: resolved when it is planned, recorded as `numerics.device`, not guessed again."""

from __future__ import annotations

import contextlib

from ckn_scale.errors import InputError
from ckn_scale.storage.run_folder import RunFolder, is_run

PROBE_ALLOWANCE_S = 120.0  # an actor of another job may hold the GPUs for longer


def find_device(run_url: str, ray: str | None) -> str:
    """The device of the run, where it was begun; else the one that workers will have."""
    if is_run(run_url):
        return str(RunFolder.open(run_url).settings["numerics"]["device"])
    return choose_device(ray)


def choose_device(ray: str | None) -> str:
    """cuda where torch sees a GPU: in a task of the cluster with `ray="auto"`, here otherwise."""
    return "cuda" if (_workers_see_gpu() if ray == "auto" else _sees_gpu()) else "cpu"


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _workers_see_gpu() -> bool:
    """Whether torch sees a GPU in a task that holds one: a cluster's GPUs are no use to a CPU build."""
    import ray

    from ckn_scale.ray_cluster import connect_ray

    with contextlib.nullcontext() if ray.is_initialized() else connect_ray("auto"):
        if ray.cluster_resources().get("GPU", 0) <= 0:
            return False
        answer = ray.remote(_sees_gpu).options(num_gpus=0.01, num_cpus=0).remote()
        try:
            return bool(ray.get(answer, timeout=PROBE_ALLOWANCE_S))
        except ray.exceptions.GetTimeoutError:
            raise InputError(
                f"the cluster has GPUs, but none came free in {PROBE_ALLOWANCE_S:g} s to see whether torch "
                "can use them: say --device cuda or --device cpu"
            ) from None
