"""Two hosts that do not share the folder of the run: refused in one sentence that names host and path."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hosts import Hosts, why_impossible
from photo_runs import index_command, tiny_options

from ckn_scale.ray_cluster import short_temp_folder

PORT = 6399


@pytest.fixture
def private(tmp_path):
    """A folder that each host has for itself, and one for Ray, whose socket paths must stay short."""
    with tempfile.TemporaryDirectory(prefix="ckn-", dir=short_temp_folder()) as ray_folder:
        yield tmp_path / "local", Path(ray_folder)


@pytest.fixture
def hosts(private, tmp_path):
    if (reason := why_impossible()) is not None:
        pytest.skip(reason)
    with Hosts(2, tmp_path, private) as made:
        yield made


def _start_ray(hosts, host, env, log, *options):
    ray = str(Path(sys.executable).parent / "ray")
    command = [ray, "start", "--block", f"--node-ip-address={hosts.addresses[host]}", "--num-cpus=1"]
    command += ["--object-store-memory=80000000", "--disable-usage-stats", *options]
    with log.open("ab") as said:
        return subprocess.Popen(hosts.command(host, *command), env=env, stdout=said, stderr=said)


def _wait_for_port(hosts, host):
    script = f"until : > /dev/tcp/{hosts.addresses[host]}/{PORT}; do sleep 0.2; done"
    subprocess.run(hosts.command(host, "bash", "-c", script), timeout=90, capture_output=True)


def test_run_folder_that_a_host_does_not_see_is_refused(photos, user_env, hosts, private, tmp_path):
    local, ray_folder = private
    log = tmp_path / "ray.log"
    env = {**user_env, "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": f"{hosts.addresses[0]}:{PORT}"}
    head_options = ["--head", f"--port={PORT}", f"--temp-dir={ray_folder}", "--include-dashboard=false"]
    rays = [_start_ray(hosts, 0, env, log, *head_options)]
    try:
        _wait_for_port(hosts, 0)
        rays.append(_start_ray(hosts, 1, env, log, f"--address={env['RAY_ADDRESS']}"))
        command = index_command("index", photos, local / "run", *tiny_options(), "--workers", "2")
        command += ["--ray", "auto"]
        result = subprocess.run(
            hosts.command(0, *command), env=env, capture_output=True, text=True, timeout=180
        )
    finally:
        for ray in rays:
            ray.kill()
            ray.wait()
        print("Ray said:", log.read_text(errors="replace"))
    assert result.returncode == 2, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("ckn-scale:")]
    assert lines == [
        f"ckn-scale: host {hosts.names[1]} does not see the run at {local}/run: "
        "use a folder that all hosts share, or s3://"
    ]
    assert "Traceback" not in result.stderr
