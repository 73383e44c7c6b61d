"""What belongs into the process that listens: Serve's HTTP proxy, or ours with `serve --local`.

The proxy calls what $RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names when it starts. It gets a deadline for a
request's headers, which neither uvicorn nor Ray Serve has, and an answer for those whose ingress replica died
while it had their request, whom Serve leaves to uvicorn's 500. With HAProxy in front
(RAY_SERVE_ENABLE_HA_PROXY) it is HAProxy's `timeout http-request` that counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import uvicorn.config
from starlette.middleware import Middleware
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ckn_scale.serving.limits import ApiError, App, Receive, Scope, Send, error_response

HEADER_DEADLINE_S = 10.0
ENVIRONMENT = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}:set_up_proxy"}


def set_up_proxy() -> list[Middleware]:
    """What goes around the application; every uvicorn that starts here from now on has the deadline."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{DeadlineProtocol.__name__}"
    return [Middleware(AnswerForLostReplicas)]


class AnswerForLostReplicas:
    """503 instead of nothing: the request may be sent again, as all of ours may."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = scope["type"] != "http"

        async def note_beginning(message: MutableMapping[str, Any]) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        await self._app(scope, receive, note_beginning)
        if not has_begun:
            error = ApiError(503, "unavailable", "the replica that had this request is gone: send it again")
            await error_response(error.with_headers({"retry-after": "1"}))(scope, receive, send)


class DeadlineProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol; a connection is closed when headers were begun, or awaited first, for too long."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        in_a_request = self.cycle is not None and not self.cycle.response_complete
        if in_a_request:
            self._clear_deadline()
        elif self._deadline is None:
            self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def _set_deadline(self) -> None:
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(HEADER_DEADLINE_S, self.transport.close)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
