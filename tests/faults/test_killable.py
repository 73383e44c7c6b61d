"""A child that hangs, dies or runs out of memory costs one call; memory gets a second."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from ckn_scale.errors import ImageRejected
from ckn_scale.prepare_images import prepare_images
from ckn_scale.processes import ChildDied, ChildOverdue, KillableChild, prepare_killably
from ckn_scale.step import WorkerSettings
from ckn_scale.storage.plans import PlannedImage

HEADROOM_BYTES = 64 << 20


def behave(how: str, notes: str = "") -> str:
    """In the child. With `notes`, a file, it misbehaves the first time only."""
    if notes:
        with open(notes, "a") as file:
            file.write(f"{os.getpid()}\n")
        if len(Path(notes).read_text().splitlines()) > 1:
            return "well"
    if how == "hang":
        threading.Event().wait()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "abort":
        os.kill(os.getpid(), signal.SIGABRT)
    if how == "exhaust":
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (limit + HEADROOM_BYTES, resource.RLIM_INFINITY))
        np.ones(4 * HEADROOM_BYTES, np.uint8)
    if how == "reject":
        raise ImageRejected("corrupt", "so it is")
    if how == "stumble":
        raise KeyError("a bug")
    return how


@pytest.fixture
def child():
    with KillableChild(behave) as running:
        yield running


def test_call_answers_again_and_again_in_one_process(child):
    assert child.call("one", deadline_s=60) == "one"
    pid = child.pid
    assert child.call("two", deadline_s=60) == "two"
    assert child.pid == pid != os.getpid()


def test_call_past_its_deadline_ends_the_process_and_the_next_gets_a_new_one(child):
    child.start()
    pid = child.pid
    with pytest.raises(ChildOverdue):
        child.call("hang", deadline_s=0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert child.call("on", deadline_s=60) == "on"


def test_call_tells_how_its_process_died(child):
    for how, code in (("abort", -signal.SIGABRT), ("kill", -signal.SIGKILL)):
        with pytest.raises(ChildDied) as caught:
            child.call(how, deadline_s=60)
        assert caught.value.exit_code == code


@pytest.mark.parametrize(
    ("how", "state"),
    [("hang", "timeout"), ("abort", "crashed"), ("stumble", "crashed"), ("reject", "corrupt")],
)
def test_prepare_killably_holds_against_the_image_what_is_its_own(child, tmp_path, how, state):
    child.start()
    outcome = prepare_killably(child, how, str(tmp_path / "notes"), deadline_s=0.5 if how == "hang" else 60)
    assert isinstance(outcome, ImageRejected)
    assert outcome.state == state
    assert len((tmp_path / "notes").read_text().splitlines()) == 1


@pytest.mark.parametrize("how", ["exhaust", "kill"])
def test_prepare_killably_gives_memory_a_second_try_in_a_fresh_process(child, tmp_path, how):
    assert prepare_killably(child, how, str(tmp_path / "notes"), deadline_s=60) == "well"
    first, second = (tmp_path / "notes").read_text().splitlines()
    assert first != second


@pytest.mark.parametrize(("how", "state"), [("exhaust", "too_large"), ("kill", "crashed")])
def test_prepare_killably_rejects_what_takes_the_memory_twice(child, how, state):
    outcome = prepare_killably(child, how, deadline_s=60)
    assert isinstance(outcome, ImageRejected)
    assert outcome.state == state
    assert "twice" in outcome.reason


def exhaust_here(data: bytes) -> bytes:
    """Finds no memory beside other work, and enough in a process of its own."""
    if multiprocessing.parent_process() is None:
        raise MemoryError
    return data


def test_prepare_images_without_memory_in_a_thread_goes_on_in_a_child(tmp_path):
    planned = []
    for image_id in range(3):
        (tmp_path / f"{image_id}.jpg").write_bytes(b"%d" % image_id)
        planned.append(PlannedImage(image_id, str(tmp_path / f"{image_id}.jpg"), 1, ""))
    outcomes = prepare_images(planned, exhaust_here, WorkerSettings(), 60)
    assert [outcome for _, outcome in outcomes] == [b"0", b"1", b"2"]
