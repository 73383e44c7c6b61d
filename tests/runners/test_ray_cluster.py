"""The Ray of our own: on loopback, in a folder of the user's alone, joined by nobody without its token."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray_nodes import list_children

HOST_A_CLUSTER = """
import os, sys, ray
from ckn_scale.ray_cluster import connect_ray
with connect_ray(None):
    folder = ray._private.worker.global_worker.node.get_session_dir_path()
    ray.get(ray.remote(lambda: None).remote())  # a worker that listens as well
    print(ray.get_runtime_context().gcs_address, os.environ["RAY_AUTH_TOKEN"], folder, flush=True)
    sys.stdin.read()
"""
JOIN_IT = """
import sys, ray
from ray._private import ray_constants
ray_constants.ENABLE_RAY_CLUSTER = False  # its address here is the loopback one, as in connect_ray
ray.init(address=sys.argv[1], log_to_driver=False)
print(ray.get(ray.put("joined")))
"""
LISTEN = "0A"
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.fixture(scope="module")
def cluster(user_env):
    """A cluster that another process made for itself: address, token, folder and process."""
    command = [sys.executable, "-c", HOST_A_CLUSTER]
    with subprocess.Popen(
        command, env=user_env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as host:
        yield *host.stdout.readline().split(), host.pid
        host.stdin.close()


def join(env, address, token):
    return subprocess.run(
        [sys.executable, "-c", JOIN_IT, address],
        env={**env, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_cluster_of_our_own_is_joined_with_its_token_only(cluster, user_env):
    address, token, _, _ = cluster
    stranger = join(user_env, address, "0" * len(token))
    assert stranger.returncode != 0
    assert "token" in stranger.stderr.lower()
    friend = join(user_env, address, token)
    assert friend.returncode == 0, friend.stderr
    assert "joined" in friend.stdout
    assert not os.path.exists(os.path.join(user_env["HOME"], ".ray", "auth_token")), "nor is it left at home"


def test_cluster_of_our_own_listens_on_loopback_alone(cluster):
    *_, pid = cluster
    listening = find_listening(pid)
    assert len(listening) > 5, listening
    assert set(listening) <= LOOPBACK, listening


def test_folder_of_the_cluster_is_the_users_alone(cluster):
    _, _, session, _ = cluster
    outermost = next(path for path in Path(session).parents if path.name.startswith("ckn-"))
    assert outermost.stat().st_mode & 0o777 == 0o700


def find_listening(pid):
    """The local addresses, as the kernel writes them, on which a process and its descendants listen."""
    family, sockets = [pid], set()
    for one in family:
        family += list_children(one)
        for link in Path(f"/proc/{one}/fd").glob("*"):
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(link))
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return [row[1].split(":")[0] for row in rows if row[3] == LISTEN and f"socket:[{row[9]}]" in sockets]
