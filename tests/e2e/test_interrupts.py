"""Ctrl-C as a terminal sends it, to all processes at once: one line, nobody left, nothing lost."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import httpx
import pytest
from photo_runs import (
    assert_conserved,
    assert_some_skipped,
    copy_trained,
    digests_of,
    index_command,
    index_here,
    list_records,
    tiny_options,
    wait_for,
)
from ray_head import free_ports
from ray_nodes import MARK, find_marked, list_children, listen_to_signals, read_bytes

from ckn_scale import __version__
from ckn_scale.interrupts import SENTENCE

FIRST_CHILD = """
import multiprocessing, signal
from ckn_scale.interrupts import signals_blocked

def tell():
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    print(signal.SIGINT in blocked, signal.SIGHUP in blocked)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=tell)
    with signals_blocked():
        child.start()
    child.join()
"""

IN_NATIVE_CODE = """
import ctypes, signal, sys, threading
from ckn_scale import interrupts

def tell():
    with gate:
        print("sleeping", flush=True)

interrupts.CLEANUP_S = 0.1
interrupts.end_on_signals()
gate, sleep = threading.Lock(), ctypes.CDLL(None).sleep
with gate:
    threading.Thread(target=tell, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # so that it does not end the sleep
    sys.setswitchinterval(60)  # the other thread goes on when this one is in native code, not before
sleep(60)
"""

LEFT_IN_OPENCV = """
import sys, threading, cv2, numpy
from ckn_scale.cli import main

def hang(pixels=numpy.zeros((600, 800), numpy.uint8)):
    while True:
        cv2.GaussianBlur(pixels, (0, 0), 2)

for _ in range(2):
    threading.Thread(target=hang, daemon=True).start()
main(sys.argv[1:])
"""


@pytest.fixture
def start(user_env):
    """A command in a process group of its own, all of whose processes carry a mark."""
    env = {**user_env, MARK: uuid.uuid4().hex}
    started = []

    def call(*arguments):
        command = index_command(*arguments)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        options = {"start_new_session": True, "preexec_fn": listen_to_signals, **pipes}
        started.append(subprocess.Popen(command, env=env, **options))
        return started[-1], env[MARK]

    yield call
    for process in started:
        process.kill()
        process.communicate()


def _interrupt(process, mark, *signals):
    for number in signals:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    lines = stderr.splitlines()
    assert lines[-1] == SENTENCE
    assert "Traceback" not in stderr
    assert sum(SENTENCE in line for line in lines) == 1
    wait_for(lambda: not find_marked(mark), "all processes are gone")


def _has_begun(run, step):
    return lambda: Path(run, "commits", step).exists()


def test_interrupted_while_workers_start(photos, start, tmp_path):
    process, mark = start("index", photos, tmp_path / "run", *tiny_options(), "--workers", "2")
    # a worker imports torch for seconds; Python's own helper of multiprocessing is the third child
    wait_for(lambda: len(list_children(process.pid)) == 3, "the workers are spawned", process)
    wait_for(lambda: all(map(_imports_numpy, _workers_of(process.pid))), "they import", process)
    _interrupt(process, mark, signal.SIGINT)


@pytest.mark.parametrize(
    ("workers", "signals"),
    [("0", [signal.SIGINT]), ("2", [signal.SIGINT] * 3), ("2", [signal.SIGTERM]), ("2", [signal.SIGHUP])],
)
def test_interrupted_while_encoding_and_run_again(
    photos, reference, reference_digests, start, tmp_path, workers, signals
):
    run = copy_trained(reference, tmp_path / "run")
    process, mark = start("index", photos, run, *tiny_options(), "--workers", workers)
    wait_for(lambda: list_records(run), "a shard is encoded", process)
    _interrupt(process, mark, *signals)
    index_here(photos, run)
    assert_some_skipped(run)
    assert digests_of(run) == reference_digests
    assert_conserved(run)


def test_interrupted_while_training(photos, start, tmp_path):
    process, mark = start("index", photos, tmp_path / "run", *tiny_options(), "--workers", "0")
    wait_for(_has_begun(tmp_path / "run", "draw_subpatches-1"), "training begins", process)
    _interrupt(process, mark, signal.SIGINT)


def test_interrupted_on_ray(photos, reference, start, tmp_path):
    run = copy_trained(reference, tmp_path / "run")
    process, mark = start("index", photos, run, *tiny_options(), "--workers", "1", "--ray", "local")
    wait_for(lambda: list_records(run), "a shard is encoded", process)
    _interrupt(process, mark, signal.SIGINT)


def test_terminated_while_ray_starts(photos, reference, start, tmp_path):
    """Its processes live until the driver ends them: one that has lost its raylet ends at once."""
    run = copy_trained(reference, tmp_path / "run")
    process, mark = start("index", photos, run, *tiny_options(), "--workers", "1", "--ray", "local")
    raylet = wait_for(lambda: _find_child(process.pid, b"raylet/raylet"), "the raylet starts", process)
    assert os.getsid(raylet) != process.pid
    _interrupt(process, mark, signal.SIGTERM)


def test_interrupted_demo(start, tmp_path):
    folder, (port,) = tmp_path / "demo", free_ports(1)
    process, mark = start("demo", "--folder", folder, "--port", str(port))
    wait_for(_has_begun(folder / "run", "sample_patches"), "its images are sampled", process)
    _interrupt(process, mark, signal.SIGINT)


def test_interrupted_server_ends_well_while_it_answers(photos, reference, start):
    """Ctrl-C is how a server ends: there is nothing to go on with, and it is no failure."""
    (port,) = free_ports(1)
    process, mark = start("serve", reference, "--port", str(port))
    assert "(Ctrl-C ends it)" in process.stdout.readline()
    codes = []
    asking = threading.Thread(target=_ask_until_it_ends, args=(port, photos / "coffee.jpg", codes))
    asking.start()
    wait_for(lambda: codes, "it answers", process)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    asking.join()
    assert process.returncode == 0, stderr
    assert stderr.splitlines() == [f"opening {reference} …"]
    assert codes[0] == 200
    wait_for(lambda: not find_marked(mark), "all processes are gone")


def _ask_until_it_ends(port, image, codes):
    body = {"image": base64.b64encode(image.read_bytes()).decode()}
    with contextlib.suppress(httpx.TransportError):
        while True:
            codes.append(httpx.post(f"http://127.0.0.1:{port}/v1/search", json=body, timeout=30).status_code)


def test_interrupted_in_native_code_ends_nevertheless(user_env):
    command = [sys.executable, "-c", IN_NATIVE_CODE]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=user_env, preexec_fn=listen_to_signals, **pipes) as process:
        assert process.stdout.readline() == "sleeping\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", f"{SENTENCE}\n")
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--version"], 0, (f"ckn-scale {__version__}\n", "")),
        (["status", "/absent"], 2, ("", "ckn-scale: /absent is not a run folder: it has no run.json\n")),
    ],
)
def test_images_that_hang_in_native_code_leave_the_exit_code_alone(user_env, arguments, code, said):
    """Python's own end aborts in them, and a command that went well would end with 134."""
    command = [sys.executable, "-c", LEFT_IN_OPENCV, *arguments]
    result = subprocess.run(command, env=user_env, capture_output=True, text=True, timeout=60)
    assert (result.returncode, (result.stdout, result.stderr)) == (code, said)


def test_first_child_is_started_without_the_signals_of_the_terminal(user_env, tmp_path):
    script = tmp_path / "first_child.py"
    script.write_text(FIRST_CHILD)
    result = subprocess.run(
        [sys.executable, script], env=user_env, capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "True True\n", result.stderr


def _find_child(pid: int, command: bytes) -> int | None:
    return next((one for one in list_children(pid) if command in read_bytes(f"/proc/{one}/cmdline")), None)


def _workers_of(pid: int) -> list[int]:
    return [child for child in list_children(pid) if b"spawn_main" in read_bytes(f"/proc/{child}/cmdline")]


def _imports_numpy(pid: int) -> bool:
    return b"numpy" in read_bytes(f"/proc/{pid}/maps")
