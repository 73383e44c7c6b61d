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

    versions = ResidentVersions(load)
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

    versions = ResidentVersions(load)
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
        ResidentVersions(load).load_now(1)
