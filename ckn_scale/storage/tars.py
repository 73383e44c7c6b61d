"""Images in plain tar files: which there are, and the bytes of one by its range.

An image is `shard.tar#member`, its etag the range of its bytes in the tar: reading it is one request,
and checks that the header before the range is still the member's. Else the tar is scanned.

Headers are read by our own loop (`scan_members`): whatever the bytes say, every step goes forward and
stays inside the file. The standard library's follows a negative size backwards, for good. ustar, GNU (long
names, base-256 sizes, sparse files) and pax (path and size) are understood.
"""

from __future__ import annotations

import json
import tarfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ckn_scale.errors import ImageRejected, InputError
from ckn_scale.storage.filesystems import is_local_url
from ckn_scale.storage.image_refs import IMAGE_EXTENSIONS, BrokenContainer, ImageRef, extension
from ckn_scale.storage.input_files import InputFile, is_hidden, stat_input
from ckn_scale.storage.retries import RetryPolicy, call_with_retries

HEADER_BYTES = 512
_EXTENDED_BYTES = 1 << 20  # of a long name or a pax header; real ones have hundreds
_LONG_NAME, _LONG_LINK, _PAX_GLOBAL = b"L", b"K", b"g"
_PAX = (b"x", b"X")
_SPARSE = b"S"
_SPARSE_GOES_ON = (482, 504)  # where the first header, and each further one, says that one follows
_NO_PAYLOAD = set(tarfile.SUPPORTED_TYPES) - set(tarfile.REGULAR_TYPES)  # folders, links, devices

ReadAt = Callable[[int, int], bytes]  # start, length → bytes, fewer only at the end of the file

_LOCAL_BLOCK_BYTES = 1 << 15
_REMOTE_BLOCK_BYTES = 1 << 22  # a request costs as long as a few megabytes
_COLUMN_BYTES = 16 << 20  # of a .json or .txt with kept columns
_INDEXES_KEPT = 64
_indexes: OrderedDict[str, dict[str, TarMember]] = OrderedDict()  # file → name → member
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
    """The bytes of a member: by the range in its etag while the tar has it there, else by a scan.

    ImageRejected when there is no such member, or it is a sparse file; BrokenContainer for a torn tar.
    """
    listed = _span_of(etag)
    if listed is not None and (data := _read_span(file, name, listed)) is not None:
        return data
    for scan in (_index, _scan_again):
        member = scan(file).get(name)
        if member is not None and member.is_sparse:
            raise ImageRejected("unsupported", f"{file.url} holds {name} as a sparse file: pack it without")
        if member is not None and (data := _read_span(file, name, member.span)) is not None:
            return data
    if member is None:
        raise ImageRejected("missing", f"{file.url} has no member {name}")
    return file.read_range(*member.span)  # its size is in a pax header: the one before it has another


def _scan(file: InputFile) -> Iterator[tuple[TarMember, _BlockReader]]:
    """Every regular member, and the reader to get its bytes from."""
    if file.size_bytes < 0:
        found = stat_input(file.url)
        if found is None:
            raise FileNotFoundError(file.url)
        file = found
    reader = _BlockReader(file)
    try:
        for member in scan_members(reader.read_at, file.size_bytes):
            yield replace(member, name=_in_utf8(member.name)), reader
    except BrokenTar as error:
        raise BrokenContainer(f"{file.url} is not a whole tar file: {error}") from error


def _group_by_key(file: InputFile) -> Iterator[list[tuple[TarMember, _BlockReader]]]:
    """Neighbouring members that share their name up to the first dot, as WebDataset has it."""
    shown = (item for item in _scan(file) if not is_hidden(item[0].name))  # macOS packs a ._x beside each x
    for _, members in groupby(shown, key=lambda item: _key(item[0].name)):
        yield list(members)


def _key(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}{base.partition('.')[0]}"


