"""What the server takes from strangers: bodies within size, time and pace; of a key so much in a time."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from ckn_scale.serving.keys import ApiKey
from ckn_scale.serving.request_record import note_error
from ckn_scale.serving.settings import ServeSettings

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
MIN_BODY_BYTES_PER_S = 32 * 1024  # a phone at the edge of its network is faster
CLOSE = {"connection": "close"}  # what is left of the body is not waited for
# Of a body that is too large: who still sends when the connection closes does not hear why.
DISCARDED_S, DISCARDED_BYTES = 2.0, 64 * 2**20


class ApiError(Exception):
    """An answer that is an error: HTTP status, a stable code, a sentence a person can act on."""

    def __init__(self, status: int, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {"code": code, "message": message, **details}
        self.headers: dict[str, str] = {}

    def with_headers(self, headers: Mapping[str, str]) -> ApiError:
        self.headers.update(headers)
        return self


def error_response(error: ApiError) -> JSONResponse:
    note_error(error.body["code"])
    return JSONResponse({"error": error.body}, status_code=error.status, headers=error.headers)


class BodyReader:
    """Reads bodies, at most `max_bodies` at once, none too large, too long or too slow.

    When one more arrives than there may be, the one that is furthest behind gives way: clients that
    hold connections open without sending keep nobody out.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._arriving: set[_Arrival] = set()

    async def read(self, receive: Receive, declared: str | None) -> bytes:
        """The whole body; `declared` is its Content-Length, where the client sent one."""
        if len(self._arriving) >= self._settings.max_bodies:
            self._end_slowest()
        arrival = _Arrival(None, time.monotonic())
        arrival.task = asyncio.ensure_future(self._read_chunks(receive, arrival, declared))
        self._arriving.add(arrival)
        try:
            return await arrival.task
        except asyncio.CancelledError:
            if not arrival.ended:
                raise
            message = "other requests were waiting, and this one's body came the slowest: try again"
            raise too_busy(message).with_headers(CLOSE) from None
        finally:
            arrival.task.cancel()
            self._arriving.discard(arrival)

    def _end_slowest(self) -> None:
        slowest = min(self._arriving, key=lambda arrival: arrival.pace)
        self._arriving.discard(slowest)
        slowest.ended = True
        if slowest.task is not None:
            slowest.task.cancel()

    async def _read_chunks(self, receive: Receive, arrival: _Arrival, declared: str | None) -> bytes:
        limit_bytes = self._settings.body_limit_bytes
        if declared and declared.isdigit() and int(declared) > limit_bytes:
            await _discard(receive)
            raise too_large(limit_bytes)
        body = bytearray()
        more = True
        while more:
            message = await self._receive_in_time(receive, arrival)
            if message["type"] == "http.disconnect":
                raise ApiError(400, "disconnected", "the client closed the connection before the body's end")
            body += message.get("body", b"")
            arrival.received = len(body)
            more = message.get("more_body", False)
            if len(body) > limit_bytes:
                body.clear()
                if more:
                    await _discard(receive)
                raise too_large(limit_bytes)
        return bytes(body)

    async def _receive_in_time(self, receive: Receive, arrival: _Arrival) -> MutableMapping[str, Any]:
        total_s, grace_s = self._settings.body_timeout_s, self._settings.body_grace_s
        due = min(arrival.started + total_s, arrival.pace + grace_s)
        try:
            return await asyncio.wait_for(receive(), due - time.monotonic())
        except asyncio.TimeoutError:
            message = (
                f"the request's body did not arrive within {total_s:g} s, or at less than "
                f"{MIN_BODY_BYTES_PER_S // 1024} KiB/s after its first {grace_s:g} s"
            )
            raise ApiError(408, "body_timeout", message).with_headers(CLOSE) from None


async def _discard(receive: Receive) -> None:
    """The rest of a body, or as much of it as comes in a moment."""

    async def read_on() -> None:
        discarded, more = 0, True
        while more and discarded < DISCARDED_BYTES:
            message = await receive()
            discarded += len(message.get("body", b""))
            more = message.get("more_body", False)

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read_on(), DISCARDED_S)


@dataclass(eq=False)
class _Arrival:
    """A body on its way."""

    task: asyncio.Task[bytes] | None
    started: float
    received: int = 0
    ended: bool = False

    @property
    def pace(self) -> float:
        """Until when its bytes would last at the least rate; the lowest is the furthest behind."""
        return self.started + self.received / MIN_BODY_BYTES_PER_S


def too_large(limit_bytes: int) -> ApiError:
    message = f"the request's body is larger than {limit_bytes / 2**20:g} MiB: send a smaller image"
    return ApiError(413, "body_too_large", message).with_headers(CLOSE)


def too_busy(message: str) -> ApiError:
    return ApiError(429, "too_busy", message).with_headers({"retry-after": "1"})


class RateLimiter:
    """A bucket of tokens for each key with a rate; each of `replicas`, which do not talk, has its share."""

    def __init__(self, keys: Iterable[ApiKey], replicas: int = 1) -> None:
        self._buckets = {key.sha256: _Bucket(key, replicas) for key in keys if key.count is not None}

    def charge(self, key: ApiKey) -> None:
        """Take the token of one request; ApiError 429 when there is none, saying when there will be."""
        bucket = self._buckets.get(key.sha256)
        if bucket is None:
            return
        bucket.fill()
        if bucket.tokens < 1:
            wait_s = (1 - bucket.tokens) / bucket.per_s
            message = f"this key may ask {key.count} times in {key.period_s:g} s: try again in {wait_s:.1f} s"
            headers = {"retry-after": str(math.ceil(wait_s))}
            raise ApiError(429, "rate_limited", message).with_headers(headers)
        bucket.tokens -= 1

    def charge_more(self, key: ApiKey, count: int) -> None:
        """What a request turned out to cost besides: it is answered, and the next ones wait for it."""
        if bucket := self._buckets.get(key.sha256):
            bucket.tokens -= count


class _Bucket:
    def __init__(self, key: ApiKey, replicas: int) -> None:
        count = (key.count or 1) / replicas
        self.capacity, self.per_s = max(1.0, count), count / key.period_s
        self.tokens, self._filled = self.capacity, time.monotonic()

    def fill(self) -> None:
        now = time.monotonic()
        self.tokens = min(self.capacity, self.tokens + (now - self._filled) * self.per_s)
        self._filled = now
