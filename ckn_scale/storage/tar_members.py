"""Images inside plain tar files (WebDataset shards), by range: headers are scanned, payloads skipped."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from ckn_scale.errors import ImageRejected, InputError
from ckn_scale.storage.filesystems import is_local_url
from ckn_scale.storage.image_refs import IMAGE_EXTENSIONS, ImageRef, extension
from ckn_scale.storage.input_files import InputFile, stat_input
from ckn_scale.storage.retries import RetryPolicy, call_with_retries

HEADER_BYTES = 512
_LOCAL_BLOCK_BYTES = 1 << 15
_REMOTE_BLOCK_BYTES = 1 << 22  # a request costs as long as a few megabytes
_INDEXES_KEPT = 64
_indexes: OrderedDict[str, dict[str, tuple[int, int]]] = OrderedDict()  # file → member → (start, length)
_lock = threading.Lock()


def list_members(file: InputFile, keep: Sequence[str] = ()) -> Iterator[ImageRef]:
    """The images of a tar; kept columns come from the .json (and .txt) of the same WebDataset key."""
    waiting: list[tuple[str, ImageRef]] = []  # images of the current key
    columns: dict[str, Any] = {}
    key = ""
    for member, source in _scan(file):
        stem = member.name.rpartition(".")[0]
        if stem != key:
            yield from _with_columns(waiting, columns, keep)
            waiting, columns, key = [], {}, stem
        kind = extension(member.name)
        if kind in IMAGE_EXTENSIONS:
            waiting.append((member.name, _to_ref(file, member)))
        elif keep and kind in ("json", "txt"):
            columns |= _read_columns(source, member, kind)
    yield from _with_columns(waiting, columns, keep)


def read_member(file: InputFile, name: str, etag: str = "") -> bytes:
    """The bytes of a member: by the range in its etag if the tar still has it there, else by a scan."""
    if (span := _span_of(etag)) is not None:
        start, length = span
        data = file.read_range(start - HEADER_BYTES, HEADER_BYTES + length)
        if _is_member(data, name, length):
            return data[HEADER_BYTES:]
    if (found := _index(file).get(name)) is None:
        raise ImageRejected("missing", f"{file.url} has no member {name}")
    start, length = found
    data = file.read_range(start, length)
    if len(data) < length:
        raise ImageRejected("truncated", f"{file.url} ends inside {name}")
    return data


class _BlockReader(io.RawIOBase):
    """A file to seek in that fetches blocks: neighbouring headers of small members come in one request."""

    def __init__(self, file: InputFile, size_bytes: int) -> None:
        self.file = file
        self.size_bytes = size_bytes
        self.block_bytes = _LOCAL_BLOCK_BYTES if is_local_url(file.url) else _REMOTE_BLOCK_BYTES
        self.position = 0
        self._start, self._block = 0, b""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size_bytes}[whence]
        self.position = base + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def read(self, length: int = -1) -> bytes:
        end = self.size_bytes if length < 0 else min(self.position + length, self.size_bytes)
        if end <= self.position:
            return b""
        if not (self._start <= self.position and end <= self._start + len(self._block)):
            self._fetch(self.position, max(self.block_bytes, end - self.position))
        data = self._block[self.position - self._start : end - self._start]
        self.position += len(data)
        return data

    def _fetch(self, start: int, length: int) -> None:
        length = min(length, self.size_bytes - start)
        call = lambda: self.file.read_range(start, length)  # noqa: E731
        self._start, self._block = start, call_with_retries(call, RetryPolicy(), self.file.url)


def _scan(file: InputFile) -> Iterator[tuple[tarfile.TarInfo, _BlockReader]]:
    """Every regular member, and the reader to get its bytes from."""
    if file.size_bytes < 0:
        file = stat_input(file.url) or file
    reader = _BlockReader(file, file.size_bytes)
    try:
        with tarfile.open(fileobj=reader, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # the archive would keep them all
                if member.isreg():
                    yield member, reader
    except tarfile.TarError as error:
        raise InputError(f"{file.url} is not a whole tar file: {error}") from error


def _to_ref(file: InputFile, member: tarfile.TarInfo) -> ImageRef:
    etag = f"{member.offset_data}+{member.size}@{file.etag}"
    return ImageRef(f"{file.url}#{member.name}", member.size, etag)


def _span_of(etag: str) -> tuple[int, int] | None:
    start, plus, length = etag.partition("@")[0].partition("+")
    return (int(start), int(length)) if plus and start.isdigit() and length.isdigit() else None


def _is_member(data: bytes, name: str, length: int) -> bool:
    """Whether `data` is a header and the whole payload of the member that was listed."""
    if len(data) != HEADER_BYTES + length:
        return False
    try:
        header = tarfile.TarInfo.frombuf(data[:HEADER_BYTES], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    # Long names stand in an extra header before this one, which has only their beginning.
    return header.size == length and (header.name == name or len(name.encode()) > 100)


def _index(file: InputFile) -> dict[str, tuple[int, int]]:
    """Where each member is, from one scan per process; the indexes used last are kept."""
    with _lock:
        if file.url in _indexes:
            _indexes.move_to_end(file.url)
            return _indexes[file.url]
    index = {member.name: (member.offset_data, member.size) for member, _ in _scan(file)}
    with _lock:
        _indexes[file.url] = index
        while len(_indexes) > _INDEXES_KEPT:
            _indexes.popitem(last=False)
    return index


def _read_columns(source: _BlockReader, member: tarfile.TarInfo, kind: str) -> dict[str, Any]:
    source.seek(member.offset_data)
    text = source.read(member.size).decode("utf-8", errors="replace")
    if kind == "txt":
        return {"txt": text.strip()}
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _with_columns(
    images: list[tuple[str, ImageRef]], columns: dict[str, Any], keep: Sequence[str]
) -> Iterator[ImageRef]:
    kept = {name: columns.get(name) for name in keep} or None
    for _, ref in images:
        yield ImageRef(ref.uri, ref.size_bytes, ref.etag, kept)
