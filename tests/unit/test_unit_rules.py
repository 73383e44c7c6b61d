"""What conftest.py forbids to unit tests does fail."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import sys
import time

import pytest
import ray


@pytest.fixture
def unconnected():
    with socket.socket() as one:
        yield one


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: ray.init(address="local"), id="ray"),
        pytest.param(lambda: time.sleep(0), id="sleep"),
        pytest.param(lambda: subprocess.run([sys.executable, "-c", ""]), id="subprocess"),
        pytest.param(
            lambda: multiprocessing.get_context("spawn").Process(target=print).start(), id="process"
        ),
    ],
)
def test_unit_tests_cannot(call):
    with pytest.raises(pytest.fail.Exception, match="in a unit test"):
        call()


@pytest.mark.parametrize("name", ["connect", "connect_ex", "bind"])
def test_unit_tests_cannot_use_a_socket(name, unconnected):
    with pytest.raises(pytest.fail.Exception, match=f"socket.{name} in a unit test"):
        getattr(unconnected, name)(("127.0.0.1", 9))
