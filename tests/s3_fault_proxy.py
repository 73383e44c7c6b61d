"""A proxy before the S3 server that fails as networks and object stores do, at a given rate.

500 503 409   an error instead of the call
reset         the connection is cut before the call
lost          the call is made, and its answer is cut off whole
cut           the call is made, and its answer ends in the middle
slow          the call waits
hang          no answer at all; not among the kinds drawn unless asked for
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from urllib.parse import urlsplit

KINDS = ("500", "503", "409", "reset", "lost", "cut", "slow")
_CODES = {"500": "InternalError", "503": "SlowDown", "409": "ConditionalRequestConflict"}
_SLOW_S = 0.1


class FaultProxy:
    """Listens on `endpoint`, passes to `upstream`; `rate` of the requests fail, and `counts` says how."""

    def __init__(
        self, upstream: str, *, rate: float = 0.0, seed: int = 0, kinds: tuple[str, ...] = KINDS
    ) -> None:
        self.upstream = urlsplit(upstream)
        self.rate = rate
        self.kinds = kinds
        self.counts: Counter[str] = Counter()
        self.endpoint = ""
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None

    def start(self) -> None:
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        port = self._server.sockets[0].getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{port}"

    def stop(self) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _end(self) -> None:
        self._server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request per connection: the answer says so, and clients open another."""
        try:
            request = await _read_request(reader, writer)
            kind = self._random.choice(self.kinds) if self._random.random() < self.rate else "fine"
            self.counts[kind] += 1
            await self._answer(kind, request, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, kind: str, request: bytes, writer: asyncio.StreamWriter) -> None:
        if kind in _CODES:
            writer.write(_error_answer(kind))
        elif kind == "hang":
            await asyncio.sleep(3600)
        elif kind == "reset":
            _reset(writer)
            return
        else:
            if kind == "slow":
                await asyncio.sleep(_SLOW_S)
            answer = await self._pass_on(request)
            if kind == "lost":
                _reset(writer)
                return
            writer.write(answer[: -(len(answer) // 3)] if kind == "cut" else answer)
        await writer.drain()

    async def _pass_on(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self.upstream.hostname, self.upstream.port)
        writer.write(request)
        await writer.drain()
        answer = await reader.read()
        writer.close()
        return answer


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Head and body, told to close afterwards. Host stays: the signature covers it."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head[:-4].split(b"\r\n")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])
    }
    if b"expect" in headers:  # the client sends its body only when told to
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await reader.readexactly(int(headers.get(b"content-length", 0)))
    kept = [line for line in lines if not line.lower().startswith((b"connection:", b"expect:"))]
    return b"\r\n".join([*kept, b"Connection: close", b"", b""]) + body


def _error_answer(kind: str) -> bytes:
    body = f"<Error><Code>{_CODES[kind]}</Code><Message>injected</Message></Error>".encode()
    head = f"HTTP/1.1 {kind} Injected\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
