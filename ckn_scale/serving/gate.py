"""The layer around the API: who asks, from where, for what; and a record of every request at its end.

Closed unless listed: a path that is not among the open ones needs a key, a web page of another site is
refused unless its origin is allowed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from ckn_scale.serving import keys as api_keys
from ckn_scale.serving.keys import ApiKey
from ckn_scale.serving.limits import ApiError, App, RateLimiter, Receive, Scope, Send, error_response
from ckn_scale.serving.request_record import RequestRecord, begin_request, current_record, end_request
from ckn_scale.serving.settings import ServeSettings

logger = logging.getLogger(__name__)
Headers = Mapping[bytes, bytes]
Observer = Callable[[RequestRecord], None]
OPEN_PATHS = ("/", "/healthz", "/readyz", "/docs", "/openapi.json")
OPEN_PREFIXES = ("/page/", "/docs/")
METRICS_PATH = "/metrics"
PAGE_POLICY = "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'; base-uri 'none'"
SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", PAGE_POLICY.encode()),
]


class RequestGate:
    """Checks host, origin, key and rate before anything is read; answers HEAD wherever there is GET."""

    def __init__(self, app: App, settings: ServeSettings) -> None:
        self.observers: list[Observer] = []
        self.in_flight = 0
        self.sends_request_id = True  # unless what is in front of it does
        self._settings = settings
        self._app = app
        self._guarded: App = self._guard
        if settings.allowed_origins:
            # Outside the check of keys: a preflight has none, and a page may read why it was refused.
            self._guarded = CORSMiddleware(
                self._guard,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "HEAD", "POST"],
                allow_headers=["authorization", "content-type", "x-request-id"],
                expose_headers=["retry-after", "x-request-id"],
            )
        self._rates = RateLimiter(settings.keys, settings.ingress_replicas)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = begin_request(scope)
        self.in_flight += 1
        if scope["method"] == "HEAD":
            scope, send = {**scope, "method": "GET"}, _without_body(send)
        send = _completing(send, record, sends_id=self.sends_request_id)
        try:
            headers = _headers(scope)
            check_host(headers, self._settings.allowed_hosts)
            check_site(scope, headers, self._settings.allowed_origins)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        else:
            await self._guarded(scope, _counting(receive, record), send)
        finally:
            self.in_flight -= 1
            end_request(record, scope)
            self._tell_observers(record)

    def _tell_observers(self, record: RequestRecord) -> None:
        for observe in self.observers:
            try:
                observe(record)
            except Exception:  # a full disk costs lines of the log, not answers
                logger.exception("request %s is not on record", record.request_id)

    async def _guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_key(scope)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_key(self, scope: Scope) -> None:
        path = _route_path(scope)
        key = check_access(path, _headers(scope), self._settings)
        if key is None:
            return
        record = current_record()
        record.key = key.name
        if scope["method"] == "POST" or path.startswith("/v1/similar/"):
            self._rates.charge(key)
            record.charge_more = partial(self._rates.charge_more, key)


def check_host(headers: Headers, allowed: tuple[str, ...]) -> None:
    """A loopback server answers loopback names only: no web page can reach it by a name of its own."""
    host = headers.get(b"host", b"").decode("latin-1").lower()
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if allowed and name not in allowed:
        raise ApiError(421, "wrong_host", f"this server does not answer for the host {name!r}")


def check_site(scope: Scope, headers: Headers, allowed: tuple[str, ...]) -> None:
    """A browser says when another site's page makes it ask; following a link is no such case."""
    if headers.get(b"sec-fetch-site", b"none") not in (b"cross-site", b"same-site"):
        return
    if scope["method"] == "GET" and headers.get(b"sec-fetch-mode") == b"navigate":
        return
    origin = headers.get(b"origin", b"").decode("latin-1")
    if "*" not in allowed and origin not in allowed:
        message = "this server answers no pages of other sites; `serve --allow-origin` lists some"
        raise ApiError(403, "wrong_origin", message)


def check_access(path: str, headers: Headers, settings: ServeSettings) -> ApiKey | None:
    """The key that was shown where one is needed; ApiError 401 without, 403 when it is for other things."""
    needed = "metrics" if path == METRICS_PATH else "search"
    is_open = settings.open_metrics if needed == "metrics" else not settings.require_keys
    if is_open or path in OPEN_PATHS or path.startswith(OPEN_PREFIXES):
        return None
    scheme, _, given = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    key = api_keys.find_key(given.strip(), settings.keys)
    if scheme.lower() != "bearer" or key is None:
        message = "this server needs a key: send the header `Authorization: Bearer <key>`"
        raise ApiError(401, "unauthorized", message).with_headers({"www-authenticate": "Bearer"})
    if needed not in key.scopes:
        message = f"this key is for {' and '.join(key.scopes)}, and {needed} needs one with scope={needed}"
        raise ApiError(403, "forbidden", message)
    return key


def _route_path(scope: Scope) -> str:
    """The path below the application's prefix, as routes see it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _headers(scope: Scope) -> Headers:
    return {name.lower(): value for name, value in scope["headers"]}


def _completing(send: Send, record: RequestRecord, *, sends_id: bool) -> Send:
    """Adds headers that every answer has, and notes how it went."""
    own = [*SECURITY_HEADERS, *([(b"x-request-id", record.request_id.encode())] if sends_id else [])]

    async def send_completed(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            headers = [_allow_head(name, value) for name, value in message.get("headers", [])]
            message = {**message, "headers": [*headers, *own]}
        else:
            record.bytes_out += len(message.get("body", b""))
        await send(message)

    return send_completed


def _allow_head(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    if name.lower() == b"allow" and b"GET" in value and b"HEAD" not in value:
        return name, value.replace(b"GET", b"GET, HEAD")
    return name, value


def _without_body(send: Send) -> Send:
    async def send_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_headers


def _counting(receive: Receive, record: RequestRecord) -> Receive:
    async def receive_counted() -> MutableMapping[str, Any]:
        message = await receive()
        record.bytes_in += len(message.get("body", b""))
        return message

    return receive_counted
