from __future__ import annotations

import threading

import pytest

from ckn_scale.serving.versions import NotLoaded, ResidentVersions


def wait_until_held(versions, number):
    done = threading.Event()
    while not versions.prepare(number):
        done.wait(0.005)


def test_versions_load_in_the_background_and_the_oldest_goes():
    gate = threading.Event()
    gate.set()

    def load(number):
        gate.wait(5)
        return f"v{number}"

    versions = ResidentVersions(lambda number: number, load, drain_s=0)
    versions.load_now(1)
    gate.clear()
    with pytest.raises(NotLoaded, match="version 2 is being loaded"):
        versions.get(2)
    assert not versions.prepare(2)
    assert versions.get(1) == "v1"
    gate.set()
    wait_until_held(versions, 2)
    assert (versions.get(2), versions.get(1)) == ("v2", "v1")
    wait_until_held(versions, 3)
    assert versions.get(1) == "v1"  # used last, so 2 had to go
    with pytest.raises(NotLoaded):
        versions.get(2)


def test_a_load_that_fails_leaves_the_old_version_and_is_not_repeated_at_once(caplog):
    calls = []

    def load(number):
        calls.append(number)
        if number == 2:
            raise OSError("disk full")
        return number

    versions = ResidentVersions(lambda number: number, load, drain_s=0)
    versions.load_now(1)
    versions.prepare(2)
    while "disk full" not in caplog.text or versions._loading is not None:
        threading.Event().wait(0.005)
    assert not versions.prepare(2)
    assert calls == [1, 2]
    assert versions.get(1) == 1
    wait_until_held(versions, 3)


def test_a_first_load_that_fails_is_the_replicas_failure():
    def load(number):
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        ResidentVersions(lambda number: number, load, drain_s=0).load_now(1)


def test_versions_of_the_same_content_share_what_is_loaded():
    loads = []
    contents = {1: "old", 2: "new", 3: "old", 4: "new"}
    versions = ResidentVersions(contents.__getitem__, lambda number: loads.append(number) or object())
    versions.load_now(1)
    for number in (2, 3, 4):
        wait_until_held(versions, number)
    assert loads == [1, 2]
    assert versions.get(3) is versions.get(1)
    assert versions.get(4) is versions.get(2)


def test_a_third_content_waits_until_the_oldest_has_rested():
    at_once = []

    class Content:
        def __init__(self):
            at_once.append(self)

        def __del__(self):
            alive.append(-1)

    alive = []

    def load(number):
        alive.append(1)
        assert sum(alive) <= 2, "three in memory"
        return Content()

    versions = ResidentVersions(lambda number: number, load, drain_s=0.3)
    versions.load_now(1)
    at_once.clear()
    wait_until_held(versions, 2)
    at_once.clear()
    versions.get(1)
    assert not versions.prepare(3)
    while versions._loading is not None:
        threading.Event().wait(0.005)
    assert versions.numbers() == [1, 2], "1 was used just now"
    versions.get(2)
    wait_until_held(versions, 3)
    assert versions.numbers() == [2, 3]
