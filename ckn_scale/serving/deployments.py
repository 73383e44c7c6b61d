"""The Ray Serve deployments: one ingress, one encoder, one deployment per shard group.

A deployment per group, so that each has replicas and health of its own and a dead one is seen by name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from ray import serve
from ray.serve.config import BackpressureConfig
from ray.serve.handle import DeploymentHandle

from ckn_scale.search.versions import latest_version_number
from ckn_scale.serving.api import make_api
from ckn_scale.serving.gate import RequestGate
from ckn_scale.serving.messages import EncoderClient, GroupClient
from ckn_scale.serving.ray_metrics import RayExporter
from ckn_scale.serving.replicas import EncoderReplica, ShardReplica
from ckn_scale.serving.router import SearchRouter
from ckn_scale.serving.settings import ServeSettings
from ckn_scale.serving.versions import describe_version, follow_versions
from ckn_scale.storage.run_folder import RunFolder

# A killed replica is seen at the next check; the long timeout spares one that is only slow.
HEALTH = {"health_check_period_s": 2.0, "health_check_timeout_s": 30.0, "graceful_shutdown_timeout_s": 5.0}
OTHER_REQUESTS = 64  # thumbnails, page and probes beside the searches


class DeploymentClient:
    """A deployment as the router sees it: a method of its replicas, called by its name, is awaited.

    It counts as ready once every one of its replicas was seen to hold a version. A call reaches one replica
    of Serve's choice, so several are made and the answers collected.
    """

    def __init__(self, handle: DeploymentHandle, num_replicas: int) -> None:
        self._handle = handle
        self._num_replicas = num_replicas
        self._seen: dict[int, set[str]] = {}

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        remote = getattr(self._handle, method).remote

        async def call(*arguments: Any) -> Any:
            return await remote(*arguments)

        return call

    async def prepare(self, version: int) -> bool:
        calls = 1 if self._num_replicas == 1 else 3 * self._num_replicas
        answers = await asyncio.gather(*(self._handle.report.remote(version) for _ in range(calls)))
        seen = self._seen.setdefault(version, set())
        seen.update(answer.replica for answer in answers if answer.ready)
        return len(seen) >= self._num_replicas and any(answer.ready for answer in answers)


@serve.ingress()
class Ingress:
    """Takes HTTP requests, asks the other deployments, follows newly published versions."""

    def __init__(self, settings: ServeSettings, encoder: DeploymentHandle, *groups: DeploymentHandle) -> None:
        self._settings = settings
        self._run = RunFolder.open(settings.run_url)
        version = describe_version(self._run, latest_version_number(self._run), settings.shard_groups)
        self._router = SearchRouter(
            settings,
            version,
            cast(EncoderClient, DeploymentClient(encoder, settings.encoder_replicas)),
            [cast(GroupClient, DeploymentClient(group, settings.shard_replicas)) for group in groups],
        )
        self._following: asyncio.Task[None] | None = None

    def __serve_build_asgi_app__(self) -> RequestGate:
        self._following = asyncio.get_running_loop().create_task(follow_versions(self._run, self._router))
        gate = make_api(self._router, [RayExporter()])
        gate.sends_request_id = False  # Serve's proxy does
        return gate


def bind_application(settings: ServeSettings) -> serve.Application:
    """The graph of deployments for these settings."""
    in_flight = settings.max_in_flight * settings.ingress_replicas
    encoder = serve.deployment(
        EncoderReplica,
        name="encoder",
        num_replicas=settings.encoder_replicas,
        max_ongoing_requests=in_flight + 1,
        ray_actor_options={
            "num_cpus": _choose(settings.encoder_cpus, settings.encoder_threads),
            "num_gpus": settings.encoder_gpus,
        },
        **HEALTH,
    ).bind(settings)
    groups = [_bind_group(settings, group, in_flight) for group in range(settings.shard_groups)]
    ingress = serve.deployment(
        Ingress,
        name="ingress",
        num_replicas=settings.ingress_replicas,
        max_ongoing_requests=settings.max_in_flight + settings.max_bodies + OTHER_REQUESTS,
        max_queued_requests=OTHER_REQUESTS,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        ray_actor_options={"num_cpus": settings.ingress_cpus},
        **HEALTH,
    )
    return ingress.bind(settings, encoder, *groups)


def _bind_group(settings: ServeSettings, group: int, in_flight: int) -> serve.Application:
    return serve.deployment(
        ShardReplica,
        name=f"shards-{group}",
        num_replicas=settings.shard_replicas,
        max_ongoing_requests=in_flight + OTHER_REQUESTS,
        ray_actor_options={"num_cpus": _choose(settings.shard_cpus, settings.shard_threads)},
        **HEALTH,
    ).bind(settings, group)


def _choose(cpus: float | None, threads: int) -> float:
    return threads if cpus is None else cpus
