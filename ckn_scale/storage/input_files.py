"""Files that a user names: one by its URL, those below a folder, those that match a glob.

A listing of a disk or a store never yields:

* names that begin with a dot, files and folders: thumbnails, trash, the shadow files of other systems;
* run folders, whose tables hold thumbnails and patches that are no images of the user;
* what is not a regular file: a FIFO or a device would be waited for (`InputFile.is_special`).

That applies below the folder that was named. What a user or a list names itself is taken.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsspec.utils import glob_translate

from ckn_scale.errors import InputError
from ckn_scale.storage.filesystems import (
    is_local_url,
    local_url,
    normalise_url,
    open_filesystem,
    split_protocol,
)
from ckn_scale.storage.image_refs import ImageRef, extension
from ckn_scale.storage.local_files import open_regular
from ckn_scale.storage.retries import RetryPolicy, call_with_retries
from ckn_scale.storage.run_folder import holds_run

_FOLDERS_KNOWN = 100_000  # a few megabytes of names
_GLOB = re.compile(r"[*?\[]")
_LIST_RETRY = RetryPolicy()


@dataclass(frozen=True)
class InputFile:
    """A file by its URL; size and etag where the listing has them."""

    url: str
    size_bytes: int = -1
    etag: str = ""
    is_folder: bool = False
    is_special: bool = False  # a FIFO, a socket, a device

    @property
    def path(self) -> str:
        """The file on this machine's disk."""
        return split_protocol(self.url)[1]

    def to_ref(self) -> ImageRef:
        return ImageRef(self.url, self.size_bytes, self.etag)

    def read(self) -> bytes:
        if is_local_url(self.url):
            with open_regular(self.path) as file:
                return file.read()
        return bytes(open_filesystem(self.url).cat_file(self.url))

    def read_range(self, start: int, length: int) -> bytes:
        """Fewer bytes at the end of the file."""
        if not is_local_url(self.url):
            return bytes(open_filesystem(self.url).cat_file(self.url, start=start, end=start + length))
        with open_regular(self.path) as file:
            file.seek(start)
            return file.read(length)

    def open(self) -> Any:
        """A binary file to seek in; ranges are fetched as they are asked for."""
        if is_local_url(self.url):
            return open_regular(self.path)
        return open_filesystem(self.url).open(self.url, "rb", cache_type="readahead", block_size=1 << 20)


def is_glob(source: str) -> bool:
    """Whether the text has glob signs, and is neither a web address nor the name of a local file."""
    if source.startswith(("http://", "https://")):
        return False
    return bool(_GLOB.search(source)) and not (is_local_url(source) and os.path.exists(_local_path(source)))


def stat_input(url: str) -> InputFile | None:
    """What is at `url`; None when nothing is. InputError when the store refuses us."""
    url = normalise_url(url)
    if is_local_url(url):
        return _stat_local(_local_path(url))
    try:
        entry = call_with_retries(lambda: open_filesystem(url).info(url), _LIST_RETRY, url)
    except FileNotFoundError:
        return None
    return _from_entry(url, entry)


def read_input(url: str) -> bytes:
    """The whole of a file that a user names; InputError when there is none."""
    found = stat_input(url)
    if found is None or found.is_folder:
        raise InputError(f"no such file: {url}")
    return found.read()


def find_files(folder_url: str) -> Iterator[InputFile]:
    """Every file below a folder that a listing may yield, in no order, page by page; InputError for a run."""
    check_no_run(folder_url)
    protocol, path = split_protocol(folder_url)
    if protocol == "file":
        return _walk_local(path)
    runs = RunFolders(folder_url)
    return (
        file
        for file in _walk_store(folder_url)
        if not is_hidden(file.url[len(folder_url) :]) and not runs.hold_file(file.url)
    )


def expand_glob(pattern: str) -> Iterator[InputFile]:
    """The files that match, those below a folder that matches included; InputError when none does."""
    found = False
    for file in _glob_local(pattern) if is_local_url(pattern) else _glob_store(pattern):
        found = True
        yield file
    if not found:
        raise InputError(f"no file matches {pattern}")


def is_hidden(path: str) -> bool:
    """Whether a relative path has a name that begins with a dot; `.` and `..` are none."""
    return any(part.startswith(".") and part not in (".", "..") for part in path.split("/"))


def check_no_run(folder: str) -> None:
    """InputError for a run folder that was given for one of images."""
    if holds_run(folder):
        raise InputError(f"{folder} is a run folder, not one of images: name the folder that has the images")


