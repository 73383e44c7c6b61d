"""Immutable files that a record names, with the sha256 their bytes must have whenever they are read.

A file has a name that only its attempt uses, and is durable before the record that names it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from ckn_scale.errors import CorruptData
from ckn_scale.storage.store import Store


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that a record names."""

    path: str  # below the run's root
    sha256: str
    size_bytes: int
    rows: int = 0  # of a table or an index; 0 for what has none


def write_file(store: Store, path: str, data: bytes, rows: int = 0) -> StoredFile:
    """Write a file under a name nobody else uses; durable on return."""
    store.write_new(path, data)
    return StoredFile(path, hashlib.sha256(data).hexdigest(), len(data), rows)


def read_file(store: Store, file: StoredFile) -> bytes:
    """The bytes that were recorded; CorruptData when they are others or gone."""
    try:
        data = store.read(file.path)
    except FileNotFoundError as error:
        raise CorruptData(f"{store.address(file.path)} is gone, though a record names it") from error
    if len(data) != file.size_bytes or hashlib.sha256(data).hexdigest() != file.sha256:
        raise CorruptData(f"{store.address(file.path)} is damaged: its sha256 is not the recorded one")
    return data


def find_damage(store: Store, files: Iterable[StoredFile]) -> str | None:
    """What is wrong with the first file whose bytes are not the recorded ones; None when all are well."""
    for file in files:
        try:
            read_file(store, file)
        except CorruptData as error:
            return str(error)
    return None


def write_table(store: Store, path: str, table: pa.Table) -> StoredFile:
    """Write a table as Parquet; equal tables give equal bytes."""
    return write_file(store, path, encode_table(table), table.num_rows)


def read_table(store: Store, file: StoredFile, columns: Sequence[str] | None = None) -> pa.Table:
    """The table of a file, its sha256 checked; CorruptData when it is not what was recorded."""
    table = decode_table(read_file(store, file), columns)
    if table.num_rows != file.rows:
        raise CorruptData(f"{store.address(file.path)} has {table.num_rows} rows, {file.rows} were recorded")
    return table


def decode_table(data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """In the calling thread: Arrow's own would still hold the bytes when Python ends, and abort it."""
    file = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False)
    return file.read(columns=None if columns is None else list(columns), use_threads=False)


def encode_table(table: pa.Table) -> bytes:
    """Parquet bytes: zstd, dictionaries for strings only (vectors and patches do not repeat)."""
    strings = [column.name for column in table.schema if pa.types.is_string(column.type)]
    sink = pa.BufferOutputStream()
    pq.write_table(table.combine_chunks(), sink, compression="zstd", use_dictionary=strings or False)
    return bytes(sink.getvalue().to_pybytes())
