"""Ask a server (`ckn-scale serve`) from Python, without torch or Ray.

    client = ckn_scale.Client("http://host:8000", key="…")
    answer = client.search("photo.jpg", k=5)
    if answer.found:
        ...  # answer[0].uri, .score, .inliers, .box

`AsyncClient` has the same methods, to be awaited. An image is a path or URI, which is read here, the bytes of
a file, a binary file object, a PIL image or a uint8 array. A busy server is asked again when it says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from ckn_scale.client import calls
from ckn_scale.client.calls import Call, SearchOptions
from ckn_scale.client.failures import Attempts, Retries, check_status, explain_transport
from ckn_scale.client.results import (
    Answer,
    Decision,
    ImageInfo,
    IndexInfo,
    Match,
    VersionInfo,
    Versions,
)
from ckn_scale.errors import CknScaleError, InputError, ServerError
from ckn_scale.search.query_images import Box, ImageLike

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = [
    "Answer",
    "AsyncClient",
    "Client",
    "Decision",
    "ImageInfo",
    "IndexInfo",
    "Match",
    "Retries",
    "SearchOptions",
    "VersionInfo",
    "Versions",
]
Result = TypeVar("Result")


class Client:
    """A server, asked from this thread or several; `close` it, or use it in a `with`.

    `timeout_s` is for one answer, `retries` for a server that is busy (429, 503) or cannot be reached. Raises
    ImageRejected for an image that cannot be used, InputError for what the server calls a bad request
    (AccessDenied without the right key, NotFound for an id or version it does not have), ServerBusy and
    ServerUnreachable when asking again did not help, and ServerError for all else.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout_s: float = 30.0,
        retries: Retries = Retries(),  # noqa: B008  it is frozen
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._url, self._retries = url, retries
        self._http = httpx.Client(**_configure(url, key, timeout_s), transport=transport)

    def search(
        self, image: ImageLike, k: int = 10, box: Box | None = None, **options: Unpack[SearchOptions]
    ) -> Answer:
        """The `k` indexed images that show most likely the same, best first."""
        return self._ask(calls.search(image, k, box, options))

    def search_batch(
        self, images: Sequence[ImageLike], k: int = 10, **options: Unpack[SearchOptions]
    ) -> list[Answer | CknScaleError]:
        """The answers for several images, in their order and from one version.

        An image that cannot be used has its error there, which is not raised.
        """
        read = calls.read_images(images)
        answers: list[Answer | CknScaleError | bytes] = list(read)
        for places in calls.cut_batches(read):
            batch = self._ask(calls.search_batch([_bytes_of(read[place]) for place in places], k, options))
            _put(answers, places, batch, options)
        return _without_bytes(answers)

    def similar(self, image_id: int, k: int = 10, **options: Unpack[SearchOptions]) -> Answer:
        """What `search` finds for an indexed image, without itself."""
        return self._ask(calls.similar(image_id, k, options))

    def match(self, image: ImageLike | int, other: ImageLike | int, box: Box | None = None) -> Match:
        """Whether two images show the same thing, and where; an int is the id of an indexed one."""
        return self._ask(calls.match(image, other, box))

    def image(self, image_id: int) -> ImageInfo:
        return self._ask(calls.image_info(image_id))

    def thumbnail(self, image_id: int) -> bytes:
        """A JPEG."""
        return self._ask(calls.image_file(image_id, "thumbnail"))

    def original(self, image_id: int) -> bytes:
        """The indexed image's file, where the server gives it away."""
        return self._ask(calls.image_file(image_id, "original"))

    def preview(self, image: ImageLike) -> bytes:
        """A JPEG of an image that may be of any format the server reads."""
        return self._ask(calls.preview(image))

    def index(self) -> IndexInfo:
        return self._ask(calls.index_info())

    def versions(self) -> Versions:
        return self._ask(calls.list_versions())

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._url}>"

    def _ask(self, call: Call[Result]) -> Result:
        attempts = Attempts(self._retries)
        while True:
            failure: CknScaleError
            try:
                response = self._http.request(call.method, call.path, **call.arguments())
                return _read(call, response)
            except httpx.TransportError as error:
                failure = explain_transport(error, self._url)
            except CknScaleError as error:
                failure = error
            time.sleep(attempts.next_wait(failure))


