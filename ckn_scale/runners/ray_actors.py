"""A crew of Ray actors: pinned to GPUs where the cluster has them, CPU actors otherwise.

Actors take names and return small reports; pixels never enter the object store. The driver holds
no state: a rerun resumes from the records.
"""

from __future__ import annotations

import logging
import os
import time
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from ckn_scale.config import Resources
from ckn_scale.errors import CknScaleError, InputError
from ckn_scale.runners.base import Outcome, ShardTask
from ckn_scale.runners.sight import Sight
from ckn_scale.runners.worker import Worker

log = logging.getLogger(__name__)

START_ALLOWANCE_S = 600.0  # a cluster may first have to add nodes


class ShardActor:
    """A worker on some node of the cluster."""

    def __init__(self, run_url: str, read_ahead: int, sight: Sight) -> None:
        self._worker = Worker(run_url, read_ahead, sight)

    def ready(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def process(self, task: ShardTask) -> dict[str, Any]:
        return self._worker.process(task)


class RayCrew:
    """Joins (`auto`) or starts (`local`) a cluster and keeps `workers` actors busy."""

    def __init__(self, run_url: str, resources: Resources, sight: Sight) -> None:
        self._run_url, self._resources, self._sight = run_url, resources, sight
        self._idle: list[Any] = []
        self._running: dict[Any, tuple[Any, ShardTask, float]] = {}  # result → actor, task, start
        self._actors: list[Any] = []
        self._owns_ray = False

    def __enter__(self) -> RayCrew:
        self._owns_ray = connect(self._resources)
        try:
            self._actors = [self._hire() for _ in range(self._resources.workers)]
            self._await_actors()
        except BaseException:
            self._leave()
            raise
        self._idle = list(self._actors)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    @property
    def free(self) -> int:
        return len(self._idle)

    def start(self, task: ShardTask) -> None:
        actor = self._idle.pop()
        result = actor.process.remote(task)
        self._running[result] = (actor, task, time.monotonic())

    def wait(self, timeout_s: float) -> list[Outcome]:
        finished, _ = ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
        outcomes = [self._collect(result) for result in finished]
        now, deadline_s = time.monotonic(), self._resources.shard_deadline_s
        overdue = [r for r, (_, _, started) in self._running.items() if now - started > deadline_s]
        return outcomes + [self._give_up(result) for result in overdue]

    def _collect(self, result: Any) -> Outcome:
        actor, task, _ = self._running.pop(result)
        try:
            report = ray.get(result)
        except RayActorError as error:
            self._idle.append(actor)  # Ray restarts it; calls wait until it is back
            return Outcome(task, "lost", error=CknScaleError(f"its actor died: {_first_line(error)}"))
        except RayTaskError as error:
            self._idle.append(actor)
            cause = error.cause
            known = cause if isinstance(cause, CknScaleError) else CknScaleError(_first_line(cause))
            return Outcome(task, "failed", error=known)
        self._idle.append(actor)
        return Outcome(task, "done", report)

    def _give_up(self, result: Any) -> Outcome:
        actor, task, _ = self._running.pop(result)
        ray.kill(actor, no_restart=False)
        self._idle.append(actor)
        return Outcome(task, "overdue", error=CknScaleError("its actor was killed at the deadline"))

    def _hire(self) -> Any:
        options = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": 0, "scheduling_strategy": "SPREAD"}
        gpus = self._gpus_per_worker()
        if gpus > 0:
            options["num_gpus"] = gpus
        return (
            ray.remote(ShardActor)
            .options(**options)
            .remote(self._run_url, self._resources.read_ahead, self._sight)
        )

    def _gpus_per_worker(self) -> float:
        if self._resources.gpus_per_worker is not None:
            return self._resources.gpus_per_worker
        return 1.0 if ray.cluster_resources().get("GPU", 0) >= 1 else 0.0

    def _await_actors(self) -> None:
        try:
            nodes = ray.get([actor.ready.remote() for actor in self._actors], timeout=START_ALLOWANCE_S)
        except GetTimeoutError:
            raise InputError(
                f"the cluster did not start {self._resources.workers} workers in {START_ALLOWANCE_S:g} s; "
                f"it has {ray.cluster_resources()}"
            ) from None
        except RayActorError as error:
            raise InputError(_root_sentence(error)) from None
        log.info("%d actors on %d nodes", len(nodes), len(set(nodes)))

    def _leave(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        if self._owns_ray:
            ray.shutdown()


def connect(resources: Resources) -> bool:
    """Connect to Ray; True when this call started or joined it and has to leave it again.

    `local` starts a cluster of its own and never joins a stranger's.
    """
    if ray.is_initialized():
        return False
    if resources.ray == "auto":
        ray.init(address="auto", log_to_driver=False)
        return True
    # Ray would otherwise write an access token into the home folder.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(
        address="local",
        num_cpus=max(resources.workers, 1),
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _temp_dir=None,
    )
    return True


def _first_line(error: BaseException | None) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _root_sentence(error: RayActorError) -> str:
    """The sentence that the actor's constructor raised, out of Ray's wrapping."""
    lines = [line for line in str(error).splitlines() if "ckn_scale.errors." in line]
    return lines[-1].split(": ", 1)[1] if lines else _first_line(error)
