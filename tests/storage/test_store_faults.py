"""Errors in the middle of a call: which are waited out, which end it, and who won."""

from __future__ import annotations

import errno
import os

import pytest

from ckn_scale.errors import InputError, TransientStoreError, UnsupportedStore
from ckn_scale.storage import store as store_module
from ckn_scale.storage.store import Store


class Faults:
    """Wraps the write of a store: `before` raises instead of it, `after` when it is done."""

    def __init__(self) -> None:
        self.before: list[Exception] = []
        self.after: list[Exception] = []
        self.calls = 0

    def around(self, write):
        def wrapped(*args, **kwargs):
            self.calls += 1
            if self.before:
                raise self.before.pop(0)
            result = write(*args, **kwargs)
            if self.after:
                raise self.after.pop(0)
            return result

        return wrapped


class FaultyS3:
    def __init__(self, fs, faults: Faults) -> None:
        self.fs = fs
        self.pipe_file = faults.around(fs.pipe_file)

    def __getattr__(self, name):
        return getattr(self.fs, name)


@pytest.fixture
def faults(store, monkeypatch) -> Faults:
    faults = Faults()
    if store.is_local:
        monkeypatch.setattr(os, "link", faults.around(os.link))
    else:
        fs = store.fs
        monkeypatch.setattr(store_module, "open_filesystem", lambda url: FaultyS3(fs, faults))
    return faults


TRANSIENT = [
    TimeoutError("slow"),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    OSError(errno.EBUSY, "409, 503"),
    OSError(errno.EIO, "500"),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_create_with_a_lost_reply_has_won(store, faults, error):
    faults.after.append(error)
    assert store.create("a", b"mine")
    assert store.read("a") == b"mine"
    assert faults.calls == 1  # the read-back decided, not a second try


@pytest.mark.parametrize("error", [FileExistsError("a"), OSError(errno.EINVAL, "412")], ids=repr)
def test_create_whose_own_repetition_lost_has_won(store, faults, error):
    """A client that repeats a timed-out PUT loses against itself."""
    faults.after.append(error)
    assert store.create("a", b"mine")


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_create_waits_transient_errors_out(store, faults, error):
    faults.before += [error, error]
    assert store.create("a", b"mine")
    assert faults.calls == 3


def test_create_loses_after_a_transient_error(store, faults):
    store.create("a", b"theirs")
    faults.before.append(TimeoutError("slow"))
    assert not store.create("a", b"mine")


def test_create_gives_up_in_the_end(store, faults):
    faults.before += [TimeoutError("slow")] * 99
    with pytest.raises(TransientStoreError, match=r"/a failed again and again, last with TimeoutError: slow"):
        store.create("a", b"mine")
    assert faults.calls == store.retry.attempts


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (PermissionError(errno.EACCES, "no"), InputError),
        (OSError(errno.ENOSPC, "full"), UnsupportedStore),
        (OSError(errno.ENAMETOOLONG, "long"), InputError),
    ],
)
def test_create_does_not_repeat_what_will_not_pass(store, faults, error, raised):
    faults.before += [error] * 9
    with pytest.raises(raised):
        store.create("a", b"mine")
    assert faults.calls == 1
    faults.before.clear()
    assert store.list() == []


def test_write_new_with_a_lost_reply_is_written(store, faults):
    faults.after.append(TimeoutError("slow"))
    store.write_new("a", b"mine")
    assert store.read("a") == b"mine"


def test_create_in_a_missing_bucket_is_an_input_error(s3, monkeypatch):
    store = Store(s3.url("x"))
    faults, fs = Faults(), store.fs
    faults.before.append(FileNotFoundError("The specified bucket does not exist"))
    monkeypatch.setattr(store_module, "open_filesystem", lambda url: FaultyS3(fs, faults))
    with pytest.raises(InputError, match="create the bucket first"):
        store.create("a", b"x")


def test_disk_without_hard_links_is_unfit(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(UnsupportedStore, match="hard links"):
        Store(tmp_path).create("a", b"x")
