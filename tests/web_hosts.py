"""A web host on loopback that behaves as hosts of strangers do, by the path it is asked for.

/any/name.jpg      the image
/status/403        that status, once and for all; /status/503/2/a.jpg: twice, then the image
/redirect/3/a.jpg  three redirects, then the image; /leave: a redirect to file:///etc/passwd
/endless           a body that never ends; /promise: a header that promises far too much
/cut               a body that ends early
/silent            never an answer
/held/a.jpg        the image once `released` is set, 503 when nobody does
/together/8        answered once eight such requests are under way, with 503 when they do not come
/apart/9           the other way round: refused when nine are under way, answered when they do not come soon
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WebHost:
    """Listens on `url`; `asked` counts requests by path, `most_at_once` the busiest moment."""

    def __init__(self, image: bytes = b"image", files: dict[str, bytes] | None = None) -> None:
        self.image = image
        self.files = files or {}  # by name, the last part of the path; others are `image`
        self.asked: Counter[str] = Counter()
        self.most_at_once = 0
        self.ended, self.released = threading.Event(), threading.Event()
        self.at_once = 0
        self.lock = threading.Lock()
        self.barriers: dict[int, threading.Barrier] = {}
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.host = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> WebHost:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def barrier(self, parties: int) -> threading.Barrier:
        with self.lock:
            return self.barriers.setdefault(parties, threading.Barrier(parties))


def dead_url(name: str = "a.jpg") -> str:
    """A URL of a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/{name}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    host: WebHost

    def handle_error(self, request, client_address) -> None:
        pass  # clients of these tests hang up in the middle


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        host = self.server.host
        with host.lock:
            host.asked[self.path] += 1
            host.at_once += 1
            host.most_at_once = max(host.most_at_once, host.at_once)
        try:
            kind, *details = self.path.strip("/").split("/")
            getattr(self, f"_answer_{kind}", self._answer_image)(*details)
        finally:
            with host.lock:
                host.at_once -= 1

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _answer_image(self, *_: str) -> None:
        host = self.server.host
        self._answer(200, host.files.get(self.path.rpartition("/")[2], host.image))

    def _answer_status(self, status: str, times: str = "", *_: str) -> None:
        if times and self.server.host.asked[self.path] > int(times):
            self._answer_image()
        else:
            self._answer(int(status), b"no")

    def _answer_redirect(self, left: str, *name: str) -> None:
        there = f"/redirect/{int(left) - 1}/a.jpg" if int(left) > 1 else "/a.jpg"
        self._answer(302, Location=there)

    def _answer_leave(self) -> None:
        self._answer(302, Location="file:///etc/passwd")

    def _answer_endless(self) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        while not self.server.host.ended.is_set():
            self.wfile.write(b"\0" * (1 << 16))

    def _answer_promise(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(1 << 40))
        self.end_headers()

    def _answer_cut(self, *_: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"half")
        self.close_connection = True

    def _answer_silent(self, *_: str) -> None:
        self.server.host.ended.wait()
        self.close_connection = True

    def _answer_held(self, *_: str) -> None:
        if self.server.host.released.wait(timeout=30):
            self._answer_image()
        else:
            self._answer(503, b"held")

    def _answer_together(self, parties: str, *_: str) -> None:
        try:
            self.server.host.barrier(int(parties)).wait(timeout=20)
        except threading.BrokenBarrierError:
            self._answer(503, b"alone")
        else:
            self._answer_image()

    def _answer_apart(self, parties: str, *_: str) -> None:
        try:
            self.server.host.barrier(int(parties)).wait(timeout=0.2)  # less than a client waits
        except threading.BrokenBarrierError:
            self._answer_image()
        else:
            self._answer(403, b"a crowd")

    def log_message(self, *_: object) -> None:
        pass
