"""Images as bytes in Parquet: img2dataset's and LAION's `jpg` column, Hugging Face's {bytes, path} struct."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from ckn_scale.errors import ImageRejected
from ckn_scale.storage.image_lists import check_kept, open_table, raise_if_broken
from ckn_scale.storage.image_refs import ImageRef
from ckn_scale.storage.input_files import InputFile

BYTES_COLUMNS = ("jpg", "jpeg", "png", "webp", "image", "img", "image_bytes", "bytes", "content", "data")
_NOT_RELATIVE = re.compile(r"^[A-Za-z][\w+.-]*:|://|::|[\\\0]")  # a scheme, a drive, a chain of stores
_ROWS_AT_ONCE = 8192
_BYTES_KEPT = 256 << 20  # of decoded row groups; the last one stays whatever its size
_groups: OrderedDict[tuple[str, int], tuple[int, pa.ChunkedArray]] = (
    OrderedDict()
)  # (file, group) → first row, images
_lock = threading.Lock()  # held while a group is read: the threads beside want the same one


def has_image_bytes(file: InputFile) -> bool:
    """Whether the table has a column of image bytes; InputError when it is not Parquet."""
    with file.open() as handle:
        return _image_column(open_table(file, handle).schema_arrow) is not None


def list_rows(file: InputFile, keep: Sequence[str] = ()) -> Iterator[ImageRef]:
    """Every row as `file#00000012`: padded, so that the order of URIs is the order of rows."""
    with file.open() as handle:
        table = open_table(file, handle)
        check_kept(keep, table.schema_arrow.names, file.url)
        if not keep:
            for row in range(table.metadata.num_rows):
                yield ImageRef(_row_uri(file, row), etag=file.etag)
            return
        row = 0
        for batch in table.iter_batches(_ROWS_AT_ONCE, columns=list(keep), use_threads=False):
            for columns in batch.to_pylist():
                yield ImageRef(_row_uri(file, row), etag=file.etag, columns=columns)
                row += 1


def read_row(file: InputFile, member: str) -> bytes:
    """The image in one row; its row group is kept for the rows beside it."""
    if not member.isdigit():
        raise ImageRejected("missing", f"{file.url} has no row {member!r}")
    first, images = _row_group(file, int(member))
    value = images[int(member) - first].as_py()
    if isinstance(value, dict):
        if value.get("bytes") is None and value.get("path"):
            return _read_beside(file, int(member), value["path"])
        value = value.get("bytes")
    if not value:
        raise ImageRejected("empty", f"row {int(member)} of {file.url} has no bytes")
    return bytes(value)


def _read_beside(file: InputFile, row: int, path: str) -> bytes:
    """The file that a row names instead of bytes. Who made the table has no say over files outside of its
    folder, so the path is relative and goes down only; it is not repeated in the reason."""
    parts = path.split("/")
    if path.startswith(("/", "~")) or ".." in parts or _NOT_RELATIVE.search(path):
        raise ImageRejected(
            "unsupported",
            f"row {row} of {file.url} names a file by a path that is not relative to the table's folder: "
            "put it there, or name it in a list",
        )
    return InputFile(f"{file.url.rpartition('/')[0]}/{path}").read()


def _row_group(file: InputFile, row: int) -> tuple[int, pa.ChunkedArray]:
    """(first row, images) of the row group that holds `row`."""
    with _lock:
        for (url, _), (first, images) in _groups.items():
            if url == file.url and first <= row < first + len(images):
                return first, images
        number, first, images = _read_group(file, row)
        _groups[(file.url, number)] = (first, images)
        while len(_groups) > 1 and sum(images.nbytes for _, images in _groups.values()) > _BYTES_KEPT:
            _groups.popitem(last=False)
        return _groups[(file.url, number)]


def _read_group(file: InputFile, row: int) -> tuple[int, int, pa.ChunkedArray]:
    """(number, first row, images) of a row group, from the file."""
    with file.open() as handle:
        table = open_table(file, handle)
        number, first = _find_group(table, row, file.url)
        column = _image_column(table.schema_arrow)
        if column is None:
            raise ImageRejected("missing", f"{file.url} has no column of image bytes")
        try:
            images = table.read_row_group(number, columns=[column], use_threads=False).column(column)
        except (pa.ArrowInvalid, OSError) as error:
            raise_if_broken(file, error)
            raise
    return number, first, images


def _find_group(table: Any, row: int, where: str) -> tuple[int, int]:
    first = 0
    for number in range(table.metadata.num_row_groups):
        rows = table.metadata.row_group(number).num_rows
        if row < first + rows:
            return number, first
        first += rows
    raise ImageRejected("missing", f"{where} has {first} rows, row {row} was asked for")


def _image_column(schema: pa.Schema) -> str | None:
    """The column of images: a {bytes, path} struct, a binary one of a known name, or the only binary one."""
    for field in schema:
        if pa.types.is_struct(field.type) and {"bytes", "path"} <= {child.name for child in field.type}:
            return str(field.name)
    binary = [field.name for field in schema if _is_binary(field.type)]
    for name in BYTES_COLUMNS:
        if name in binary:
            return name
    return binary[0] if len(binary) == 1 else None


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _row_uri(file: InputFile, row: int) -> str:
    return f"{file.url}#{row:08d}"
