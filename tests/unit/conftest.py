"""Unit tests compute: no Ray, no network, no process, no waiting. Whatever tries fails with its name."""

from __future__ import annotations

import socket
import subprocess
import time
from multiprocessing.process import BaseProcess

import pytest
import ray

FORBIDDEN = (
    (ray, "init"),
    (time, "sleep"),
    (socket.socket, "connect"),
    (socket.socket, "connect_ex"),
    (socket.socket, "bind"),
    (subprocess.Popen, "__init__"),
    (BaseProcess, "start"),
)


@pytest.fixture(autouse=True)
def _computation_only(monkeypatch):
    for owner, name in FORBIDDEN:
        monkeypatch.setattr(owner, name, refuse(f"{owner.__name__}.{name}"))


def refuse(called: str):
    def fail(*args, **kwargs):
        pytest.fail(f"{called} in a unit test: it belongs to another folder of tests/")

    return fail
