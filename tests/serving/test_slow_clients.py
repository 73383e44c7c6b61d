"""Clients that hold connections open and send next to nothing, against a real server."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest
from running_server import KEY, query_view

CLOSED_WITHIN_S = 60.0  # far beyond every deadline of the server, and far below for ever
SLOW = 20  # more than the server has places for searches, or for bodies


@pytest.fixture
def connect(local_server):
    """A connection that has sent the given bytes."""
    host, _, port = local_server.url.removeprefix("http://").rpartition(":")
    with contextlib.ExitStack() as open_sockets:

        def start(sent):
            one = open_sockets.enter_context(socket.create_connection((host, int(port)), CLOSED_WITHIN_S))
            one.sendall(sent)
            return one

        yield start


def read_to_end(connection):
    """All that the server says until it hangs up; a timeout when it does not."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def post(length, *more):
    lines = ("POST /v1/search HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {KEY}", *more)
    return "\r\n".join(
        (*lines, "Content-Type: application/json", f"Content-Length: {length}", "", "")
    ).encode()


def test_bodies_that_trickle_keep_nobody_out_and_are_ended(local_server, connect):
    slow = [connect(post(10_000) + b"{") for _ in range(SLOW)]
    for _ in range(3):
        assert local_server.search(query_view("coffee"), k=1).status_code == 200
    for connection in slow:
        status = read_to_end(connection).split(b"\r\n")[0]
        assert status.split()[1] in (b"408", b"429"), status


def test_headers_that_do_not_end_are_not_waited_for(local_server, connect):
    silent, begun = connect(b""), connect(b"POST /v1/search HTTP/1.1\r\nHost: 127.0.0.1\r\n")
    kept = connect(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        answer += kept.recv(65536)
    kept.sendall(b"GET /healthz HTTP/1.1\r\n")  # the connection's second request
    assert drip(begun) == b""
    assert read_to_end(silent) == b""
    assert read_to_end(kept) == b""
    assert local_server.search(query_view("coffee"), k=1).status_code == 200


def drip(connection):
    """Sends a header's letter each time nothing was said, until the server hangs up."""
    ends = time.monotonic() + CLOSED_WITHIN_S
    connection.settimeout(0.5)
    while time.monotonic() < ends:
        try:
            return connection.recv(65536)
        except TimeoutError:
            with contextlib.suppress(OSError):
                connection.sendall(b"x")
        except ConnectionResetError:
            return b""
    raise AssertionError("the server waits for headers for ever")
