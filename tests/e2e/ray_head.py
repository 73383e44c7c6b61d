"""A Ray head with its dashboard in processes of their own, for jobs; ended by its process group."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

QUICK_METRICS = {"RAY_metrics_report_interval_ms": "500"}


@dataclass(frozen=True)
class Head:
    jobs_url: str  # of the job server
    metrics_url: str  # what a Prometheus would scrape


@contextmanager
def ray_head(env: dict[str, str], num_cpus: int) -> Iterator[Head]:
    """A fresh cluster of one node."""
    port, dashboard_port, client_port, agent_port, metrics_port = free_ports(5)
    temp = tempfile.mkdtemp(prefix="ckn-ray-", dir="/tmp")  # Ray's socket paths must stay short
    scripts = Path(sys.executable).parent
    command = [str(scripts / "ray"), "start", "--head", "--block", f"--port={port}", f"--temp-dir={temp}"]
    command += ["--include-dashboard=true", f"--dashboard-port={dashboard_port}", f"--num-cpus={num_cpus}"]
    command += [f"--ray-client-server-port={client_port}", "--node-ip-address=127.0.0.1"]
    # Ray's default for the agent that takes jobs is one fixed port, which another cluster may hold.
    command += [f"--dashboard-agent-listen-port={agent_port}", f"--metrics-export-port={metrics_port}"]
    command += ["--object-store-memory=100000000", "--disable-usage-stats"]
    environment = {**env, **QUICK_METRICS, "RAY_AUTH_MODE": "disabled", "PATH": f"{scripts}:{env['PATH']}"}
    head = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{dashboard_port}"
    try:
        _wait_until_answers(f"{address}/api/version", head)
        yield Head(address, f"http://127.0.0.1:{metrics_port}/metrics")
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        try:
            head.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait()
        shutil.rmtree(temp, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _wait_until_answers(url: str, head: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + 120
    while time.monotonic() < ends:
        assert head.poll() is None, f"the head ended with {head.returncode}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"{url} did not answer within two minutes")
