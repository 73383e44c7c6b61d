"""A Ray head with its dashboard in processes of their own, for jobs; ended by its process group."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ckn_scale.ray_cluster import short_temp_folder

TRIALS, UP_WITHIN_S = 3, 90
QUICK_METRICS = {"RAY_metrics_report_interval_ms": "500"}


@dataclass(frozen=True)
class Head:
    jobs_url: str  # of the job server
    metrics_url: str  # what a Prometheus would scrape


@contextmanager
def ray_head(env: dict[str, str], num_cpus: int) -> Iterator[Head]:
    """A fresh cluster of one node. One whose dashboard does not come up is given up, and another tried."""
    for trial in range(TRIALS):
        temp = Path(tempfile.mkdtemp(prefix="ckn-", dir=short_temp_folder()))
        ports = free_ports(5)
        process = _start(env, num_cpus, temp, ports)
        head = Head(f"http://127.0.0.1:{ports[1]}", f"http://127.0.0.1:{ports[4]}/metrics")
        try:
            if _answers(f"{head.jobs_url}/api/version", process):
                yield head
                return
            assert trial + 1 < TRIALS, _read_logs(temp)
        finally:
            _end(process)
            shutil.rmtree(temp, ignore_errors=True)


def _start(env: dict[str, str], num_cpus: int, temp: Path, ports: list[int]) -> subprocess.Popen[bytes]:
    port, dashboard_port, client_port, agent_port, metrics_port = ports
    scripts = Path(sys.executable).parent
    command = [str(scripts / "ray"), "start", "--head", "--block", f"--port={port}", f"--temp-dir={temp}"]
    command += ["--include-dashboard=true", f"--dashboard-port={dashboard_port}", f"--num-cpus={num_cpus}"]
    command += [f"--ray-client-server-port={client_port}", "--node-ip-address=127.0.0.1"]
    # Ray's default for the agent that takes jobs is one fixed port, which another cluster may hold.
    command += [f"--dashboard-agent-listen-port={agent_port}", f"--metrics-export-port={metrics_port}"]
    command += ["--object-store-memory=100000000", "--disable-usage-stats"]
    environment = {**env, **QUICK_METRICS, "RAY_AUTH_MODE": "disabled", "PATH": f"{scripts}:{env['PATH']}"}
    with (temp / "start.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, start_new_session=True, stdout=log, stderr=log)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Whether the head comes up; it may also end, when a port was taken in the meantime."""
    ends = time.monotonic() + UP_WITHIN_S
    while time.monotonic() < ends and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except OSError:
            time.sleep(0.5)
    return False


def _read_logs(temp: Path) -> str:
    """What the head and its dashboard said last."""
    files = [temp / "start.log", *sorted(temp.glob("session_latest/logs/dashboard*"))]
    return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-1500:]}" for file in files)


def free_ports(count: int) -> list[int]:
    """Below the range that outgoing connections and other clusters' workers take theirs from."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports += [port] if port not in ports else []
    return ports
