"""POST /v1/search: an image in the body, hits in the answer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import FastAPI, Request

from ckn_scale.serving.bodies import parse_search
from ckn_scale.serving.descriptions import SEARCH_BODY, errors
from ckn_scale.serving.forms import SearchResponse, make_response
from ckn_scale.serving.limits import BodyReader
from ckn_scale.serving.queue import SearchQueue
from ckn_scale.serving.request_record import note_answer, request_id
from ckn_scale.serving.router import SearchAnswer, SearchRouter


def add_search_routes(app: FastAPI, router: SearchRouter, bodies: BodyReader, queue: SearchQueue) -> None:
    options: dict[str, Any] = {"response_model_exclude_unset": True}

    @app.post(
        "/v1/search",
        responses=errors(400, 401, 404, 408, 413, 415, 422, 429, 503),
        openapi_extra=SEARCH_BODY,
        **options,
    )
    async def search(request: Request) -> SearchResponse:
        """The indexed images that show the same as the image in the body, best first."""
        started = time.perf_counter()
        queue.check_free()  # before a body travels in vain
        body = await bodies.read(request.receive, request.headers.get("content-length"))
        with queue.take() as turn:
            # A body of 16 MiB takes tens of milliseconds to parse: not on the event loop.
            kind, asked = request.headers.get("content-type", ""), request.query_params.multi_items()
            query, image = await asyncio.to_thread(parse_search, body, kind, asked, router.settings.max_k)
            version = router.pin(query.version)
            answer = await router.search(image, query.to_options(), query.box, version=version)
            turn.is_typical = not answer.partial
        return _respond(answer, started)


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
