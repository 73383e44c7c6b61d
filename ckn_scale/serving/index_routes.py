"""The index as a whole, its versions, the state of the server, and its pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Query
from fastapi.responses import FileResponse, JSONResponse
from starlette.staticfiles import StaticFiles

from ckn_scale.serving.descriptions import errors
from ckn_scale.serving.forms import (
    ExampleForm,
    ExamplesResponse,
    HealthResponse,
    IndexResponse,
    LimitsForm,
    ReadyResponse,
    VersionForm,
    VersionsResponse,
)
from ckn_scale.serving.router import MAX_EXAMPLES, SearchRouter

PAGE_FOLDER = Path(__file__).parent / "page"
DOCS_FOLDER = Path(__file__).parent / "docs"


def add_index_routes(app: FastAPI, router: SearchRouter) -> None:
    @app.get("/v1/index", responses=errors(401))
    async def index() -> IndexResponse:
        """The version that answers, what its certificate says, and what the server takes."""
        version, settings = router.version, router.settings
        summary = version.summary
        limits = LimitsForm(
            max_k=settings.max_k,
            max_batch=settings.max_batch,
            body_limit_bytes=settings.body_limit_bytes,
            pixels=summary.pixel_cap,
        )
        return IndexResponse(
            version=version.number,
            images=version.rows,
            dim=summary.dim,
            kind=summary.kind,
            shards=summary.shards,
            groups=len(version.group_rows),
            certificate=None if summary.certificate is None else dict(summary.certificate),
            can_verify=version.calibration is not None,
            uri_prefixes=list(settings.uri_prefixes),
            limits=limits,
        )

    @app.get("/v1/versions", responses=errors(401))
    async def versions() -> VersionsResponse:
        """The published versions, and which of them a search may ask for."""
        published = [
            VersionForm(version=one.version, rows=one.rows, build=one.build)
            for one in router.version.summary.published
        ]
        return VersionsResponse(current=router.version.number, resident=router.resident, versions=published)

    @app.get("/v1/examples", responses=errors(400, 401, 503))
    async def examples(count: Annotated[int, Query(ge=1, le=MAX_EXAMPLES)] = 12) -> ExamplesResponse:
        """Some images of the collection, always the same ones of a version."""
        version, drawn = await router.draw_examples(count)
        images = [ExampleForm(image_id=image_id, uri=uri) for image_id, uri in drawn]
        return ExamplesResponse(version=version, images=images)

    @app.get("/healthz")
    async def healthz() -> HealthResponse:
        """Whether the process answers."""
        return HealthResponse(status="ok")

    @app.get("/readyz", response_model=ReadyResponse, responses={503: {"model": ReadyResponse}})
    async def readyz() -> JSONResponse:
        """Whether every part of the server holds the version that answers."""
        missing = await router.check_ready()
        version = router.version
        body = {"ready": not missing, "version": version.number, "images": version.rows, "not_ready": missing}
        return JSONResponse(body, status_code=503 if missing else 200)


def add_pages(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE_FOLDER / "index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> FileResponse:
        return FileResponse(DOCS_FOLDER / "index.html")

    app.mount("/docs", StaticFiles(directory=DOCS_FOLDER), name="docs")
    app.mount("/page", StaticFiles(directory=PAGE_FOLDER), name="page")
