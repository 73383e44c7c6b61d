"""Input files on any fsspec store: found without holding a listing in memory, read whole or by range."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsspec.utils import glob_translate

from ckn_scale.errors import InputError
from ckn_scale.storage.filesystems import is_local_url, normalise_url, open_filesystem, split_protocol
from ckn_scale.storage.image_refs import ImageRef
from ckn_scale.storage.retries import RetryPolicy, call_with_retries

_GLOB = re.compile(r"[*?\[]")
_LIST_RETRY = RetryPolicy()


@dataclass(frozen=True)
class InputFile:
    """A file by its URL; size and etag where the listing told them."""

    url: str
    size_bytes: int = -1
    etag: str = ""
    is_folder: bool = False

    def to_ref(self) -> ImageRef:
        return ImageRef(self.url, self.size_bytes, self.etag)

    def read(self) -> bytes:
        if is_local_url(self.url):
            with open(self.url, "rb") as file:
                return file.read()
        return open_filesystem(self.url).cat_file(self.url)

    def read_range(self, start: int, length: int) -> bytes:
        """Fewer bytes at the end of the file."""
        if not is_local_url(self.url):
            return open_filesystem(self.url).cat_file(self.url, start=start, end=start + length)
        with open(self.url, "rb") as file:
            file.seek(start)
            return file.read(length)

    def open(self) -> Any:
        """A binary file to seek in; ranges are fetched as they are asked for."""
        if is_local_url(self.url):
            return open(self.url, "rb")
        return open_filesystem(self.url).open(self.url, "rb", cache_type="readahead", block_size=1 << 20)


def is_glob(source: str) -> bool:
    """Whether the text has glob signs, and is neither a web address nor the name of a local file."""
    if source.startswith(("http://", "https://")):
        return False
    return bool(_GLOB.search(source)) and not (is_local_url(source) and os.path.exists(normalise_url(source)))


def stat_input(url: str) -> InputFile | None:
    """What stands at `url`; None when nothing does. InputError when the store refuses us."""
    url = normalise_url(url)
    if is_local_url(url):
        return _stat_local(url)
    try:
        entry = call_with_retries(lambda: open_filesystem(url).info(url), _LIST_RETRY, url)
    except FileNotFoundError:
        return None
    return _from_entry(url, entry)


def find_files(folder_url: str) -> Iterator[InputFile]:
    """Every file below a folder, in no order, page by page."""
    protocol, path = split_protocol(folder_url)
    if protocol == "file":
        return _walk_local(path)
    if protocol in ("s3", "s3a"):
        return _walk_s3(protocol, path)
    return _walk_store(folder_url, protocol)


def expand_glob(pattern: str) -> Iterator[InputFile]:
    """The files that match, those below a folder that matches included; InputError when none does."""
    found = False
    for file in _glob_local(pattern) if is_local_url(pattern) else _glob_store(pattern):
        found = True
        yield file
    if not found:
        raise InputError(f"no file matches {pattern}")


def _glob_local(pattern: str) -> Iterator[InputFile]:
    is_recursive = "**" in pattern
    for path in glob.iglob(normalise_url(pattern), recursive=True):
        if os.path.isdir(path):
            yield from () if is_recursive else _walk_local(path)  # ** meets the files in it by itself
        elif (file := _stat_local(path)) is not None:
            yield _named_in_utf8(file)


def _glob_store(pattern: str) -> Iterator[InputFile]:
    """Compared page by page below the last folder without a glob sign: never the whole listing in memory."""
    url = normalise_url(pattern)
    folder = url[: _GLOB.search(url).start()].rpartition("/")[0]  # type: ignore[union-attr]
    if folder.endswith("/"):
        raise InputError(f"the bucket cannot be a pattern, got {pattern}")
    patterns = [url] if "**" in url else [url, f"{url}/**"]
    matches = re.compile("|".join(map(glob_translate, patterns))).match
    return (file for file in find_files(folder) if matches(file.url))


def _stat_local(path: str) -> InputFile | None:
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return InputFile(path, status.st_size, f"{status.st_mtime_ns:x}", is_folder=os.path.isdir(path))


def _walk_local(folder: str) -> Iterator[InputFile]:
    """Depth first. Links to folders are followed once: a loop of links ends by its real path."""
    waiting, seen = [folder], set()
    while waiting:
        current = waiting.pop()
        if (real := os.path.realpath(current)) in seen:
            continue
        seen.add(real)
        try:
            entries = os.scandir(current)
        except PermissionError as error:
            raise InputError(f"{current} cannot be listed: {error.strerror}") from error
        with entries:
            for entry in entries:
                if entry.is_dir():
                    waiting.append(entry.path)
                elif (file := _stat_local(entry.path)) is not None:
                    yield _named_in_utf8(file)


def _named_in_utf8(file: InputFile) -> InputFile:
    try:
        file.url.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the name of {file.url!r} is not UTF-8, so nothing can record it: rename it"
        ) from error
    return file


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


def _walk_store(folder_url: str, protocol: str) -> Iterator[InputFile]:
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
