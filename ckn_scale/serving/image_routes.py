"""Single images: what is known of an indexed one, its thumbnail, and a preview of any file."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from ckn_scale.serving.bodies import is_image_file, media_type_of, unsupported
from ckn_scale.serving.descriptions import JPEG, PREVIEW_BODY, errors
from ckn_scale.serving.forms import ImageId, ImageResponse, make_columns
from ckn_scale.serving.limits import ApiError, BodyReader
from ckn_scale.serving.messages import Preview
from ckn_scale.serving.queue import SearchQueue
from ckn_scale.serving.router import SearchRouter, no_image

KEPT = {"cache-control": "private, max-age=3600"}


def add_image_routes(app: FastAPI, router: SearchRouter, bodies: BodyReader, queue: SearchQueue) -> None:
    @app.get("/v1/images/{image_id}", responses=errors(400, 401, 404, 503))
    async def image(image_id: ImageId) -> ImageResponse:
        """What the index knows of an image."""
        found = await router.look_up(image_id)
        if found is None:
            raise no_image(image_id)
        width, height = found.size_px or (None, None)
        return ImageResponse(
            image_id=image_id,
            uri=found.uri,
            columns=make_columns(found.columns),
            state="ok",  # others are in no index
            width=width,
            height=height,
            version=router.version.number,
            original=False,
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

    @app.post(
        "/v1/preview",
        responses={**JPEG, **errors(400, 401, 408, 413, 415, 422, 429, 503)},
        openapi_extra=PREVIEW_BODY,
        response_class=Response,
    )
    async def preview(request: Request) -> Response:
        """A JPEG of the image file in the body, upright, at most 1024 pixels on its longer side.

        x-image-width and x-image-height are those of the upright original.
        """
        media_type = media_type_of(request.headers.get("content-type", ""))
        if not is_image_file(media_type):
            raise unsupported(media_type, "image/* or application/octet-stream")
        queue.check_free()
        data = await bodies.read(request.receive, request.headers.get("content-length"))
        with queue.take() as turn:
            turn.is_typical = False  # searches take longer
            return _send_preview(await router.preview(data))


def _send_preview(made: Preview) -> Response:
    width, height = made.size_px
    headers = {"cache-control": "no-store", "x-image-width": str(width), "x-image-height": str(height)}
    return Response(made.jpeg, media_type="image/jpeg", headers=headers)
