"""Searches: by an image in the body, by an indexed one; and two images beside each other."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import FastAPI, Request

from ckn_scale.serving.answers import SearchAnswer
from ckn_scale.serving.bodies import (
    bad_request,
    check_search,
    parse_batch,
    parse_match,
    parse_search,
    parse_texts,
)
from ckn_scale.serving.descriptions import BATCH_BODY, MATCH_BODY, SEARCH_BODY, SIMILAR_FIELDS, errors
from ckn_scale.serving.forms import (
    BatchResponse,
    ErrorBody,
    ErrorResponse,
    ImageId,
    MatchResponse,
    SearchFields,
    SearchResponse,
    make_match_response,
    make_response,
)
from ckn_scale.serving.limits import ApiError, BodyReader
from ckn_scale.serving.messages import ServedVersion
from ckn_scale.serving.queue import SearchQueue
from ckn_scale.serving.request_record import note_answer, note_searches, request_id
from ckn_scale.serving.router import SearchRouter


def add_search_routes(app: FastAPI, router: SearchRouter, bodies: BodyReader, queue: SearchQueue) -> None:
    routes = _SearchRoutes(router, bodies, queue)
    with_body = (400, 401, 404, 408, 413, 415, 422, 429, 503)
    brief: dict[str, Any] = {"response_model_exclude_unset": True}
    app.post("/v1/search", responses=errors(*with_body), openapi_extra=SEARCH_BODY, **brief)(routes.search)
    app.post(
        "/v1/search:batch",
        responses=errors(400, 401, 404, 408, 413, 415, 429, 503),
        openapi_extra=BATCH_BODY,
        **brief,
    )(routes.search_batch)
    app.get(
        "/v1/similar/{image_id}",
        responses=errors(400, 401, 404, 429, 503),
        openapi_extra=SIMILAR_FIELDS,
        **brief,
    )(routes.similar)
    app.post("/v1/match", responses=errors(*with_body), openapi_extra=MATCH_BODY)(routes.match)


class _SearchRoutes:
    def __init__(self, router: SearchRouter, bodies: BodyReader, queue: SearchQueue) -> None:
        self._router, self._bodies, self._queue = router, bodies, queue

    async def search(self, request: Request) -> SearchResponse:
        """The indexed images that show the same as the image in the body, best first."""
        started = time.perf_counter()
        self._queue.check_free()  # before a body travels in vain
        body = await self._bodies.read(request.receive, request.headers.get("content-length"))
        with self._queue.take() as turn:
            # A body of 16 MiB takes tens of milliseconds to parse: not on the event loop.
            kind, asked = request.headers.get("content-type", ""), request.query_params.multi_items()
            query, image = await asyncio.to_thread(
                parse_search, body, kind, asked, self._router.settings.max_k
            )
            version = self._router.pin(query.version)
            answer = await self._router.search(image, query.to_options(), query.box, version=version)
            turn.is_typical = not answer.partial
        return _respond(answer, started)

    async def search_batch(self, request: Request) -> BatchResponse:
        """Several searches at once, answered from one version; one that fails is an error in its place."""
        started, settings = time.perf_counter(), self._router.settings
        self._queue.check_free()
        body = await self._bodies.read(request.receive, request.headers.get("content-length"))
        kind = request.headers.get("content-type", "")
        batch = await asyncio.to_thread(parse_batch, body, kind, settings.max_k, settings.max_batch)
        version = self._router.pin(batch.version)
        note_searches(len(batch.queries))
        with self._queue.take(len(batch.queries)):
            # As many at once as keep the encoders busy: each has its own time limit.
            turns = asyncio.Semaphore(2 * settings.encoder_replicas * settings.encoder_threads)
            results = await asyncio.gather(
                *(_search_one(self._router, version, one, turns) for one in batch.queries)
            )
        answers = [one for one in results if isinstance(one, SearchResponse)]
        timings_ms = {"total": round(1e3 * (time.perf_counter() - started), 2)}
        note_answer(
            version=version.number,
            timings_ms={},
            partial=any(one.partial for one in answers),
            coverage=min((one.coverage for one in answers), default=1.0),
        )
        return BatchResponse(
            version=version.number, results=results, timings_ms=timings_ms, request_id=request_id()
        )

    async def similar(self, request: Request, image_id: ImageId) -> SearchResponse:
        """The images that show the same as an indexed one, which is not among them."""
        started = time.perf_counter()
        fields = parse_texts(request.query_params.multi_items())
        if "box" in fields:
            raise bad_request("box: an indexed image is searched for as a whole")
        query = check_search(fields, self._router.settings.max_k)
        with self._queue.take() as turn:
            turn.is_typical = False  # nothing is encoded
            version = self._router.pin(query.version)
            answer = await self._router.similar(image_id, query.to_options(), version=version)
        return _respond(answer, started)

    async def match(self, request: Request) -> MatchResponse:
        """Whether two images show the same, and which of their points say so."""
        started = time.perf_counter()
        self._queue.check_free()
        body = await self._bodies.read(request.receive, request.headers.get("content-length"))
        with self._queue.take() as turn:
            turn.is_typical = False
            kind = request.headers.get("content-type", "")
            asked = await asyncio.to_thread(parse_match, body, kind)
            answer = await self._router.match(*asked)
        note_answer(version=answer.version, timings_ms=answer.timings_ms, found=answer.match)
        timings_ms = {**answer.timings_ms, "total": 1e3 * (time.perf_counter() - started)}
        return make_match_response(answer, timings_ms, request_id())


async def _search_one(
    router: SearchRouter,
    version: ServedVersion,
    query: tuple[SearchFields, bytes] | ApiError,
    turns: asyncio.Semaphore,
) -> SearchResponse | ErrorResponse:
    """One query of a batch."""
    try:
        if isinstance(query, ApiError):
            raise query
        fields, image = query
        async with turns:
            started = time.perf_counter()
            answer = await router.search(image, fields.to_options(), fields.box, version=version)
        total_ms = 1e3 * (time.perf_counter() - started)
        return make_response(answer, {**answer.timings_ms, "total": total_ms}, request_id())
    except ApiError as error:
        return ErrorResponse(error=ErrorBody(**error.body))


def _respond(answer: SearchAnswer, started: float) -> SearchResponse:
    """The answer in its form, and on record."""
    timings_ms = {**answer.timings_ms, "total": 1e3 * (time.perf_counter() - started)}
    note_answer(
        version=answer.version,
        timings_ms=answer.timings_ms,
        partial=answer.partial,
        coverage=answer.coverage,
        found=answer.found,
    )
    return make_response(answer, timings_ms, request_id())