def _to_ref(file: InputFile, member: TarMember, columns: dict[str, Any] | None) -> ImageRef:
    uri = f"{file.url}#{member.name}"
    if member.is_sparse:
        return ImageRef(uri, etag=f"sparse@{file.etag}", columns=columns)
    return ImageRef(uri, member.size, f"{member.start}+{member.size}@{file.etag}", columns)


def _read_columns(reader: _BlockReader, member: TarMember) -> dict[str, Any]:
    if member.size > _COLUMN_BYTES:
        raise InputError(
            f"{reader.file.url}#{member.name} has {member.size} bytes: too many to keep columns of"
        )
    text = reader.read_at(*member.span).decode("utf-8", errors="replace")
    if extension(member.name) == "txt":
        return {"txt": text.strip()}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_span(file: InputFile, name: str, span: tuple[int, int]) -> bytes | None:
    """The payload at (start, length), the header before it checked; None when another member is there."""
    start, length = span
    data = file.read_range(start - HEADER_BYTES, HEADER_BYTES + length)
    return data[HEADER_BYTES:] if _is_member(data, name, length) else None


def _span_of(etag: str) -> tuple[int, int] | None:
    start, plus, length = etag.partition("@")[0].partition("+")
    return (int(start), int(length)) if plus and start.isdigit() and length.isdigit() else None


def _is_member(data: bytes, name: str, length: int) -> bool:
    """Whether `data` is a header and the whole payload of the member that was listed."""
    if len(data) != HEADER_BYTES + length:
        return False
    header = parse_name_and_size(data[:HEADER_BYTES])
    if header is None:
        return False
    found = _in_utf8(header[0])
    # A long name is in an extra header before this one, which has its beginning; others are ASCII.
    same = found == name or (len(name) > len(found) > 80 and name.startswith(found))
    return header[1] == length and (same or not name.isascii())


def _in_utf8(name: str) -> str:
    """A name whose bytes are no UTF-8 with those bytes escaped: the plan holds text."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _index(file: InputFile) -> dict[str, TarMember]:
    """Where each member is, from one scan per process; the indexes used last are kept."""
    with _lock:
        if file.url in _indexes:
            _indexes.move_to_end(file.url)
            return _indexes[file.url]
        _indexes[file.url] = {member.name: member for member, _ in _scan(file)}
        while len(_indexes) > _INDEXES_KEPT:
            _indexes.popitem(last=False)
        return _indexes[file.url]


def _scan_again(file: InputFile) -> dict[str, TarMember]:
    """For a tar that was replaced since it was scanned."""
    with _lock:
        _indexes.pop(file.url, None)
    return _index(file)


class _BlockReader:
    """Fetches a file in blocks: neighbouring headers of small members come in one request."""

    def __init__(self, file: InputFile) -> None:
        self.file = file
        self.block_bytes = _LOCAL_BLOCK_BYTES if is_local_url(file.url) else _REMOTE_BLOCK_BYTES
        self._start, self._block = 0, b""

    def read_at(self, start: int, length: int) -> bytes:
        """Fewer bytes at the end of the file."""
        end = min(start + length, self.file.size_bytes)
        if end <= start:
            return b""
        if not (self._start <= start and end <= self._start + len(self._block)):
            self._fetch(start, max(self.block_bytes, end - start))
        return self._block[start - self._start : end - self._start]

    def _fetch(self, start: int, length: int) -> None:
        length = min(length, self.file.size_bytes - start)
        call = lambda: self.file.read_range(start, length)  # noqa: E731
        self._start, self._block = start, call_with_retries(call, RetryPolicy(), self.file.url)


class BrokenTar(ValueError):
    """Where and how the headers do not add up; never with bytes of the file."""


@dataclass(frozen=True, slots=True)
class TarMember:
    """A regular file. The payload of a sparse one has other bytes than the file."""

    name: str
    start: int
    size: int
    is_sparse: bool = False

    @property
    def span(self) -> tuple[int, int]:
        return self.start, self.size


def scan_members(read_at: ReadAt, total_bytes: int) -> Iterator[TarMember]:
    """Every regular file of a tar of `total_bytes`, in its order; BrokenTar where it stops making sense."""
    if total_bytes == 0:
        raise BrokenTar("it has no bytes")
    position, for_all, for_next = 0, dict[str, str](), dict[str, str]()
    while position < total_bytes:
        header = _parse_header(read_at(position, HEADER_BYTES), position)
        if header is None:
            return
        start = position + HEADER_BYTES
        if header.type in (_LONG_NAME, _LONG_LINK, _PAX_GLOBAL, *_PAX):
            end = _end_of(start, header.size, total_bytes, position)
            fields = _read_fields(header, read_at, start)
            (for_all if header.type == _PAX_GLOBAL else for_next).update(fields)
        else:
            fields = {**for_all, **for_next}
            for_next = {}
            if header.type == _SPARSE:
                start = _skip_sparse_maps(read_at, position, total_bytes)
            size = 0 if header.type in _NO_PAYLOAD else _size_of(header, fields, position)
            end = _end_of(start, size, total_bytes, position)
            if header.isreg():
                is_sparse = header.type == _SPARSE or any(name.startswith("GNU.sparse.") for name in fields)
                name = fields.get("GNU.sparse.name") or fields.get("path") or header.name
                yield TarMember(name, start, size, is_sparse)
        position = end


def parse_name_and_size(block: bytes) -> tuple[str, int] | None:
    """What one header says by itself; None when the block is not a header."""
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    return header.name, header.size


def _parse_header(block: bytes, position: int) -> tarfile.TarInfo | None:
    """None for the block of zeros that ends a tar."""
    if block == bytes(HEADER_BYTES):
        return None
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise BrokenTar(f"no header at byte {position} ({error})") from error


def _end_of(start: int, size: int, total_bytes: int, position: int) -> int:
    """Where the next header is: behind a payload that is there, with what fills its last block."""
    if size < 0:
        raise BrokenTar(f"the header at byte {position} has the size {size}")
    end = start + size + -size % HEADER_BYTES
    if end > total_bytes:
        raise BrokenTar(f"the header at byte {position} has the size {size}, the file ends before")
    return end


def _size_of(header: tarfile.TarInfo, fields: dict[str, str], position: int) -> int:
    """A pax size replaces the header's, which has room for 8 GB."""
    text = fields.get("size")
    if text is None:
        return header.size
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise BrokenTar(f"the member at byte {position} has a pax size that is no number")
    return int(text)


