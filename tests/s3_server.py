"""A real S3 server for tests: SeaweedFS on free ports, in its own folder, ended by its pid."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

ACCESS_KEY = "test-key"
SECRET_KEY = "test-secret"
BUCKET = "ckn"
_PORT_FLAGS = ("s3", "master", "volume", "filer", "admin")
_START_S = 60


class S3Server:
    """One server process. `env` is what a client process needs to reach it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.endpoint = ""
        self.process: subprocess.Popen[bytes] | None = None
        self.ports: list[int] = []

    @property
    def env(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def url(self, name: str) -> str:
        """A prefix that nothing else uses."""
        return f"s3://{BUCKET}/{name}-{uuid.uuid4().hex[:12]}"

    def start(self) -> None:
        """Ports are free when they are drawn; a neighbour may take one before us, so three tries."""
        for _ in range(3):
            self._spawn()
            if self._is_ready():
                return
            self.stop()
        said = (self.folder / "weed.log").read_text(errors="replace")[-4000:]
        raise RuntimeError(f"SeaweedFS did not start; it said:\n{said}")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        for port in self.ports:  # a killed server leaves its sockets, and TMPDIR does not move them
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink(missing_ok=True)

    def _spawn(self) -> None:
        ports = _free_ports(2 * len(_PORT_FLAGS) + 1)
        self.ports = list(ports)
        self.endpoint = f"http://127.0.0.1:{ports[0]}"
        flags = [f"-metricsPort={ports.pop()}"]
        for i, part in enumerate(_PORT_FLAGS):
            flags += [f"-{part}.port={ports[2 * i]}", f"-{part}.port.grpc={ports[2 * i + 1]}"]
        data = self.folder / f"data-{ports[0]}"
        data.mkdir(parents=True)
        command = [
            str(Path(sys.executable).parent / "weed"),
            "mini",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-admin.ui=false",
            "-webdav=false",
            "-master.telemetry=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-bucket={BUCKET}",
            *flags,
        ]
        env = {**os.environ, **self.env, "TMPDIR": str(self.folder)}  # its log files go there
        with open(self.folder / "weed.log", "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=self.folder)

    def _is_ready(self) -> bool:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self.process is not None and self.process.poll() is None:
            if "Press Ctrl+C to stop" in (self.folder / "weed.log").read_text(errors="replace"):
                return True
            time.sleep(0.1)
        return False


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
