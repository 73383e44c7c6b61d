"""The HTTP API: request and answer forms, routes, errors. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import to_jsonable_python
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from ckn_scale.errors import InputError
from ckn_scale.search.filters import Filter
from ckn_scale.search.shard import Hit
from ckn_scale.serving.gate import RequestGate
from ckn_scale.serving.limits import ApiError, BodyReader, error_response
from ckn_scale.serving.metrics import Exporter
from ckn_scale.serving.observers import watch_requests
from ckn_scale.serving.queue import SearchQueue
from ckn_scale.serving.request_record import note_answer
from ckn_scale.serving.router import Box, SearchAnswer, SearchRouter

logger = logging.getLogger(__name__)
PAGE_FOLDER = Path(__file__).parent / "page"


class SearchRequest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str = Field(description="a JPEG, PNG, … file, base64")
    k: int = Field(default=10, ge=1, description="how many hits")
    box: tuple[float, float, float, float] | None = Field(
        default=None, description="x1, y1, x2, y2 in pixels of the upright image: search for this part"
    )
    verify: bool | None = Field(
        default=None, description="verify hits by their points; by default where the index has points"
    )
    filter: str | list[str] | None = Field(
        default=None, description="only images that fulfil it: year>=2020; a list: all of its conditions"
    )
    strict: bool = Field(default=False, description="an error instead of a partial answer")

    @field_validator("box")
    @classmethod
    def _box_has_area(cls, box: Box | None) -> Box | None:
        if box is not None and not (box[0] < box[2] and box[1] < box[3]):
            raise ValueError(f"a box needs x1 < x2 and y1 < y2, got {list(box)}")
        return box

    @field_validator("filter")
    @classmethod
    def _filter_is_one(cls, texts: str | list[str] | None) -> str | list[str] | None:
        try:
            _parse_filter(texts)
        except InputError as error:
            raise ValueError(str(error)) from None
        return texts


def _parse_filter(texts: str | list[str] | None) -> Filter | None:
    if texts is None:
        return None
    return Filter.parse(*([texts] if isinstance(texts, str) else texts), files=False)


class HitForm(BaseModel):
    image_id: int
    uri: str
    score: float
    columns: dict[str, Any]
    # When it was verified:
    match: bool | None = Field(default=None, description="whether it shows the same thing")
    inliers: int | None = Field(default=None, description="places that agree under one transform")
    box: tuple[float, float, float, float] | None = Field(default=None, description="around what matches")
    transform: list[list[float]] | None = Field(default=None, description="3 × 3, query's pixels → its own")
    similarity: float | None = Field(default=None, description="of the vectors")
    selective: float | None = Field(default=None, description="of the words both images have")


class SearchResponse(BaseModel):
    version: int
    hits: list[HitForm]
    found: bool | None = Field(default=None, description="whether a hit is a match, when they were verified")
    coverage: float = Field(description="share of the index that was searched")
    partial: bool
    timings_ms: dict[str, float]


class ErrorBody(BaseModel):
    model_config = ConfigDict(extra="allow")

    code: str
    message: str


class ErrorResponse(BaseModel):
    error: ErrorBody


def make_api(router: SearchRouter, exporters: Sequence[Exporter] = ()) -> RequestGate:
    """The web application over a router: limits outside, routes inside; `exporters` get its metrics, too."""
    # FastAPI's own documentation pages load scripts from elsewhere; /openapi.json has it all.
    app = FastAPI(title="ckn_scale", docs_url=None, redoc_url=None)
    _add_error_handlers(app)
    _add_routes(app, router)
    gate = RequestGate(app, router.settings)
    watch_requests(app, gate, router, exporters)
    return gate


def _add_routes(app: FastAPI, router: SearchRouter) -> None:
    bodies, queue = BodyReader(router.settings), SearchQueue(router.settings)

    @app.post(
        "/v1/search",
        responses=_errors(400, 401, 408, 413, 415, 422, 429, 503),
        openapi_extra=_BODY,
        response_model_exclude_unset=True,
    )
    async def search(request: Request) -> SearchResponse:
        started = time.perf_counter()
        _check_is_json(request)
        queue.check_free()  # before a body travels in vain
        body = await bodies.read(request.receive, request.headers.get("content-length"))
        with queue.take() as turn:
            # A body of 16 MiB takes tens of milliseconds to parse: not on the event loop.
            query, image = await asyncio.to_thread(parse_search, body, router.settings.max_k)
            answer = await router.search(
                image,
                query.k,
                query.box,
                strict=query.strict,
                verify=query.verify,
                wanted=_parse_filter(query.filter),
            )
            turn.is_typical = not answer.partial
        return _make_response(answer, total_ms=1e3 * (time.perf_counter() - started))

    @app.get("/v1/images/{image_id}/thumbnail", responses=_errors("4XX", 503), response_class=Response)
    async def thumbnail(image_id: Annotated[int, Field(ge=0)]) -> Response:
        jpeg = await router.thumbnail(image_id)
        if jpeg is None:
            raise ApiError(404, "not_found", f"there is no thumbnail of image {image_id}")
        return Response(jpeg, media_type="image/jpeg", headers={"cache-control": "private, max-age=3600"})

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", responses=_errors(503))
    async def readyz() -> JSONResponse:
        missing = await router.check_ready()
        version = router.version
        body = {"ready": not missing, "version": version.number, "images": version.rows, "not_ready": missing}
        return JSONResponse(body, status_code=503 if missing else 200)

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE_FOLDER / "index.html")

    app.mount("/page", StaticFiles(directory=PAGE_FOLDER), name="page")


def parse_search(body: bytes, max_k: int) -> tuple[SearchRequest, bytes]:
    """The request and its image's bytes; ApiError 400 saying what is wrong with it."""
    try:
        query = SearchRequest.model_validate_json(body)
    except ValidationError as error:
        raise ApiError(400, "bad_request", _describe_invalid(error.errors(include_input=False)[0])) from None
    if query.k > max_k:
        raise ApiError(400, "bad_request", f"k must be ≤ {max_k}, got {query.k}")
    try:
        return query, base64.b64decode(query.image, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(400, "bad_request", "image must be base64 of an image file") from None


def _check_is_json(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        message = f"the body must be JSON with content-type application/json, got {media_type or 'none'!r}"
        raise ApiError(415, "unsupported_media_type", message)


def _describe_invalid(complaint: Mapping[str, Any]) -> str:
    """The field's name and what is wrong, without the value: an image is long."""
    where = ".".join(str(part) for part in complaint["loc"])
    return f"{where}: {complaint['msg']}" if where else complaint["msg"]


def _make_response(answer: SearchAnswer, total_ms: float) -> SearchResponse:
    timings_ms = {**answer.timings_ms, "total": total_ms}
    note_answer(
        version=answer.version,
        timings_ms=answer.timings_ms,
        partial=answer.partial,
        coverage=answer.coverage,
        found=answer.found,
    )
    verdict = {} if answer.found is None else {"found": answer.found}
    return SearchResponse(
        version=answer.version,
        hits=[_make_hit(hit) for hit in answer.hits],
        coverage=answer.coverage,
        partial=answer.partial,
        **verdict,
        timings_ms={name: round(value, 2) for name, value in timings_ms.items()},
    )


def _make_hit(hit: Hit) -> HitForm:
    # What users keep beside an image may be dates or bytes.
    columns = to_jsonable_python(hit.columns, bytes_mode="base64")
    return HitForm(**{**hit.to_form(), "columns": columns})


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refuse(_: Request, error: ApiError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def refuse_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(ApiError(400, "bad_request", _describe_invalid(error.errors()[0])))

    @app.exception_handler(HTTPException)
    async def refuse_http(request: Request, error: HTTPException) -> JSONResponse:
        codes = {404: "not_found", 405: "method_not_allowed"}
        message = f"{error.detail}: {request.method} {request.url.path}"
        refusal = ApiError(error.status_code, codes.get(error.status_code, "http"), message)
        return error_response(refusal.with_headers(error.headers or {}))

    @app.exception_handler(Exception)
    async def fail(_: Request, error: Exception) -> JSONResponse:
        reference = secrets.token_hex(4)
        logger.error("request failed, reference %s", reference, exc_info=error)
        message = f"internal error; the server's log has it under {reference}"
        return error_response(ApiError(500, "internal", message, reference=reference))


def _errors(*statuses: int | str) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorResponse} for status in statuses}


_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": SearchRequest.model_json_schema()}},
    }
}
