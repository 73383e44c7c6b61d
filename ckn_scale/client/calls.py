"""The requests of the API, each with what becomes of its answer. Nothing here talks to a network."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypedDict, TypeVar

import httpx

from ckn_scale.client.failures import explain_error
from ckn_scale.client.results import (
    Answer,
    ImageInfo,
    IndexInfo,
    Match,
    Versions,
    make_answer,
    make_form,
    make_match,
    make_versions,
)
from ckn_scale.errors import CknScaleError
from ckn_scale.search.query_images import Box, ImageLike, check_box, image_bytes

Result = TypeVar("Result")
FILE = "application/octet-stream"
BATCH_IMAGES = 8
BATCH_BYTES = 8 * 2**20
STATUS_OF = {"bad_request": 400, "not_found": 404, "too_busy": 429, "unavailable": 503}  # within a batch


class SearchOptions(TypedDict, total=False):
    """What a search may ask for besides image, k and box; `POST /v1/search` says what each means."""

    verify: bool | None
    expand: bool | Literal["discriminative"]
    filter: str | Sequence[str] | None
    version: int | None
    offset: int
    min_score: float | None
    group_copies: bool
    strict: bool


@dataclass(frozen=True)
class Call(Generic[Result]):
    method: str
    path: str
    read: Callable[[httpx.Response], Result]
    body: Mapping[str, Any] | None = None  # as JSON
    params: Mapping[str, Any] = field(default_factory=dict)
    image: bytes | None = None  # the body; with `parts` one part of a form
    parts: Mapping[str, str] | None = None

    def arguments(self) -> dict[str, Any]:
        """As httpx takes them."""
        if self.parts is not None:
            return {"files": {"image": ("image", self.image, FILE)}, "data": self.parts}
        if self.image is not None:
            return {"content": self.image, "headers": {"content-type": FILE}}
        return {"params": self.params} if self.body is None else {"json": self.body}


def search(image: ImageLike, k: int, box: Box | None, options: Mapping[str, Any]) -> Call[Answer]:
    fields = list_fields(k, box, options)
    parts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    data = image_bytes(image, compress=True)
    return Call("POST", "v1/search", lambda response: make_answer(response.json()), image=data, parts=parts)


def search_batch(
    images: Sequence[bytes], k: int, options: Mapping[str, Any]
) -> Call[list[Answer | CknScaleError]]:
    fields = list_fields(k, None, options)
    version = fields.pop("version", None)
    queries = [{"image": base64.b64encode(image).decode(), **fields} for image in images]
    body = {"queries": queries, **({} if version is None else {"version": version})}
    return Call("POST", "v1/search:batch", _read_batch, body=body)


def similar(image_id: int, k: int, options: Mapping[str, Any]) -> Call[Answer]:
    params = {name: _as_text(value) for name, value in list_fields(k, None, options).items()}
    return Call(
        "GET", f"v1/similar/{image_id:d}", lambda response: make_answer(response.json()), params=params
    )


def match(image: ImageLike | int, other: ImageLike | int, box: Box | None) -> Call[Match]:
    if isinstance(image, int):
        if not isinstance(other, int):
            raise ValueError("of an indexed image and another one the other one comes first")
        first: dict[str, Any] = {"image_id": image}
        second: dict[str, Any] = {"other_id": other}
    else:
        first = {"image": _encode(image)}
        second = {"image_id": other} if isinstance(other, int) else {"other": _encode(other)}
    body = {**first, **second, **({} if box is None else {"box": list(box)})}
    return Call("POST", "v1/match", lambda response: make_match(response.json()), body=body)


def image_info(image_id: int) -> Call[ImageInfo]:
    return Call("GET", f"v1/images/{image_id:d}", lambda response: make_form(ImageInfo, response.json()))


def image_file(image_id: int, kind: Literal["thumbnail", "original"]) -> Call[bytes]:
    return Call("GET", f"v1/images/{image_id:d}/{kind}", lambda response: response.content)


def preview(image: ImageLike) -> Call[bytes]:
    data = image_bytes(image, compress=True)
    return Call("POST", "v1/preview", lambda response: response.content, image=data)


def index_info() -> Call[IndexInfo]:
    return Call("GET", "v1/index", lambda response: make_form(IndexInfo, response.json()))


def list_versions() -> Call[Versions]:
    return Call("GET", "v1/versions", lambda response: make_versions(response.json()))


def list_fields(k: int, box: Box | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a search that are not as the server has them by default."""
    unknown = options.keys() - SearchOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"a search has no option {', '.join(sorted(unknown))}")
    if k < 1:
        raise ValueError(f"k must be ≥ 1, got {k}")
    if box is not None:
        check_box(box)
    given = {name: value for name, value in options.items() if value not in (None, False, 0)}
    if options.get("verify") is False:
        given["verify"] = False
    if isinstance(given.get("filter"), Sequence) and not isinstance(given["filter"], str):
        given["filter"] = list(given["filter"])
    return {"k": k, **({} if box is None else {"box": [float(side) for side in box]}), **given}


def read_images(images: Sequence[ImageLike]) -> list[bytes | CknScaleError]:
    """The files' bytes, or why there are none."""
    read: list[bytes | CknScaleError] = []
    for image in images:
        try:
            read.append(image_bytes(image, compress=True))
        except CknScaleError as error:
            read.append(error)
    return read


def cut_batches(read: Sequence[bytes | CknScaleError]) -> Iterator[list[int]]:
    """Places of the images that were read, in groups that fit into one request."""
    batch: list[int] = []
    size = 0
    for place, image in enumerate(read):
        if isinstance(image, CknScaleError):
            continue
        if batch and (len(batch) == BATCH_IMAGES or size + len(image) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(place)
        size += len(image)
    if batch:
        yield batch


def _encode(image: ImageLike) -> str:
    return base64.b64encode(image_bytes(image, compress=True)).decode()


def _read_batch(response: httpx.Response) -> list[Answer | CknScaleError]:
    body = response.json()
    return [
        explain_error(STATUS_OF.get(result["error"].get("code"), 500), result["error"])
        if "error" in result
        else make_answer({"version": body["version"], **result})
        for result in body["results"]
    ]


def _as_text(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value
