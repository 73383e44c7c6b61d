"""Lists of images: text with one URI per line, CSV or Parquet with a column of them.

A relative path counts from the folder of the list. Everything that is named is kept, whatever its name.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ckn_scale.errors import InputError
from ckn_scale.storage.filesystems import normalise_url
from ckn_scale.storage.image_refs import BrokenContainer, extension
from ckn_scale.storage.input_files import InputFile
from ckn_scale.storage.kept_columns import Cell
from ckn_scale.storage.retries import RetryPolicy, call_with_retries

URI_COLUMNS = (
    *("uri", "url", "path", "image_path", "image_url"),
    *("file", "filename", "file_name", "image", "key"),
)
Row = tuple[str, dict[str, Any] | None]
_ROWS_AT_ONCE = 8192


def read_lines(file: InputFile) -> Iterator[Row]:
    """One URI per line; blank lines and lines that begin with # are passed over."""
    with _open_text(file) as lines:
        for line in _decoded(lines, file):
            if (uri := line.strip()) and not uri.startswith("#"):
                yield resolve(uri, file.url), None


def read_rows(file: InputFile, keep: Sequence[str]) -> Iterator[Row]:
    """The URI column of a CSV, TSV or Parquet list, with the kept columns."""
    is_parquet = extension(file.url) in ("parquet", "pq")
    return _read_parquet(file, keep) if is_parquet else _read_csv(file, keep)


def resolve(uri: str, list_url: str) -> str:
    """The URI as the run names it: absolute for local files."""
    if "://" in uri:
        return normalise_url(uri)
    folder = list_url.rpartition("/")[0]
    return normalise_url(uri if uri.startswith(("/", "~")) else f"{folder}/{uri}")


def check_kept(keep: Sequence[str], names: Sequence[str], where: str) -> None:
    """InputError when a list or table has not all the columns to keep."""
    missing = [name for name in keep if name not in names]
    if missing:
        raise InputError(f"{where} has no column {', '.join(missing)}; it has {', '.join(names)}")


def _read_csv(file: InputFile, keep: Sequence[str]) -> Iterator[Row]:
    with _open_text(file) as lines:
        delimiter = "\t" if extension(file.url) == "tsv" else ","
        rows = csv.DictReader(_decoded(lines, file), delimiter=delimiter)
        names = list(rows.fieldnames or ())
        column = _uri_column(names, file.url)
        check_kept(keep, names, file.url)
        try:
            for row in rows:
                if row[column]:
                    yield resolve(row[column], file.url), {name: _to_cell(row[name]) for name in keep} or None
        except csv.Error as error:
            raise InputError(f"{file.url} is not a CSV list: {error}, at line {rows.line_num}") from error


def _to_cell(text: str | None) -> Cell | None:
    return None if text is None else Cell(text)  # a short row has none


def _read_parquet(file: InputFile, keep: Sequence[str]) -> Iterator[Row]:
    with file.open() as handle:
        table = open_table(file, handle)
        texts = [field.name for field in table.schema_arrow if _is_text(field.type)]
        column = _uri_column(texts, file.url)
        check_kept(keep, table.schema_arrow.names, file.url)
        wanted = list(dict.fromkeys([column, *keep]))
        for batch in table.iter_batches(_ROWS_AT_ONCE, columns=wanted, use_threads=False):
            for row in batch.to_pylist():
                if row[column]:
                    yield resolve(row[column], file.url), {name: row[name] for name in keep} or None


def open_table(file: InputFile, handle: Any) -> Any:
    """The Parquet file in an open handle; BrokenContainer when it is none."""
    try:
        return call_with_retries(lambda: pq.ParquetFile(handle, pre_buffer=False), RetryPolicy(), file.url)
    except (pa.ArrowInvalid, OSError) as error:
        raise_if_broken(file, error)
        raise


def raise_if_broken(file: InputFile, error: Exception) -> None:
    """BrokenContainer for Arrow's errors about bytes, of which some are plain OSErrors; a store's pass."""
    if isinstance(error, pa.ArrowInvalid) or (type(error) is OSError and error.errno is None):
        said = " ".join(str(error).split())[:200]
        raise BrokenContainer(f"{file.url} is not a whole Parquet file: {said}") from error


def _uri_column(names: Sequence[str], where: str) -> str:
    """The column with the URIs: by name, or the only one there is."""
    by_lower_name = {name.lower(): name for name in names}
    for name in URI_COLUMNS:
        if name in by_lower_name:
            return by_lower_name[name]
    if len(names) == 1 and "/" not in names[0]:
        return names[0]
    raise InputError(
        f"{where} has no column of image URIs: name it one of {', '.join(URI_COLUMNS)}; "
        f"its text columns are {', '.join(names) or 'none'}"
    )


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _open_text(file: InputFile) -> io.TextIOWrapper:
    handle = call_with_retries(file.open, RetryPolicy(), file.url)
    return io.TextIOWrapper(handle, encoding="utf-8-sig", newline="")


def _decoded(lines: Iterable[str], file: InputFile) -> Iterator[str]:
    try:
        yield from lines
    except UnicodeDecodeError as error:
        raise InputError(f"{file.url} is not a text list: {error.reason} at byte {error.start}") from error
