"""Create-if-absent on a local disk that survives a power cut: temp file, fsync, link, fsync of the folder."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ckn_scale.errors import InputError, UnsupportedStore

TEMP_PREFIX = ".new-"  # never listed: what is left of a write that was killed


class NotRegularFile(InputError):
    """A FIFO, socket or device where a file was named: bad input when listed, `unsupported` when read."""


def create_file(target: Path, data: bytes) -> None:
    """`target` with exactly `data`; FileExistsError when it is there already."""
    make_folder(target.parent)
    temp = target.parent / f"{TEMP_PREFIX}{uuid.uuid4().hex}"
    try:
        _write_durably(temp, data)
        _link(temp, target)
    finally:
        temp.unlink(missing_ok=True)
    sync_folder(target.parent)


def make_folder(folder: Path) -> None:
    """The folder and its parents; each new entry is durable."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def walk_names(folder: Path | str, *, recursive: bool = True, below: str = "") -> Iterator[str]:
    """Files below `folder`, relative to it, without temp files; in no order, none when it is not there.

    Strings, because a run has 10⁵ records and a Path takes ten times as long to make.
    """
    try:
        entries = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        for entry in entries:
            if entry.is_dir():
                if recursive:
                    yield from walk_names(entry.path, below=f"{below}{entry.name}/")
            elif not entry.name.startswith(TEMP_PREFIX):
                yield f"{below}{entry.name}"


def folder_names(folder: Path) -> list[str]:
    """Of the folders in `folder`; none when it is not there."""
    try:
        return [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def walk_temps(folder: Path) -> Iterator[Path]:
    """What is left of writes that were killed, and the temp files of those under way."""
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names if name.startswith(TEMP_PREFIX))


def walk_sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """Files below `folder`, relative to it, with their bytes; one that goes away meanwhile is passed over."""
    for name in walk_names(folder):
        with contextlib.suppress(FileNotFoundError):
            yield name, os.stat(os.path.join(folder, name)).st_size


def open_regular(path: str) -> BinaryIO:
    """An input file to read; NotRegularFile for a FIFO, socket or device, which might never answer.

    Looked at after opening, so that a name that is swapped meanwhile changes nothing.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise NotRegularFile(f"{path} is a socket or a device, not a regular file") from error
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise NotRegularFile(f"{path} is {'a FIFO' if stat.S_ISFIFO(mode) else 'a device'}, not a regular file")


def file_size(path: Path) -> int:
    """Bytes of a regular file; FileNotFoundError when there is none, or a folder."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(f"{path} is not a file")
    return status.st_size


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _link(temp: Path, target: Path) -> None:
    try:
        os.link(temp, target)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno in (1, 95):  # EPERM, ENOTSUP: exFAT, some FUSE mounts
            raise UnsupportedStore(
                f"{target.parent} has no hard links ({error}): use another disk"
            ) from error
        raise
