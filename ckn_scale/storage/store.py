"""A folder on a local disk or an object store, and the one primitive of a run: create-if-absent.

Nothing is ever overwritten. A create has three outcomes, decided by reading back: it holds my
bytes (I won, even if the reply was lost), it holds another's (I lost), there is none (try again).
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from ckn_scale.errors import InputError, UnsupportedStore
from ckn_scale.storage import local_files
from ckn_scale.storage.filesystems import is_local_url, normalise_url, open_filesystem, split_protocol
from ckn_scale.storage.retries import (
    RetryPolicy,
    call_with_retries,
    explain,
    is_refused,
    is_transient,
    wait_or_give_up,
)

SELF_TEST_FOLDER = "self-test"
_SELF_TEST_WRITERS = 2
P = ParamSpec("P")
Result = TypeVar("Result")


def _retried(method: Callable[Concatenate[Store, P], Result]) -> Callable[Concatenate[Store, P], Result]:
    """The method, tried again after transient errors; its first argument is the path that errors name."""

    @functools.wraps(method)
    def call(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        where = self.address(str(args[0])) if args else self.url
        return call_with_retries(lambda: method(self, *args, **kwargs), self.retry, where)

    return call


class Store:
    """Files below `url`, named by relative paths with '/'. Cheap to make, picklable, safe in threads."""

    def __init__(self, url: str | Path, *, retry: RetryPolicy | None = None) -> None:
        self.url = normalise_url(str(url))
        self.is_local = is_local_url(self.url)
        if self.url.startswith("file://"):
            raise InputError(f"the name of {self.url} is not UTF-8, so no record can hold it: rename it")
        self.retry = retry or RetryPolicy()
        self._root = split_protocol(self.url)[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (type(self), self.url, self.retry))

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    @property
    def fs(self) -> Any:
        """The fsspec filesystem of this process; never kept, so that a fork or spawn opens its own."""
        return open_filesystem(self.url)

    @_retried
    def read(self, path: str) -> bytes:
        """All bytes; FileNotFoundError when there is no such file."""
        if not self.is_local:
            return bytes(self.fs.cat_file(self._key(path)))
        with open(self.address(path), "rb") as file:
            return file.read()

    @_retried
    def read_range(self, path: str, start: int, length: int) -> bytes:
        """`length` bytes from `start`; fewer at the end of the file."""
        if not self.is_local:
            return bytes(self.fs.cat_file(self._key(path), start=start, end=start + length))
        with open(self.address(path), "rb") as file:
            file.seek(start)
            return file.read(length)

    def write_new(self, path: str, data: bytes) -> None:
        """Write a file under a name nobody else uses; durable on return. FileExistsError if others did."""
        if not self._create(path, data, trust_reply=True):
            raise FileExistsError(f"{self.address(path)} exists already with other bytes")

    def create(self, path: str, data: bytes) -> bool:
        """Create-if-absent: True if `path` now holds exactly `data`, False if it holds others."""
        return self._create(path, data, trust_reply=False)

    @_retried
    def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        """Relative paths of the files in the folder `prefix`, sorted; empty when there is none."""
        if self.is_local:
            names = local_files.walk_names(Path(self.url, _checked(prefix)), recursive=recursive)
            return sorted(f"{prefix}/{name}" if prefix else name for name in names)
        start = len(self._root) + 1
        return sorted(
            name.lstrip("/")[start:]
            for name, kind in self._list_entries(prefix, recursive)
            if kind == "file" and not name.endswith("/")
        )

    @_retried
    def list_folders(self, prefix: str = "") -> Sequence[str]:
        """Names of the folders in the folder `prefix`, sorted; nothing below them is listed."""
        if self.is_local:
            return sorted(local_files.folder_names(Path(self.url, _checked(prefix))))
        entries = self._list_entries(prefix, recursive=False)
        return sorted(name.rstrip("/").rpartition("/")[2] for name, kind in entries if kind == "directory")

    @_retried
    def list_sizes(self, prefix: str = "") -> dict[str, int]:
        """Bytes of every file in the folder `prefix` and below, by relative path."""
        if self.is_local:
            sizes = local_files.walk_sizes(Path(self.url, _checked(prefix)))
            return {f"{prefix}/{name}" if prefix else name: size for name, size in sizes}
        self.fs.invalidate_cache()
        try:
            found = self.fs.find(self._key(prefix), detail=True)
        except FileNotFoundError:
            return {}
        start = len(self._root) + 1
        return {name.lstrip("/")[start:]: int(entry["size"]) for name, entry in found.items()}

    def list_temps(self) -> Sequence[str]:
        """What writes that were killed have left; an object store has no such files."""
        if not self.is_local:
            return []
        root = Path(self.url)
        return sorted(file.relative_to(root).as_posix() for file in local_files.walk_temps(root))

    def exists(self, path: str) -> bool:
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    @_retried
    def size(self, path: str) -> int:
        """Bytes of a file; FileNotFoundError when there is none."""
        if self.is_local:
            return local_files.file_size(Path(self.address(path)))
        entry = self.fs.info(self._key(path))
        if entry["type"] != "file":
            raise FileNotFoundError(self.address(path))
        return int(entry["size"])

    @_retried
    def modified_at(self, path: str) -> float:
        """Seconds since 1970 by the store's clock; FileNotFoundError when there is no such file."""
        if self.is_local:
            return Path(self.address(path)).stat().st_mtime
        return float(self.fs.modified(self._key(path)).timestamp())

    @_retried
    def delete(self, path: str) -> None:
        """Remove a file; none there is fine, so that a repeated delete is."""
        with contextlib.suppress(FileNotFoundError):
            if self.is_local:
                Path(self.address(path)).unlink()
            else:
                self.fs.rm_file(self._key(path))

    def local_path(self, path: str) -> Path | None:
        """The file on this machine's disk, for memory-mapping; None on an object store."""
        return Path(self.address(path)) if self.is_local else None

    def address(self, path: str) -> str:
        """The URL of a relative path, as messages name it."""
        return f"{self.url}/{_checked(path)}" if path else self.url

    def self_test(self) -> None:
        """UnsupportedStore unless exactly one of several creates of one name wins, for all to see."""
        if split_protocol(self.url)[0] == "memory":
            raise UnsupportedStore(f"{self.url} lives in one process: use a local folder or an object store")
        path = f"{SELF_TEST_FOLDER}/{uuid.uuid4().hex}"
        try:
            self._race_on(path)
        finally:
            self.delete(path)

    def _race_on(self, path: str) -> None:
        bodies = [f"{path} writer {i}".encode() for i in range(_SELF_TEST_WRITERS)]
        with ThreadPoolExecutor(_SELF_TEST_WRITERS) as pool:
            won = list(pool.map(lambda body: self.create(path, body), bodies))
        late = self.create(path, b"late")
        if sum(won) != 1 or late or self.read(path) != bodies[won.index(True)]:
            raise UnsupportedStore(
                f"{self.url} lets a second create of the same file succeed: a run would lose data"
            )
        if path not in self.list(SELF_TEST_FOLDER):
            raise UnsupportedStore(
                f"{self.url} does not list a file that was just written: a run would miss data"
            )

    def _create(self, path: str, data: bytes, *, trust_reply: bool) -> bool:
        delays_s = self.retry.delays_s()
        while True:
            error = self._create_once(path, data)
            if error is None and trust_reply:
                return True
            with contextlib.suppress(FileNotFoundError):
                return self._is_durably(path, data)
            self._check_retryable(error, path)
            wait_or_give_up(
                delays_s, error or OSError("the file is not there after its create"), self.address(path)
            )

    def _is_durably(self, path: str, data: bytes) -> bool:
        """Whether `path` holds `data`; an entry whose writer was cut off before its fsync is made durable."""
        if self.read(path) != data:
            return False
        if self.is_local:
            local_files.sync_folder(Path(self.address(path)).parent)
        return True

    def _create_once(self, path: str, data: bytes) -> Exception | None:
        """One try. What it raised is returned, because it decides nothing by itself."""
        try:
            if self.is_local:
                local_files.create_file(Path(self.address(path)), data)
            else:
                self.fs.pipe_file(self._key(path), data, mode="create")
        except UnsupportedStore:
            raise
        except Exception as error:
            if is_refused(error):
                raise explain(error, self.address(path)) from error
            return error
        return None

    def _check_retryable(self, error: Exception | None, path: str) -> None:
        """Nothing is there after the create: raise what will not pass by itself."""
        if error is None or isinstance(error, FileExistsError) or is_transient(error):
            return
        if isinstance(error, FileNotFoundError) and not self.is_local:
            raise InputError(f"{self.url} does not exist: create the bucket first") from error
        if isinstance(error, FileNotFoundError):
            raise InputError(f"{self.address(path)} cannot be made there: name another folder") from error
        raise explain(error, self.address(path)) from error

    def _list_entries(self, prefix: str, recursive: bool) -> Sequence[tuple[str, str]]:
        """(name, kind) of what an object store has in a folder."""
        folder = self._key(prefix)
        self.fs.invalidate_cache()
        try:
            if recursive:
                return [(name, entry["type"]) for name, entry in self.fs.find(folder, detail=True).items()]
            return [(entry["name"], entry["type"]) for entry in self.fs.ls(folder, detail=True)]
        except FileNotFoundError:
            return []

    def _key(self, path: str) -> str:
        """The name that the filesystem knows, without the protocol."""
        return f"{self._root}/{_checked(path)}".rstrip("/")


def _reopen(cls: type[Store], url: str, retry: RetryPolicy) -> Store:
    return cls(url, retry=retry)


def _checked(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"a path inside the store must be relative and without '..', got {path!r}")
    return path
