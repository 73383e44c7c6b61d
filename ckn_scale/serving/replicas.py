"""What a replica of the server does: encode a query image, or search one group of index shards.

Each holds the version in use and the next one, which loads in the background (`ResidentVersions`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ckn_scale.core.evidence import Evidence, QueryPoints, warm_up
from ckn_scale.core.expansion import widen_points
from ckn_scale.core.images import make_preview
from ckn_scale.core.preprocessor import PreparedImage, Preprocessor
from ckn_scale.core.ranking import Ranking
from ckn_scale.core.topk import NO_ID
from ckn_scale.errors import ImageRejected, InputError
from ckn_scale.search.evidence import (
    GroupCandidates,
    Query,
    RankedCandidate,
    RankedHits,
    add_evidence,
    describe_best,
    gather_evidence,
    leave_out,
    load_query,
    make_query,
    score_points_of,
    verify_points_of,
)
from ckn_scale.search.filters import Filter
from ckn_scale.search.hit_copies import read_rows
from ckn_scale.search.hits import Hit, IndexedImage
from ckn_scale.search.matches import PairMatch, match_encoded, match_stored
from ckn_scale.search.shard import ShardGroup
from ckn_scale.search.versions import assign_shards, latest_version_number, open_version
from ckn_scale.serving.batching import Batcher
from ckn_scale.serving.decoding import Decoders
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
    VerifiedSearch,
)
from ckn_scale.serving.settings import ServeSettings
from ckn_scale.serving.versions import Readiness, ResidentVersions
from ckn_scale.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from ckn_scale.core.encoder import EncodedImage, ImageEncoder

Result = TypeVar("Result")
GPU_BATCH = 8  # queries that wait for a GPU and are described together
PREVIEW_SIDE_PX = 1024


class EncoderReplica:
    """Turns query images into vectors, with the models of the version that a request pinned.

    Replicas of one process share a `pool`, a thread for each core: more would be in each other's way.
    """

    def __init__(self, settings: ServeSettings, pool: ThreadPoolExecutor | None = None) -> None:
        from ckn_scale.core.numerics import set_compute_threads

        self._name = secrets.token_hex(8)
        self._settings = settings
        self._run = RunFolder.open(settings.run_url)
        self._decoders = Decoders(settings.query_processes, settings.query_timeout_s)
        # The batches of all queries go through these threads; each computes as the run did.
        self._batches = pool or ThreadPoolExecutor(settings.encoder_threads, "batches")
        self._encoders: ResidentVersions[ImageEncoder] = ResidentVersions(self._identify, self._load)
        self._encoders.load_now(version := latest_version_number(self._run))
        encoder = self._encoders.get(version)
        set_compute_threads(encoder.threads)
        self._queries: Batcher[ImageEncoder, PreparedImage, EncodedImage] = Batcher(
            lambda encoder, prepared: encoder.encode_prepared(prepared),
            num_threads=settings.encoder_threads,
            max_items=settings.encoder_batch or (1 if encoder.device == "cpu" else GPU_BATCH),
            name="encode",
        )

    async def encode(self, version: int, data: bytes, box: Box | None) -> Encoded | Rejected:
        encoder = self._encoders.get(version)
        encoded = await self._describe(encoder, data, box)
        if isinstance(encoded, Rejected):
            return encoded
        query = await self._compute(make_query, encoded, encoder, box)
        if query.points is not None:
            await self._compute(getattr, query.points, "aggregated")  # once for all groups: it is kept
        return Encoded(query.vector, query.points)

    async def match(self, version: int, data: bytes, other: bytes, box: Box | None) -> PairMatch | Rejected:
        """Two files beside each other, both encoded."""
        encoder = self._encoders.get(version)
        first, second = await asyncio.gather(
            self._describe(encoder, data, box), self._describe(encoder, other, None)
        )
        if isinstance(first, Rejected):
            return first
        if isinstance(second, Rejected):
            return Rejected(second.state, f"the other image: {second.reason}")
        query = await self._compute(make_query, first, encoder, box)
        return await self._compute(match_encoded, query, second)

    async def widen(self, version: int, hits: Sequence[QueryPoints]) -> list[QueryPoints]:
        points = self._encoders.get(version).points
        if points is None:
            return list(hits)
        return [await self._compute(widen_points, hit, points.centroids) for hit in hits]

    async def _describe(self, encoder: ImageEncoder, data: bytes, box: Box | None) -> EncodedImage | Rejected:
        prepared = await self._decoders.call(data, Preprocessor.prepare, encoder.preprocessor, data, box)
        if isinstance(prepared, ImageRejected):
            return Rejected(prepared.state, prepared.reason)
        return await asyncio.wrap_future(self._queries.submit(encoder, prepared))

    async def _compute(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._batches, work, *arguments)

    async def preview(self, version: int, data: bytes) -> Preview | Rejected:
        spec = self._encoders.get(version).preprocessor.images
        made = await self._decoders.call(data, make_preview, data, spec, PREVIEW_SIDE_PX)
        return Rejected(made.state, made.reason) if isinstance(made, ImageRejected) else Preview(*made)

    def close(self) -> None:
        """End its processes, where the process that holds it goes on."""
        self._queries.close()
        self._batches.shutdown(cancel_futures=True)
        self._decoders.close()

    async def prepare(self, version: int) -> bool:
        """Whether the version is held here; otherwise it is being loaded from now on."""
        return self._encoders.prepare(version)

    async def report(self, version: int) -> Readiness:
        """The same, with the name of this replica among its siblings."""
        return Readiness(self._name, await self.prepare(version))

    def _load(self, version: int) -> ImageEncoder:
        from ckn_scale.search.engine import load_encoder

        manifest = open_version(self._run, version).manifest
        encoder = load_encoder(self._run.store, manifest, device=self._settings.device)
        if self._settings.encoder_threads > 1 and encoder.device == "cpu":
            encoder = replace(encoder, executor=self._batches)
        if encoder.points is not None:
            warm_up()
        return encoder

    def _identify(self, version: int) -> Hashable:
        """Most versions have the same models."""
        models = open_version(self._run, version).manifest.models
        return tuple(sorted((name, one.sha256) for name, one in models.items()))


class ShardReplica:
    """Searches one group of index shards, memory-mapped from this node's disk."""

    def __init__(self, settings: ServeSettings, group: int, pool: ThreadPoolExecutor | None = None) -> None:
        self._name = secrets.token_hex(8)
        self._settings = settings
        self._group = group
        self._run = RunFolder.open(settings.run_url)
        # FAISS does not divide a single query: threads are for queries beside each other.
        self._pool = pool or ThreadPoolExecutor(settings.shard_threads, "search")
        self._shards: ResidentVersions[ShardGroup] = ResidentVersions(self._identify, self._load)
        self._shards.load_now(latest_version_number(self._run))

    async def search(
        self, version: int, vector: np.ndarray, k: int, wanted: Filter | None
    ) -> list[Hit] | BadFilter:
        found = await self.find(version, vector, k, wanted)
        if isinstance(found, BadFilter):
            return found
        similarity, ids = found
        return await asyncio.to_thread(self._shards.get(version).describe, ids, similarity)

    async def find(
        self, version: int, vector: np.ndarray, k: int, wanted: Filter | None
    ) -> Found | BadFilter:
        return await self._compute(_find, version, vector, k, wanted)

    async def compare(self, version: int, vector: np.ndarray, image_ids: np.ndarray) -> np.ndarray:
        return await self._compute(ShardGroup.compare, version, vector, image_ids)

    async def score(self, version: int, points: QueryPoints, image_ids: np.ndarray) -> np.ndarray:
        return await self._compute(score_points_of, version, points, image_ids)

    async def verify(self, version: int, points: QueryPoints, image_ids: np.ndarray) -> list[Evidence]:
        return await self._compute(verify_points_of, version, points, image_ids)

    async def verify_best(
        self, version: int, points: QueryPoints, candidates: Shortlisted, judgement: Judgement
    ) -> RankedHits:
        """The last rounds in one call: what is verified is described, too, as far as it may be wanted."""
        return await self._compute(_verify_best, version, points, candidates, judgement)

    async def rank(self, version: int, asked: VerifiedSearch) -> tuple[RankedHits, float] | BadFilter:
        """All rounds in one call; and the milliseconds of the first."""
        return await self._compute(_rank, version, asked)

    async def describe(self, version: int, ranked: Sequence[RankedCandidate]) -> list[Hit]:
        return await asyncio.to_thread(add_evidence, self._shards.get(version), ranked)

    async def _compute(self, work: Callable[..., Result], version: int, *arguments: Any) -> Result:
        """`work` on the group, off the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, work, self._shards.get(version), *arguments)

    async def load_hits(
        self, version: int, image_ids: np.ndarray, evidence: Sequence[Evidence]
    ) -> tuple[np.ndarray, list[QueryPoints]]:
        return await self._compute(_load_hits, version, image_ids, evidence)

    async def load_vectors(self, version: int, image_ids: np.ndarray) -> np.ndarray:
        return await self._compute(_load_vectors, version, image_ids)

    async def load_rows(self, version: int, image_ids: np.ndarray) -> np.ndarray:
        return await self._compute(read_rows, version, image_ids)

    async def load_query(self, version: int, image_id: int) -> Encoded | None:
        query = await self._compute(load_query, version, image_id)
        return None if query is None else Encoded(query.vector, query.points)

    async def match(self, version: int, image_id: int, query: Encoded) -> PairMatch | None:
        return await self._compute(match_stored, version, Query(query.vector, query.points), image_id)

    async def look_up(self, version: int, image_id: int) -> IndexedImage | Deleted | None:
        shards = self._shards.get(version)
        return Deleted() if shards.is_deleted(image_id) else shards.look_up(image_id)

    async def draw(self, version: int, count: int) -> DrawnImages:
        return await self._compute(_draw, version, count)

    async def thumbnail(self, version: int, image_id: int) -> bytes | None:
        shards = self._shards.get(version)
        return await asyncio.to_thread(shards.thumbnail, image_id)

    async def prepare(self, version: int) -> bool:
        """Whether the version is held here; otherwise it is being loaded from now on."""
        return self._shards.prepare(version)

    async def report(self, version: int) -> Readiness:
        """The same, with the name of this replica among its siblings."""
        return Readiness(self._name, await self.prepare(version))

    def _load(self, version: int) -> ShardGroup:
        manifest = open_version(self._run, version).manifest
        shard_ids = assign_shards(manifest, self._settings.shard_groups)[self._group]
        group = ShardGroup(self._run.store, manifest, shard_ids)
        if group.has_points:
            warm_up()
        return group

    def _identify(self, version: int) -> Hashable:
        return open_version(self._run, version).record.manifest.sha256


def _load_hits(
    shards: ShardGroup, image_ids: np.ndarray, evidence: Sequence[Evidence]
) -> tuple[np.ndarray, list[QueryPoints]]:
    return GroupCandidates(shards, None).load_hits(image_ids, evidence)


def _load_vectors(shards: ShardGroup, image_ids: np.ndarray) -> np.ndarray:
    return GroupCandidates(shards, None).load_vectors(image_ids)


def _draw(shards: ShardGroup, count: int) -> DrawnImages:
    priorities, ids = shards.draw(count)
    return DrawnImages(priorities, ids, [hit.uri for hit in shards.describe(ids, np.zeros(len(ids)))])


def _verify_best(
    shards: ShardGroup, points: QueryPoints, candidates: Shortlisted, judgement: Judgement
) -> RankedHits:
    ids = candidates.image_ids
    evidence = dict(zip(ids.tolist(), verify_points_of(shards, points, ids), strict=True))
    ranking = Ranking(ids, candidates.similarity, candidates.selective, evidence, {})
    return describe_best(shards, ranking, judgement.calibration, judgement.k)


def _rank(shards: ShardGroup, asked: VerifiedSearch) -> tuple[RankedHits, float] | BadFilter:
    query, count, without = asked.query, asked.count, asked.without
    assert query.points is not None
    started = time.perf_counter()
    found = _find(shards, query.vector, count + (without is not None), asked.wanted)
    if isinstance(found, BadFilter):
        return found
    similarity, ids = found
    find_ms = 1e3 * (time.perf_counter() - started)
    ranking = gather_evidence(shards, query.points, *leave_out(ids, similarity, without, count))
    return describe_best(shards, ranking, asked.judgement.calibration, asked.judgement.k), find_ms


def _find(shards: ShardGroup, vector: np.ndarray, k: int, wanted: Filter | None) -> Found | BadFilter:
    try:
        allowed = None if wanted is None else shards.allow(wanted)
    except InputError as error:
        return BadFilter(str(error))
    similarity, ids = shards.find(vector[None], k, allowed=allowed)
    return similarity[0][ids[0] != NO_ID], ids[0][ids[0] != NO_ID]
