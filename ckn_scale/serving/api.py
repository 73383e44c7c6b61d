"""The web application over a router: limits outside, routes inside, one form of errors. Without Ray."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ckn_scale import __version__
from ckn_scale.serving.bodies import bad_request, describe_invalid
from ckn_scale.serving.gate import RequestGate
from ckn_scale.serving.image_routes import add_image_routes
from ckn_scale.serving.index_routes import add_index_routes, add_pages
from ckn_scale.serving.limits import ApiError, BodyReader, error_response
from ckn_scale.serving.metrics import Exporter
from ckn_scale.serving.observers import watch_requests
from ckn_scale.serving.queue import SearchQueue
from ckn_scale.serving.router import SearchRouter
from ckn_scale.serving.search_routes import add_search_routes

logger = logging.getLogger(__name__)


def make_api(router: SearchRouter, exporters: Sequence[Exporter] = ()) -> RequestGate:
    """The web application over a router: limits outside, routes inside; `exporters` get its metrics, too."""
    # FastAPI's own documentation pages load scripts from elsewhere; /openapi.json has it all.
    app = FastAPI(title="ckn_scale", version=__version__, docs_url=None, redoc_url=None)
    bodies, queue = BodyReader(router.settings), SearchQueue(router.settings)
    _add_error_handlers(app)
    add_search_routes(app, router, bodies, queue)
    add_image_routes(app, router, bodies, queue)
    add_index_routes(app, router)
    add_pages(app)
    gate = RequestGate(app, router.settings)
    watch_requests(app, gate, router, queue, exporters)
    return gate


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refuse(_: Request, error: ApiError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def refuse_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(bad_request(describe_invalid(error.errors()[0])))

    @app.exception_handler(HTTPException)
    async def refuse_http(request: Request, error: HTTPException) -> JSONResponse:
        codes = {404: "not_found", 405: "method_not_allowed"}
        message = f"{error.detail}: {request.method} {request.url.path}"
        refused = ApiError(error.status_code, codes.get(error.status_code, "http"), message)
        return error_response(refused.with_headers(error.headers or {}))

    @app.exception_handler(Exception)
    async def fail(_: Request, error: Exception) -> JSONResponse:
        reference = secrets.token_hex(4)
        logger.error("request failed, reference %s", reference, exc_info=error)
        message = f"internal error; the server's log has it under {reference}"
        return error_response(ApiError(500, "internal", message, reference=reference))
