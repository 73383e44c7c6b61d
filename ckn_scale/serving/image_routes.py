"""Single images: what is known of an indexed one, its thumbnail and original, and a preview of any file."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request, Response

from ckn_scale.serving.bodies import check_form, is_image_file, media_type_of, parse_object, unsupported
from ckn_scale.serving.descriptions import FILE, JPEG, PREVIEW_BODY, errors
from ckn_scale.serving.forms import ImageId, ImageResponse, UriRequest, make_columns
from ckn_scale.serving.limits import ApiError, BodyReader
from ckn_scale.serving.messages import Preview
from ckn_scale.serving.originals import Originals
from ckn_scale.serving.queue import SearchQueue
from ckn_scale.serving.router import SearchRouter

KEPT = {"cache-control": "private, max-age=3600"}


def add_image_routes(app: FastAPI, router: SearchRouter, bodies: BodyReader, queue: SearchQueue) -> None:
    originals = Originals(router.settings.uri_prefixes)

    @app.get("/v1/images/{image_id}", responses=errors(400, 401, 404, 503))
    async def image(image_id: ImageId) -> ImageResponse:
        """What the index knows of an image."""
        found = await router.look_up(image_id)
        width, height = found.size_px or (None, None)
        return ImageResponse(
            image_id=image_id,
            uri=found.uri,
            columns=make_columns(found.columns),
            state="ok",
            width=width,
            height=height,
            version=router.version.number,
            original=await asyncio.to_thread(originals.allows, found.uri),
        )

    @app.get(
        "/v1/images/{image_id}/thumbnail",
        responses={**JPEG, **errors(400, 401, 404, 503)},
        response_class=Response,
    )
    async def thumbnail(image_id: ImageId) -> Response:
        """A small JPEG of an indexed image, upright."""
        jpeg = await router.thumbnail(image_id)
        if jpeg is None:
            raise ApiError(404, "not_found", f"there is no thumbnail of image {image_id}")
        return Response(jpeg, media_type="image/jpeg", headers=KEPT)

    @app.get(
        "/v1/images/{image_id}/original",
        responses={200: {"content": {"image/*": FILE}}, **errors(400, 401, 403, 404, 503)},
        response_class=Response,
    )
    async def original(image_id: ImageId) -> Response:
        """The file of an indexed image, where the server gives out what lies below its URI's prefix."""
        found = await router.look_up(image_id)
        file = await originals.read(found.uri)
        return Response(file.data, media_type=file.media_type, headers=KEPT)

    @app.post(
        "/v1/preview",
        responses={**JPEG, **errors(400, 401, 403, 404, 408, 413, 415, 422, 429, 503)},
        openapi_extra=PREVIEW_BODY,
        response_class=Response,
    )
    async def preview(request: Request) -> Response:
        """A JPEG of an image file, upright, at most 1024 pixels on its longer side.

        The body is the file, or JSON with a URI that the server may fetch. The headers x-image-width and
        x-image-height are those of the upright original.
        """
        media_type = media_type_of(request.headers.get("content-type", ""))
        if not (is_image_file(media_type) or media_type == "application/json"):
            raise unsupported(media_type, "image/*, application/octet-stream or application/json")
        queue.check_free()
        data = await bodies.read(request.receive, request.headers.get("content-length"))
        with queue.take() as turn:
            turn.is_typical = False  # searches take longer
            if media_type == "application/json":
                data = (await originals.read(check_form(UriRequest, parse_object(data)).uri)).data
            return _send_preview(await router.preview(data))


def _send_preview(made: Preview) -> Response:
    width, height = made.size_px
    headers = {"cache-control": "no-store", "x-image-width": str(width), "x-image-height": str(height)}
    return Response(made.jpeg, media_type="image/jpeg", headers=headers)