class RunFolders:
    """Which folders below `root` are runs or lie in one; remembered, as neighbours share them."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._is_local = is_local_url(root)
        self._known: dict[str, bool] = {}

    def hold_folder(self, folder: str) -> bool:
        if len(folder) <= len(self.root):
            return False
        if folder not in self._known:
            if len(self._known) >= _FOLDERS_KNOWN:
                self._known.clear()
            self._known[folder] = self.hold_folder(folder.rpartition("/")[0]) or holds_run(folder)
        return self._known[folder]

    def hold_file(self, url: str) -> bool:
        # To ask a store about every folder would be as many requests as there are folders. Of what a run
        # writes only tables would be taken for images, so there only their folders are asked about.
        if not self._is_local and extension(url) not in ("parquet", "pq"):
            return False
        return self.hold_folder(url.rpartition("/")[0])


def _glob_local(pattern: str) -> Iterator[InputFile]:
    path_pattern = _local_path(pattern)
    runs = RunFolders(_glob_folder(path_pattern))
    is_recursive = "**" in pattern
    for path in glob.iglob(path_pattern, recursive=True):
        if os.path.isdir(path):
            if not is_recursive and not runs.hold_folder(path):  # ** meets the files in it by itself
                yield from _walk_local(path)
        elif not runs.hold_file(path) and (file := _stat_regular(path)) is not None:
            yield file


def _glob_store(pattern: str) -> Iterator[InputFile]:
    """Compared page by page below the last folder without a glob sign: never the whole listing in memory."""
    url = normalise_url(pattern)
    folder = _glob_folder(url)
    if folder.endswith("/"):
        raise InputError(f"the bucket cannot be a pattern, got {pattern}")
    patterns = [url] if "**" in url else [url, f"{url}/**"]
    matches = re.compile("|".join(map(glob_translate, patterns))).match
    runs, wants_hidden = RunFolders(folder), is_hidden(url[len(folder) :])
    for file in _walk_store(folder):
        if not matches(file.url) or runs.hold_file(file.url):
            continue
        if wants_hidden or not is_hidden(file.url[len(folder) :]):
            yield file


def _glob_folder(pattern: str) -> str:
    """The folder above the first glob sign."""
    return pattern[: _GLOB.search(pattern).start()].rpartition("/")[0]  # type: ignore[union-attr]


def _local_path(url: str) -> str:
    return split_protocol(normalise_url(url))[1]


def _stat_local(path: str) -> InputFile | None:
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    is_folder = stat.S_ISDIR(status.st_mode)
    is_special = not is_folder and not stat.S_ISREG(status.st_mode)
    return InputFile(local_url(path), status.st_size, f"{status.st_mtime_ns:x}", is_folder, is_special)


def _stat_regular(path: str) -> InputFile | None:
    """A regular file; None when it is gone by now, or a FIFO, a socket or a device."""
    file = _stat_local(path)
    return None if file is None or file.is_special else file


def _walk_local(folder: str) -> Iterator[InputFile]:
    """Depth first. Links to folders are followed once: a loop of links ends by its real path."""
    waiting, seen = [folder], set()
    while waiting:
        current = waiting.pop()
        if (real := os.path.realpath(current)) in seen:
            continue
        seen.add(real)
        if current != folder and holds_run(current):
            continue
        try:
            entries = os.scandir(current)
        except PermissionError as error:
            raise InputError(f"{current} cannot be listed: {error.strerror}") from error
        with entries:
            for entry in entries:
                if is_hidden(entry.name):
                    continue
                if entry.is_dir():
                    waiting.append(entry.path)
                elif (file := _stat_regular(entry.path)) is not None:
                    yield file


def _walk_store(folder_url: str) -> Iterator[InputFile]:
    protocol, path = split_protocol(folder_url)
    return _walk_s3(protocol, path) if protocol in ("s3", "s3a") else _walk_any(folder_url, protocol)


def _walk_s3(protocol: str, path: str) -> Iterator[InputFile]:
    """Page by page: s3fs's own find holds every key of the bucket in memory."""
    bucket, _, prefix = path.partition("/")
    prefix = f"{prefix.rstrip('/')}/" if prefix else ""
    filesystem = open_filesystem(f"{protocol}://{path}")
    token: dict[str, str] = {}
    while True:
        page = call_with_retries(
            lambda: filesystem.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, **token),  # noqa: B023
            _LIST_RETRY,
            f"{protocol}://{path}",
        )
        for entry in page.get("Contents", ()):
            if not entry["Key"].endswith("/"):
                etag = entry.get("ETag", "").strip('"')
                yield InputFile(f"{protocol}://{bucket}/{entry['Key']}", int(entry["Size"]), etag)
        if not page.get("IsTruncated"):
            return
        token = {"ContinuationToken": page["NextContinuationToken"]}


def _walk_any(folder_url: str, protocol: str) -> Iterator[InputFile]:
    filesystem = open_filesystem(folder_url)
    for _, _, files in filesystem.walk(folder_url, detail=True):
        for entry in files.values():
            yield _from_entry(f"{protocol}://{entry['name'].lstrip('/')}", entry)


def _from_entry(url: str, entry: dict[str, Any]) -> InputFile:
    etag = ""
    for key in ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created"):
        if entry.get(key):
            etag = str(entry[key]).strip('"')
            break
    size = -1
    with contextlib.suppress(TypeError, ValueError):
        size = int(entry["size"])
    return InputFile(url, size, etag, is_folder=entry["type"] == "directory")
