"""The Ray Serve deployments: one ingress, one encoder, one deployment per shard group.

A deployment per group, so that each has replicas and health of its own and a dead one is seen by name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from ray import serve
from ray.serve.config import BackpressureConfig
from ray.serve.handle import DeploymentHandle

from ckn_scale.core.evidence import Evidence, QueryPoints
from ckn_scale.search.evidence import RankedCandidate, RankedHits
from ckn_scale.search.filters import Filter
from ckn_scale.search.hits import Hit, IndexedImage
from ckn_scale.search.matches import PairMatch
from ckn_scale.search.versions import latest_version_number
from ckn_scale.serving.api import make_api
from ckn_scale.serving.gate import RequestGate
from ckn_scale.serving.messages import (
    BadFilter,
    Box,
    Deleted,
    DrawnImages,
    Encoded,
    Found,
    Judgement,
    Preview,
    Rejected,
    Shortlisted,
)
from ckn_scale.serving.ray_metrics import RayExporter
from ckn_scale.serving.replicas import EncoderReplica, ShardReplica
from ckn_scale.serving.router import SearchRouter
from ckn_scale.serving.settings import ServeSettings
from ckn_scale.serving.versions import describe_version, follow_versions
from ckn_scale.storage.run_folder import RunFolder

# A killed replica is seen at the next check; the long timeout spares one that is only slow.
HEALTH = {"health_check_period_s": 2.0, "health_check_timeout_s": 30.0, "graceful_shutdown_timeout_s": 5.0}
OTHER_REQUESTS = 64  # thumbnails, page and probes beside the searches


class _ReplicatedHandle:
    """A deployment that counts as ready once every one of its replicas was seen to hold a version.

    A call reaches one replica of Serve's choice, so several are made and the answers collected.
    """

    def __init__(self, handle: DeploymentHandle, num_replicas: int) -> None:
        self._handle = handle
        self._num_replicas = num_replicas
        self._seen: dict[int, set[str]] = {}

    async def prepare(self, version: int) -> bool:
        calls = 1 if self._num_replicas == 1 else 3 * self._num_replicas
        answers = await asyncio.gather(*(self._handle.report.remote(version) for _ in range(calls)))
        seen = self._seen.setdefault(version, set())
        seen.update(answer.replica for answer in answers if answer.ready)
        return len(seen) >= self._num_replicas and any(answer.ready for answer in answers)


class EncoderHandle(_ReplicatedHandle):
    """The encoder deployment as the router sees it."""

    async def encode(self, version: int, data: bytes, box: Box | None) -> Encoded | Rejected:
        encoded: Encoded | Rejected = await self._handle.encode.remote(version, data, box)
        return encoded

    async def match(self, version: int, data: bytes, other: bytes, box: Box | None) -> PairMatch | Rejected:
        found: PairMatch | Rejected = await self._handle.match.remote(version, data, other, box)
        return found

    async def widen(self, version: int, hits: Sequence[QueryPoints]) -> list[QueryPoints]:
        widened: list[QueryPoints] = await self._handle.widen.remote(version, list(hits))
        return widened

    async def preview(self, version: int, data: bytes) -> Preview | Rejected:
        made: Preview | Rejected = await self._handle.preview.remote(version, data)
        return made


class GroupHandle(_ReplicatedHandle):
    """A shard group's deployment as the router sees it."""

    async def search(
        self, version: int, vector: np.ndarray, k: int, wanted: Filter | None
    ) -> list[Hit] | BadFilter:
        hits: list[Hit] | BadFilter = await self._handle.search.remote(version, vector, k, wanted)
        return hits

    async def find(
        self, version: int, vector: np.ndarray, k: int, wanted: Filter | None
    ) -> Found | BadFilter:
        found: Found | BadFilter = await self._handle.find.remote(version, vector, k, wanted)
        return found

    async def compare(self, version: int, vector: np.ndarray, image_ids: np.ndarray) -> np.ndarray:
        similarity: np.ndarray = await self._handle.compare.remote(version, vector, image_ids)
        return similarity

    async def score(self, version: int, points: QueryPoints, image_ids: np.ndarray) -> np.ndarray:
        scores: np.ndarray = await self._handle.score.remote(version, points, image_ids)
        return scores

    async def verify(self, version: int, points: QueryPoints, image_ids: np.ndarray) -> list[Evidence]:
        evidence: list[Evidence] = await self._handle.verify.remote(version, points, image_ids)
        return evidence

    async def verify_best(
        self, version: int, points: QueryPoints, candidates: Shortlisted, judgement: Judgement
    ) -> RankedHits:
        best: RankedHits = await self._handle.verify_best.remote(version, points, candidates, judgement)
        return best

    async def rank(
        self,
        version: int,
        query: Encoded,
        count: int,
        wanted: Filter | None,
        without: int | None,
        judgement: Judgement,
    ) -> tuple[RankedHits, float] | BadFilter:
        best: tuple[RankedHits, float] | BadFilter = await self._handle.rank.remote(
            version, query, count, wanted, without, judgement
        )
        return best

    async def describe(self, version: int, ranked: Sequence[RankedCandidate]) -> list[Hit]:
        hits: list[Hit] = await self._handle.describe.remote(version, list(ranked))
        return hits

    async def load_hits(
        self, version: int, image_ids: np.ndarray, evidence: Sequence[Evidence]
    ) -> tuple[np.ndarray, list[QueryPoints]]:
        loaded: tuple[np.ndarray, list[QueryPoints]] = await self._handle.load_hits.remote(
            version, image_ids, list(evidence)
        )
        return loaded

    async def load_vectors(self, version: int, image_ids: np.ndarray) -> np.ndarray:
        vectors: np.ndarray = await self._handle.load_vectors.remote(version, image_ids)
        return vectors

    async def load_rows(self, version: int, image_ids: np.ndarray) -> np.ndarray:
        rows: np.ndarray = await self._handle.load_rows.remote(version, image_ids)
        return rows

    async def load_query(self, version: int, image_id: int) -> Encoded | None:
        query: Encoded | None = await self._handle.load_query.remote(version, image_id)
        return query

    async def match(self, version: int, image_id: int, query: Encoded) -> PairMatch | None:
        found: PairMatch | None = await self._handle.match.remote(version, image_id, query)
        return found

    async def look_up(self, version: int, image_id: int) -> IndexedImage | Deleted | None:
        found: IndexedImage | Deleted | None = await self._handle.look_up.remote(version, image_id)
        return found

    async def draw(self, version: int, count: int) -> DrawnImages:
        drawn: DrawnImages = await self._handle.draw.remote(version, count)
        return drawn

    async def thumbnail(self, version: int, image_id: int) -> bytes | None:
        jpeg: bytes | None = await self._handle.thumbnail.remote(version, image_id)
        return jpeg


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
            EncoderHandle(encoder, settings.encoder_replicas),
            [GroupHandle(group, settings.shard_replicas) for group in groups],
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
