"""A new local folder for the user, there as a whole or not at all.

It is written under another name beside its place, and locked meanwhile. A process that was killed leaves such
a folder without its lock: whoever writes to the same place next removes it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckn_scale.errors import InputError
from ckn_scale.failpoints import hit_failpoint
from ckn_scale.storage.local_files import TEMP_PREFIX, make_folder, sync_folder
from ckn_scale.storage.run_folder import RunFolder


def check_output(target: str, run: RunFolder | None = None) -> Path:
    """Where `target` will be; InputError when it is no local path, is there already, or lies in the run."""
    if "://" in target:
        raise InputError(f"{target}: results go to a local folder; copy it from there")
    place = Path(os.path.abspath(target))
    if os.path.lexists(place):
        raise InputError(f"{target} is there already: name another folder, or remove it first")
    inside = None if run is None else run.store.local_path("")
    if (
        run is not None
        and inside is not None
        and Path(os.path.realpath(place)).is_relative_to(os.path.realpath(inside))
    ):
        raise InputError(f"{target} lies in the run folder {run.url}, which holds the run's own files only")
    return place


@contextmanager
def new_folder(target: str, run: RunFolder | None = None) -> Iterator[Path]:
    """A folder to write to, which is `target` once the block has ended well and is gone otherwise."""
    place = check_output(target, run)
    make_folder(place.parent)
    prefix = f"{TEMP_PREFIX}{hashlib.sha256(os.fsencode(place.name)).hexdigest()[:12]}-"
    _remove_stale(place.parent, prefix)
    temp, lock = _make_locked(place.parent, prefix)
    try:
        yield temp
        hit_failpoint("data_written", "output_folder", 0)
        _make_durable(temp)
        _rename(temp, place, target)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        os.close(lock)


def _make_locked(parent: Path, prefix: str) -> tuple[Path, int]:
    """A folder that gets its name when it is locked, so that nobody takes it for left over before."""
    name = uuid.uuid4().hex
    temp = parent / f"{TEMP_PREFIX}{name}"
    temp.mkdir()
    lock = os.open(temp, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # a file system without locks: nobody removes it there either
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return temp.rename(parent / f"{prefix}{name}"), lock


def _remove_stale(parent: Path, prefix: str) -> None:
    """What killed processes left that wrote to the same place."""
    for left in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(descriptor)


def _make_durable(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def _rename(temp: Path, place: Path, target: str) -> None:
    try:
        temp.rename(place)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise InputError(f"{target} was made by another process meanwhile") from error
        raise
    sync_folder(place.parent)
