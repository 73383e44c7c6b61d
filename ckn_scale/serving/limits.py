"""What a request must pass before it is worked on: host, key, free place, size. Plain ASGI layers.

Each layer refuses with JSON `{"error": {"code", "message"}}` and never reads a body it will not use.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from starlette.responses import JSONResponse

from ckn_scale.serving.settings import ServeSettings, hash_key

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PROTECTED_PREFIX = "/v1/"
SEARCH_PATH = "/v1/search"
PAGE_POLICY = "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'; base-uri 'none'"
SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", PAGE_POLICY.encode()),
]


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
    return JSONResponse({"error": error.body}, status_code=error.status, headers=error.headers)


class RequestGate:
    """The layer around the API: checks host, key and free places before anything is read."""

    def __init__(self, app: App, settings: ServeSettings) -> None:
        self._app = app
        self._settings = settings
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        secured = _add_headers(send)
        try:
            headers = {name.lower(): value for name, value in scope["headers"]}
            check_host(headers, self._settings.allowed_hosts)
            if scope["path"].startswith(PROTECTED_PREFIX):
                check_key(headers, self._settings)
        except ApiError as error:
            await error_response(error)(scope, receive, secured)
            return
        await self._admit(scope, receive, secured)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        counted = scope["path"] == SEARCH_PATH
        if counted and self._in_flight >= self._settings.max_in_flight:
            message = f"{self._in_flight} searches are under way, which is the limit: try again in a second"
            await error_response(too_busy(message))(scope, receive, send)
            return
        self._in_flight += counted
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_flight -= counted


async def read_body(receive: Receive, declared: str | None, *, limit_bytes: int, timeout_s: float) -> bytes:
    """A request's body, refused as soon as it grows past the limit or takes longer than the timeout.

    `declared` is its Content-Length, where the client sent one.
    """
    if declared and declared.isdigit() and int(declared) > limit_bytes:
        raise too_large(limit_bytes)
    try:
        return await asyncio.wait_for(_read_chunks(receive, limit_bytes), timeout_s)
    except asyncio.TimeoutError:
        message = f"the request's body did not arrive within {timeout_s:g} s"
        raise ApiError(408, "body_timeout", message) from None


async def _read_chunks(receive: Receive, limit_bytes: int) -> bytes:
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "disconnected", "the client closed the connection before the body's end")
        body += message.get("body", b"")
        if len(body) > limit_bytes:
            raise too_large(limit_bytes)
        more = message.get("more_body", False)
    return bytes(body)


def too_large(limit_bytes: int) -> ApiError:
    message = f"the request's body is larger than {limit_bytes / 2**20:g} MiB: send a smaller image"
    return ApiError(413, "body_too_large", message).with_headers({"connection": "close"})


def too_busy(message: str) -> ApiError:
    return ApiError(429, "too_busy", message).with_headers({"retry-after": "1"})


def check_host(headers: Mapping[bytes, bytes], allowed: tuple[str, ...]) -> None:
    """A loopback server answers loopback names only: no web page can reach it by a name of its own."""
    host = headers.get(b"host", b"").decode("latin-1").lower()
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if allowed and name not in allowed:
        raise ApiError(421, "wrong_host", f"this server does not answer for the host {name!r}")


def check_key(headers: Mapping[bytes, bytes], settings: ServeSettings) -> None:
    if not settings.require_keys:
        return
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    found = hash_key(key.strip())
    # Every known key is compared, so that the time taken tells nothing.
    matches = [hmac.compare_digest(found, known) for known in settings.key_hashes]
    if scheme.lower() != "bearer" or not any(matches):
        message = "this server needs a key: send the header `Authorization: Bearer <key>`"
        raise ApiError(401, "unauthorized", message).with_headers({"www-authenticate": "Bearer"})


def _add_headers(send: Send) -> Send:
    async def send_secured(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *SECURITY_HEADERS]}
        await send(message)

    return send_secured
