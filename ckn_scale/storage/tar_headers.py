"""The headers of a plain tar, read by our own loop: whatever the bytes say, every step goes forward and
stays inside the file. The standard library's follows a negative size backwards, for good.

ustar, GNU (long names, base-256 sizes, sparse files) and pax (path and size) are understood.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

HEADER_BYTES = 512
_EXTENDED_BYTES = 1 << 20  # of a long name or a pax header; real ones have hundreds
_LONG_NAME, _LONG_LINK, _PAX_GLOBAL = b"L", b"K", b"g"
_PAX = (b"x", b"X")
_SPARSE = b"S"
_SPARSE_GOES_ON = (482, 504)  # where the first header, and each further one, says that one follows
_NO_PAYLOAD = set(tarfile.SUPPORTED_TYPES) - set(tarfile.REGULAR_TYPES)  # folders, links, devices

ReadAt = Callable[[int, int], bytes]  # start, length → bytes, fewer only at the end of the file


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
    """A pax size stands for the header's, which has room for 8 GB."""
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
