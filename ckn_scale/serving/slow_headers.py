"""A deadline for a request's headers, which neither uvicorn nor Ray Serve has: `end_slow_headers`.

It belongs into the process that listens, Serve's proxy, which calls what is named in
$RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH when it starts. With HAProxy in front (RAY_SERVE_ENABLE_HA_PROXY)
it is HAProxy's `timeout http-request` that counts.
"""

from __future__ import annotations

import asyncio

import uvicorn.config
from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADER_DEADLINE_S = 10.0
ENVIRONMENT = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}:end_slow_headers"}


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


def end_slow_headers() -> None:
    """Every uvicorn that this process starts from now on has the deadline."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{DeadlineProtocol.__name__}"
