"""Arrays kept on disk under the hash of what they were made from; bounded, oldest use leaves first."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

import ckn_scale
from ckn_scale.core.numerics import find_arithmetic
from ckn_scale.errors import InputError
from ckn_scale.search.cache import default_cache_folder

DEFAULT_LIMIT_BYTES = 16 * 2**30
TRIM_TO = 0.8  # of the limit, so that not every save has to trim


class ContentCache:
    """`load(key)` and `save(key, arrays)`; a damaged file counts as absent."""

    def __init__(self, folder: Path | None = None, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.folder = folder or default_cache_folder() / "evaluate"
        self.limit_bytes = limit_bytes
        self._size_bytes: int | None = None

    def load(self, key: str) -> dict[str, np.ndarray] | None:
        """The arrays saved under `key`; none when there are none or the file is damaged."""
        path = self._path(key)
        try:
            arrays = load_file(path)
            os.utime(path)  # the time of last use
        except (OSError, SafetensorError):
            return None
        return arrays

    def has(self, key: str) -> bool:
        return self._path(key).is_file()

    def save(self, key: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the arrays whole or not at all; InputError when the folder cannot be written."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=".part-")
        except OSError as error:
            raise InputError(f"the cache folder {self.folder} cannot be written: {error.strerror}") from None
        os.close(descriptor)
        try:
            save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, part)
            Path(part).replace(path)
        finally:
            Path(part).unlink(missing_ok=True)
        self._grow(path.stat().st_size)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"

    def _grow(self, size_bytes: int) -> None:
        if self._size_bytes is None:
            self._size_bytes = sum(size for _, size, _ in self._files())
        else:
            self._size_bytes += size_bytes
        if self._size_bytes > self.limit_bytes:
            self._trim()

    def _trim(self) -> None:
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= TRIM_TO * self.limit_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size
        self._size_bytes = total

    def _files(self) -> list[tuple[float, int, Path]]:
        found = []
        for path in self.folder.glob("*/*.safetensors"):
            try:
                status = path.stat()
            except FileNotFoundError:  # another process trimmed it
                continue
            found.append((status.st_mtime, status.st_size, path))
        return found


def make_key(*facts: Any) -> str:
    """A hash of bytes, arrays, dataclasses and plain values, in this order."""
    digest = hashlib.sha256()
    for fact in facts:
        digest.update(_to_bytes(fact))
        digest.update(b"\0")
    return digest.hexdigest()


def _to_bytes(fact: Any) -> bytes:
    if isinstance(fact, bytes):
        return hashlib.sha256(fact).digest()
    if isinstance(fact, np.ndarray):
        content = hashlib.sha256(np.ascontiguousarray(fact).data).hexdigest()
        return f"{fact.dtype.str}{fact.shape}{content}".encode()
    if is_dataclass(fact) and not isinstance(fact, type):
        fact = {type(fact).__name__: asdict(fact)}
    return json.dumps(fact, sort_keys=True).encode()


@cache
def hash_code() -> str:
    """All code of core, and the arithmetic it runs with: after a change of either nothing cached is used.

    All of it, because a list of the files that matter is right only until somebody adds an import.
    """
    digest = hash_folder(Path(ckn_scale.__file__).parent / "core")
    return make_key(digest, str(find_arithmetic("cpu")))


def hash_folder(folder: Path) -> str:
    """Names and contents of the Python files below a folder."""
    files = sorted(folder.rglob("*.py"))
    return make_key(*(part for path in files for part in (str(path.relative_to(folder)), path.read_bytes())))