class AsyncClient:
    """`Client` with methods that are awaited; images are read and encoded off the event loop."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout_s: float = 30.0,
        retries: Retries = Retries(),  # noqa: B008
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url, self._retries = url, retries
        self._http = httpx.AsyncClient(**_configure(url, key, timeout_s), transport=transport)

    async def search(
        self, image: ImageLike, k: int = 10, box: Box | None = None, **options: Unpack[SearchOptions]
    ) -> Answer:
        return await self._ask(await asyncio.to_thread(calls.search, image, k, box, options))

    async def search_batch(
        self, images: Sequence[ImageLike], k: int = 10, **options: Unpack[SearchOptions]
    ) -> list[Answer | CknScaleError]:
        read = await asyncio.to_thread(calls.read_images, images)
        answers: list[Answer | CknScaleError | bytes] = list(read)
        for places in calls.cut_batches(read):
            chosen = [_bytes_of(read[place]) for place in places]
            batch = await self._ask(await asyncio.to_thread(calls.search_batch, chosen, k, options))
            _put(answers, places, batch, options)
        return _without_bytes(answers)

    async def similar(self, image_id: int, k: int = 10, **options: Unpack[SearchOptions]) -> Answer:
        return await self._ask(calls.similar(image_id, k, options))

    async def match(self, image: ImageLike | int, other: ImageLike | int, box: Box | None = None) -> Match:
        return await self._ask(await asyncio.to_thread(calls.match, image, other, box))

    async def image(self, image_id: int) -> ImageInfo:
        return await self._ask(calls.image_info(image_id))

    async def thumbnail(self, image_id: int) -> bytes:
        return await self._ask(calls.image_file(image_id, "thumbnail"))

    async def original(self, image_id: int) -> bytes:
        return await self._ask(calls.image_file(image_id, "original"))

    async def preview(self, image: ImageLike) -> bytes:
        return await self._ask(await asyncio.to_thread(calls.preview, image))

    async def index(self) -> IndexInfo:
        return await self._ask(calls.index_info())

    async def versions(self) -> Versions:
        return await self._ask(calls.list_versions())

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._url}>"

    async def _ask(self, call: Call[Result]) -> Result:
        attempts = Attempts(self._retries)
        while True:
            failure: CknScaleError
            try:
                response = await self._http.request(call.method, call.path, **call.arguments())
                return _read(call, response)
            except httpx.TransportError as error:
                failure = explain_transport(error, self._url)
            except CknScaleError as error:
                failure = error
            await asyncio.sleep(attempts.next_wait(failure))


def _configure(url: str, key: str | None, timeout_s: float) -> dict[str, Any]:
    try:
        base = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        base = httpx.URL("")
    if base.scheme not in ("http", "https") or not base.host:
        raise InputError(f"a server's address is http://host:port, got {url!r}")
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return {"base_url": base, "timeout": timeout_s, "headers": headers}


def _read(call: Call[Result], response: httpx.Response) -> Result:
    try:
        return call.read(check_status(response))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServerError(f"the answer is not one of a ckn_scale server: {error}") from None


def _bytes_of(image: bytes | CknScaleError) -> bytes:
    assert isinstance(image, bytes)
    return image


def _put(
    answers: list[Answer | CknScaleError | bytes],
    places: Sequence[int],
    batch: Sequence[Answer | CknScaleError],
    options: SearchOptions,
) -> None:
    """Answers into their places; those that follow are asked from the same version."""
    for place, answer in zip(places, batch, strict=True):
        answers[place] = answer
        if isinstance(answer, Answer):
            options["version"] = answer.version


def _without_bytes(answers: Sequence[Answer | CknScaleError | bytes]) -> list[Answer | CknScaleError]:
    return [answer for answer in answers if not isinstance(answer, bytes)]
