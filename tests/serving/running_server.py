"""Real servers, with Ray Serve in a process of their own or in this one, and how to talk to them."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from ckn_scale.core.augmentations import render_view
from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import read_photo
from ckn_scale.serving.app import resolve_access
from ckn_scale.serving.local import answering

KEY = "a key of the tests"
PATIENCE_S = 120.0  # a busy machine is no reason for 429 where that is not what is tested
SERVER = """
import json, sys
from ckn_scale.serving.app import serve_run

def tell(serving):
    print(json.dumps({"url": serving.url, "api_key": serving.api_key}), flush=True)

serve_run(**json.loads(sys.argv[1]), on_ready=tell)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def query_view(photo: str) -> bytes:
    """A view of an indexed photograph that is not in the index."""
    return encode_jpeg(render_view(read_photo(photo), "crop", 100), 88)


def as_body(image: bytes, **fields: Any) -> dict[str, Any]:
    return {"image": base64.b64encode(image).decode(), **fields}


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    ends = time.monotonic() + timeout_s
    while time.monotonic() < ends:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {timeout_s} s")


@dataclass
class AnsweringServer:
    url: str
    client: httpx.Client  # with the key

    def search(self, image: bytes, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/search", json=as_body(image, **fields))


@contextlib.contextmanager
def local_server_of(run: Path, **settings: Any) -> Iterator[AnsweringServer]:
    """`serve --local` in a thread of this process, up within a second; `settings` of ServeSettings."""
    values = {"run_url": str(run), "max_wait_s": PATIENCE_S, **settings}
    checked, _ = resolve_access("127.0.0.1", [KEY], values, insecure=False)
    with answering(checked) as url, make_client(url) as client:
        yield AnsweringServer(url, client)


def make_client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=60, headers={"authorization": f"Bearer {KEY}"})


@dataclass
class RunningServer(AnsweringServer):
    process: subprocess.Popen[str]

    def find_replica(self, deployment: str) -> int | None:
        """The pid of a deployment's replica among the server's own processes."""
        title = f"ray::ServeReplica:ckn_scale:{deployment}".encode()
        parents = _read_parents()
        for pid in parents:
            if _read_command(pid).startswith(title) and self.process.pid in _ancestors(pid, parents):
                return pid
        return None


def start_server(home: Path, **arguments: Any) -> RunningServer:
    """serve_run in a child process with a home of its own, once it answers."""
    arguments = {"port": free_port(), "max_wait_s": PATIENCE_S, **arguments}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment.update(HOME=str(home), OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", SERVER, json.dumps(arguments)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the server ended with {process.wait()} before it answered"
    threading.Thread(target=_drain, args=(process.stdout,), daemon=True).start()
    url = json.loads(line)["url"]
    return RunningServer(url, make_client(url), process)


def stop_server(server: RunningServer) -> int:
    server.client.close()
    server.process.send_signal(signal.SIGTERM)
    try:
        code = server.process.wait(60)
    finally:
        server.process.kill()
    return code


def _drain(stream: IO[str]) -> None:
    """Ray says something of every lost replica: a pipe that nobody reads is full after some minutes."""
    with stream:
        for _ in stream:
            pass


def list_descendants(root: int) -> list[int]:
    parents = _read_parents()
    return [pid for pid in parents if root in _ancestors(pid, parents)]


def _read_parents() -> dict[int, int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            parents[int(entry.name)] = int(fields[1])
    return parents


def _read_command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _ancestors(pid: int, parents: dict[int, int]) -> list[int]:
    found = []
    while pid in parents:
        pid = parents[pid]
        found.append(pid)
    return found
