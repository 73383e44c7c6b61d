"""A group of workers that are Ray's actors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError

from ckn_scale.config import Resources
from ckn_scale.errors import InputError, RunFailed
from ckn_scale.ray_cluster import connect_ray
from ckn_scale.runners.ray_actors import START_ALLOWANCE_S, as_ours, count_needs, count_room

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class CallActor:
    """Calls the function that it was made with."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def ready(self) -> None:
        """Answered when there was room for the actor."""

    def call(self, shared: tuple[Any, ...], part: Any) -> Any:
        return self._function(*shared, part)


class ActorGroup(Generic[Answer]):
    """As many actors as there is room for; what all of them get goes to each node once.

    Ray itself replaces an actor that died, or whose node did, and repeats its call.
    """

    def __init__(
        self, function: Callable[..., Answer], resources: Resources, *, device: str, threads: int
    ) -> None:
        self._function, self._resources = function, resources
        self._needs = count_needs({"device": device, "threads": threads}, resources)
        self._connection = contextlib.ExitStack()
        self._actors: list[Any] = []

    @property
    def size(self) -> int:
        return len(self._actors)

    def __enter__(self) -> ActorGroup[Answer]:
        wanted = max(self._resources.workers, 1)
        if not ray.is_initialized():
            address = "auto" if self._resources.ray == "auto" else None
            own_cpus = wanted * round(self._needs["CPU"])
            self._connection.enter_context(connect_ray(address, num_cpus=own_cpus))
        try:
            self._start_actors(wanted)
        except BaseException:
            self._shut_down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._shut_down()

    def call_all(self, shared: tuple[Any, ...], parts: Sequence[Any]) -> list[Answer]:
        stored = ray.put(shared)
        calls = zip(self._actors, parts, strict=False)
        answers = [actor.call.remote(stored, part) for actor, part in calls]
        try:
            found: list[Answer] = ray.get(answers, timeout=self._resources.shard_deadline_s)
        except GetTimeoutError:
            raise RunFailed(
                f"workers did not answer in {self._resources.shard_deadline_s:g} s: the cluster may have "
                "lost their nodes; the same command goes on"
            ) from None
        except RayError as error:
            raise as_ours(error) from None
        return found

    def _start_actors(self, wanted: int) -> None:
        room = count_room(ray.nodes(), self._needs)
        if room < wanted:
            log.warning("%d workers are wanted, the cluster has room for %d", wanted, room)
        maker = ray.remote(CallActor).options(
            num_cpus=self._needs["CPU"],
            num_gpus=self._needs.get("GPU", 0),
            max_restarts=-1,
            max_task_retries=self._resources.max_attempts - 1,
            scheduling_strategy="SPREAD",
        )
        self._actors = [maker.remote(self._function) for _ in range(max(min(wanted, room), 1))]
        try:
            ray.get([actor.ready.remote() for actor in self._actors], timeout=START_ALLOWANCE_S)
        except GetTimeoutError:
            raise InputError(
                f"workers did not start in {START_ALLOWANCE_S:g} s: is the cluster busy?"
            ) from None
        except RayError as error:
            raise as_ours(error) from None

    def _shut_down(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        self._connection.close()