def _read_fields(header: tarfile.TarInfo, read_at: ReadAt, start: int) -> dict[str, str]:
    """What an extended header says of the member behind it."""
    if header.size > _EXTENDED_BYTES:
        raise BrokenTar(f"the extended header at byte {start} has {header.size} bytes")
    payload = read_at(start, header.size)
    if header.type == _LONG_LINK:
        return {}
    if header.type == _LONG_NAME:
        return {"path": payload.partition(b"\0")[0].decode("utf-8", "surrogateescape")}
    return _parse_pax(payload, start)


def _parse_pax(payload: bytes, start: int) -> dict[str, str]:
    """Records of the form `27 path=some/where.jpg\\n`; the number counts the whole record."""
    fields: dict[str, str] = {}
    position = 0
    while position < len(payload) and payload[position] != 0:
        digits = payload[position : position + 20].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        record = payload[position : position + length]
        key, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if not equals or len(record) < length or not record.endswith(b"\n"):
            raise BrokenTar(f"the pax header at byte {start} has a record that is not whole")
        fields[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        position += length
    return fields


def _skip_sparse_maps(read_at: ReadAt, position: int, total_bytes: int) -> int:
    """Where the payload of an old GNU sparse member starts: behind further blocks of its map."""
    flag, further = _SPARSE_GOES_ON
    goes_on = read_at(position, HEADER_BYTES)[flag] != 0
    while goes_on:
        position += HEADER_BYTES
        if position + HEADER_BYTES > total_bytes:
            raise BrokenTar(f"the map of a sparse member ends behind the file, at byte {position}")
        goes_on = read_at(position, HEADER_BYTES)[further] != 0
    return position + HEADER_BYTES
