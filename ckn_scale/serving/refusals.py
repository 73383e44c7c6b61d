"""Why the router does not answer."""

from __future__ import annotations

from typing import TypeVar

from ckn_scale.serving.answers import SearchOptions
from ckn_scale.serving.limits import ApiError
from ckn_scale.serving.messages import Rejected, ServedVersion

Answer = TypeVar("Answer")


def check_can_verify(version: ServedVersion, options: SearchOptions) -> None:
    if options.expand and options.verify is False:
        message = "expansion begins with verified hits: expand and verify=false exclude each other"
        raise ApiError(400, "bad_request", message)
    if (options.verify or options.expand) and version.calibration is None:
        message = "this index has no points to verify by: leave verify and expand out, or false"
        raise ApiError(400, "bad_request", message)


def require_usable(answer: Answer | Rejected) -> Answer:
    if isinstance(answer, Rejected):
        message = f"the image cannot be used ({answer.state}): {answer.reason}"
        raise ApiError(422, "image_rejected", message, state=answer.state, reason=answer.reason)
    return answer


def no_image(image_id: int) -> ApiError:
    return ApiError(404, "not_found", f"the index has no image {image_id}")


def unavailable(message: str) -> ApiError:
    return ApiError(503, "unavailable", message).with_headers({"retry-after": "2"})
