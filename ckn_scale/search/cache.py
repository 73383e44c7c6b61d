"""Files of a run on this node's disk, named by their sha256 and checked before anyone opens them.

A file is read for its sha256 once per node: what was found is remembered beside its size, inode and times of
change, and a file that has others is read again. That notices whatever was written to it since, also
when its time of modification was set back (the time of the change itself cannot be). It does not notice bytes
that went bad on the disk by themselves: `ckn-scale verify` reads every byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from ckn_scale.errors import CorruptData
from ckn_scale.storage.store import Store
from ckn_scale.storage.stored_files import StoredFile

CACHE_VARIABLE = "CKN_SCALE_CACHE"
CHUNK_BYTES = 32 * 2**20  # of a download
HASHED_BYTES = 2**20
SETTLED_NS = 2 * 10**9  # of the time since a file's last change, before what was found in it is remembered


def default_cache_folder() -> Path:
    """$CKN_SCALE_CACHE, else the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckn_scale"


class FileCache:
    """Local copies of immutable files, shared by all processes of a node."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_cache_folder()

    def fetch(self, store: Store, file: StoredFile) -> Path:
        """A local path whose bytes have `file.sha256`; CorruptData when the store holds others.

        A store on this machine's disk is read in place. A copy that went bad is fetched again.
        """
        local = store.local_path(file.path)
        if local is not None:
            self._check(local, file)
            return local
        copy = self.folder / file.sha256[:2] / file.sha256
        try:
            self._check(copy, file)
        except CorruptData:
            self._download(store, file, copy)
        return copy

    def _check(self, path: Path, file: StoredFile) -> None:
        """CorruptData when the file is missing or holds other bytes; read only if it changed since."""
        begun_ns = time.time_ns()
        try:
            state = _read_state(path)
        except FileNotFoundError as error:
            raise CorruptData(f"{file.path} is missing, but the manifest names it") from error
        note = self.folder / "checked" / hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:40]
        if _read_note(note) == {**state, "sha256": file.sha256}:
            return
        _check_file(path, file)
        # A change within the clock's tick would leave the times as they are: such a file is read again.
        if state == _read_state(path) and begun_ns - state["ctime_ns"] > SETTLED_NS:
            _write_note(note, {**state, "sha256": file.sha256})

    def _download(self, store: Store, file: StoredFile, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".part-")
        part = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as sink:
                for start in range(0, file.size_bytes, CHUNK_BYTES):
                    length = min(CHUNK_BYTES, file.size_bytes - start)
                    sink.write(store.read_range(file.path, start, length))
                sink.flush()
                os.fsync(sink.fileno())
            _check_file(part, file)
            # Two processes may fetch the same file: both hold the same bytes, the later rename wins.
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def _check_file(path: Path, file: StoredFile) -> None:
    try:
        found = _hash_file(path)
    except FileNotFoundError as error:
        raise CorruptData(f"{file.path} is missing, but the manifest names it") from error
    if found != file.sha256:
        raise CorruptData(f"{file.path} has sha256 {found[:16]}…, recorded was {file.sha256[:16]}…")


def _read_state(path: Path) -> dict[str, Any]:
    found = path.stat()
    return {
        "size": found.st_size,
        "inode": found.st_ino,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
    }


def _read_note(note: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(note.read_text())
    except (OSError, ValueError):
        return None
    return found


def _write_note(note: Path, body: dict[str, Any]) -> None:
    """All of it or nothing; a folder that cannot be written to costs a check at the next start."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        part = note.with_name(f".{note.name}-{os.getpid()}-{threading.get_ident()}")
        part.write_text(json.dumps(body))
        part.replace(note)
    except OSError:
        return


def _hash_file(path: Path) -> str:
    digest, part = hashlib.sha256(), bytearray(HASHED_BYTES)
    with path.open("rb") as source:
        while count := source.readinto(part):
            digest.update(memoryview(part)[:count])
    return digest.hexdigest()
