"""Where a run computes: settled when it is planned, recorded as `numerics.device`, not guessed again."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from ckn_scale.config import Settings, load_settings
from ckn_scale.errors import InputError
from ckn_scale.steps.record_models import settings_for_models
from ckn_scale.storage.run_folder import RunFolder, is_run

PROBE_ALLOWANCE_S = 120.0  # an actor of another job may hold the GPUs for longer


def resolve_settings(
    run_url: str,
    preset: str = "compact",
    config: str | None = None,
    overrides: Sequence[str] = (),
    *,
    device: str = "auto",
    ray: str | None = None,
    models: str | None = None,
) -> Settings:
    """The settings a run is planned with: as named, with what `models` were made with, on a settled device.

    `auto` is what a preset, file or override names; else the device of the run, where it was begun; else
    cuda where torch sees a GPU: in a task of the cluster with `ray="auto"`, here otherwise.
    """
    if device == "auto":
        settings = load_settings(preset, config, overrides, choose_device=lambda: _find_device(run_url, ray))
    else:
        settings = load_settings(preset, config, [*overrides, f"numerics.device={device}"])
    settled = settings_for_models(settings, models)
    if device not in ("auto", settled.numerics.device):
        raise InputError(
            f"--device {device}, but the models of {models} were learned on {settled.numerics.device}: "
            "descriptors are compared within one kind of device; leave --device out, or learn models there"
        )
    return settled


def _find_device(run_url: str, ray: str | None) -> str:
    if is_run(run_url):
        return str(RunFolder.open(run_url).settings["numerics"]["device"])
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
            return ray.get(answer, timeout=PROBE_ALLOWANCE_S)
        except ray.exceptions.GetTimeoutError:
            raise InputError(
                f"the cluster has GPUs, but none came free in {PROBE_ALLOWANCE_S:g} s to see whether torch "
                "can use them: say --device cuda or --device cpu"
            ) from None
