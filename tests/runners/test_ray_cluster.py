"""The Ray of our own: nobody joins it without its token, and nothing of it stays behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HOST_A_CLUSTER = """
import os, sys, ray
from ckn_scale.ray_cluster import connect_ray
with connect_ray(None):
    print(ray.get_runtime_context().gcs_address, os.environ["RAY_AUTH_TOKEN"], flush=True)
    sys.stdin.read()
"""
JOIN_IT = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print(ray.get(ray.put("joined")))
"""


@pytest.fixture
def cluster(user_env):
    """Address and token of a cluster that another process made for itself."""
    command = [sys.executable, "-c", HOST_A_CLUSTER]
    with subprocess.Popen(
        command, env=user_env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as host:
        yield host.stdout.readline().split()
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
    address, token = cluster
    stranger = join(user_env, address, "0" * len(token))
    assert stranger.returncode != 0
    assert "token" in stranger.stderr.lower()
    friend = join(user_env, address, token)
    assert friend.returncode == 0, friend.stderr
    assert "joined" in friend.stdout
    assert not os.path.exists(os.path.join(user_env["HOME"], ".ray", "auth_token")), "nor is it left at home"
