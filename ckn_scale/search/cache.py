"""Files of a run on this node's disk, named by their sha256 and checked before anyone opens them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from ckn_scale.errors import CorruptData
from ckn_scale.storage.store import Store
from ckn_scale.storage.stored_files import StoredFile

CACHE_VARIABLE = "CKN_SCALE_CACHE"
CHUNK_BYTES = 32 * 2**20


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
            _check_file(local, file)
            return local
        copy = self.folder / file.sha256[:2] / file.sha256
        if not _is_intact(copy, file):
            self._download(store, file, copy)
        return copy

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


def _is_intact(path: Path, file: StoredFile) -> bool:
    try:
        return path.stat().st_size == file.size_bytes and _hash_file(path) == file.sha256
    except FileNotFoundError:
        return False


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
