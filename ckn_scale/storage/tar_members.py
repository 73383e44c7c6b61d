"""Images inside plain tar files (WebDataset shards), by range: headers are scanned, payloads skipped."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from ckn_scale.errors import ImageRejected, InputError
from ckn_scale.storage.filesystems import is_local_url
from ckn_scale.storage.image_refs import IMAGE_EXTENSIONS, BrokenContainer, ImageRef, extension
from ckn_scale.storage.input_files import InputFile, stat_input
from ckn_scale.storage.retries import RetryPolicy, call_with_retries

HEADER_BYTES = 512
_LOCAL_BLOCK_BYTES = 1 << 15
_REMOTE_BLOCK_BYTES = 1 << 22  # a request costs as long as a few megabytes
_INDEXES_KEPT = 64
_indexes: OrderedDict[str, dict[str, tuple[int, int]]] = OrderedDict()  # file → member → (start, length)
_lock = threading.Lock()  # held while a tar is scanned: the threads beside want the same one


def list_members(file: InputFile, keep: Sequence[str] = ()) -> Iterator[ImageRef]:
    """The images of a tar; kept columns come from the .json (and .txt) of the same WebDataset key."""
    missing = set(keep)
    for key_members in _group_by_key(file):
        columns: dict[str, Any] = {}
        for member, reader in key_members:
            if keep and extension(member.name) in ("json", "txt"):
                columns |= _read_columns(reader, member)
        missing -= columns.keys()
        kept = {name: columns.get(name) for name in keep} or None
        for member, _ in key_members:
            if extension(member.name) in IMAGE_EXTENSIONS:
                yield _to_ref(file, member, kept)
    if missing:
        raise InputError(f"no .json in {file.url} has a column {', '.join(sorted(missing))}")


def read_member(file: InputFile, name: str, etag: str = "") -> bytes:
    """The bytes of a member: by the range in its etag while the tar has it there, else by a scan."""
    listed = _span_of(etag)
    if listed is not None and (data := _read_span(file, name, listed)) is not None:
        return data
    for scan in (_index, _scan_again):
        span = scan(file).get(name)
        if span is not None and (data := _read_span(file, name, span)) is not None:
            return data
    raise ImageRejected("missing", f"{file.url} has no member {name}")


def _read_span(file: InputFile, name: str, span: tuple[int, int]) -> bytes | None:
    """The payload at (start, length), the header before it checked; None when another member is there."""
    start, length = span
    data = file.read_range(start - HEADER_BYTES, HEADER_BYTES + length)
    return data[HEADER_BYTES:] if _is_member(data, name, length) else None


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
        file = _with_size(file)
    reader = _BlockReader(file, file.size_bytes)
    try:
        with tarfile.open(fileobj=reader, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # the archive would keep them all
                if member.isreg():
                    yield member, reader
    except tarfile.TarError as error:
        raise BrokenContainer(f"{file.url} is not a whole tar file: {error}") from error


def _with_size(file: InputFile) -> InputFile:
    entry = stat_input(file.url)
    if entry is None:
        raise FileNotFoundError(file.url)
    return entry


def _group_by_key(file: InputFile) -> Iterator[list[tuple[tarfile.TarInfo, _BlockReader]]]:
    """Neighbouring members that share their name up to the first dot, as WebDataset has it."""
    for _, members in groupby(_scan(file), key=lambda item: _key(item[0].name)):
        yield list(members)


def _key(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}{base.partition('.')[0]}"


def _to_ref(file: InputFile, member: tarfile.TarInfo, columns: dict[str, Any] | None) -> ImageRef:
    etag = f"{member.offset_data}+{member.size}@{file.etag}"
    return ImageRef(f"{file.url}#{member.name}", member.size, etag, columns)


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
    # A long name stands in an extra header before this one, which has its beginning; others are ASCII.
    same = header.name == name or (len(name) > len(header.name) > 80 and name.startswith(header.name))
    return header.size == length and (same or not name.isascii())


def _index(file: InputFile) -> dict[str, tuple[int, int]]:
    """Where each member is, from one scan per process; the indexes used last are kept."""
    with _lock:
        if file.url in _indexes:
            _indexes.move_to_end(file.url)
            return _indexes[file.url]
        _indexes[file.url] = {member.name: (member.offset_data, member.size) for member, _ in _scan(file)}
        while len(_indexes) > _INDEXES_KEPT:
            _indexes.popitem(last=False)
        return _indexes[file.url]


def _scan_again(file: InputFile) -> dict[str, tuple[int, int]]:
    """For a tar that was replaced since it was scanned."""
    with _lock:
        _indexes.pop(file.url, None)
    return _index(file)


def _read_columns(reader: _BlockReader, member: tarfile.TarInfo) -> dict[str, Any]:
    reader.seek(member.offset_data)
    text = reader.read(member.size).decode("utf-8", errors="replace")
    if extension(member.name) == "txt":
        return {"txt": text.strip()}
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
