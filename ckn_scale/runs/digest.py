"""One digest per stage over what is committed: equal for equal content, whoever made it and how.

File names, attempts, generations, the order of work and the number of workers do not enter. A table is
digested by column (`RowDigest`): validity, lengths and values, each in the order of its key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckn_scale.errors import CorruptData
from ckn_scale.storage.deletions import list_deleted, read_deletions
from ckn_scale.storage.index_files import read_ids, read_manifest
from ckn_scale.storage.plans import read_segments
from ckn_scale.storage.run_folder import (
    DESCRIPTORS_STAGE,
    ENCODE_IMAGES,
    THUMBNAILS_STAGE,
    VECTORS_STAGE,
    RunFolder,
)
from ckn_scale.storage.stored_files import read_table


def digest_run(run: RunFolder) -> dict[str, str]:
    """Hex digests by stage; CorruptData when what is committed cannot be read back."""
    return {
        "plan": digest_rows(
            read_table(run.store, file) for segment in read_segments(run) for file in segment.files
        ),
        "models": _digest_models(run),
        "vectors": digest_rows(_read_stage(run, VECTORS_STAGE)),
        "descriptors": digest_rows(_read_stage(run, DESCRIPTORS_STAGE)),
        "thumbnails": digest_rows(_read_stage(run, THUMBNAILS_STAGE)),
        "index": _digest_index(run),
        "deletions": _digest_ids(list_deleted(run, read_deletions(run))),
    }


def _read_stage(run: RunFolder, stage: str) -> Iterator[pa.Table]:
    for _, commit in sorted(run.commits(ENCODE_IMAGES).committed().items()):
        yield read_table(run.store, commit.files[stage])


def _digest_models(run: RunFolder) -> str:
    latest = run.models.latest()
    models = {} if latest is None else latest.models
    return _digest_lines(f"{name} {file.sha256}" for name, file in sorted(models.items()))


def _digest_index(run: RunFolder) -> str:
    latest = run.versions.latest()
    if latest is None:
        return _digest_lines([])
    manifest = read_manifest(run.store, latest.manifest)
    shards = (
        " ".join([str(one.shard), str(one.rows), *(file.sha256 for file in one.files)])
        for one in manifest.shards
    )
    short = manifest.short_codes
    codes = [f"{short.kind} {short.depth} {short.probes} {short.quantiser.sha256}"] if short else []
    tombstones = [_digest_ids(read_ids(run.store, manifest.tombstones))] if manifest.tombstones else []
    head = f"{manifest.kind} {manifest.dim} {manifest.metric}"
    return _digest_lines([head, *codes, *shards, *tombstones])


def _digest_ids(ids: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(ids, "<i8").tobytes()).hexdigest()


def _digest_lines(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def digest_rows(tables: Iterable[pa.Table], *, key: Sequence[str] = ("image_id",)) -> str:
    """Hex digest of all rows. Tables come in ascending, disjoint ranges of `key`, each in any order.

    CorruptData when a key comes twice or tables come out of order.
    """
    rows = RowDigest(key=key)
    for table in tables:
        rows.update(table)
    return rows.hexdigest()


class RowDigest:
    """A digest that grows table by table."""

    def __init__(self, *, key: Sequence[str] = ("image_id",)) -> None:
        self.key = tuple(key)
        self.num_rows = 0
        self._last: tuple[Any, ...] | None = None
        self._columns: dict[str, _ColumnDigest] = {}

    def update(self, table: pa.Table) -> None:
        if table.num_rows == 0:
            return
        table = table.sort_by([(name, "ascending") for name in self.key]).combine_chunks()
        self._check_order(table)
        if not self._columns:
            self._columns = {field.name: _ColumnDigest(field.type) for field in table.schema}
        if self._columns.keys() != set(table.column_names):
            raise CorruptData(f"tables of one stage differ in their columns: {sorted(table.column_names)}")
        for name, column in self._columns.items():
            column.update(table.column(name))
        self.num_rows += table.num_rows

    def hexdigest(self) -> str:
        parts = {name: column.hexdigests() for name, column in self._columns.items()}
        body = {"rows": self.num_rows, "columns": parts}
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

    def _check_order(self, table: pa.Table) -> None:
        columns = [table.column(name).to_numpy() for name in self.key]
        if not _is_strictly_ascending(columns):
            raise CorruptData(f"a row with the same {', '.join(self.key)} comes twice")
        first = tuple(column[0] for column in columns)
        if self._last is not None and first <= self._last:
            raise CorruptData(f"rows out of order: {first} after {self._last} of {', '.join(self.key)}")
        self._last = tuple(column[-1] for column in columns)


class _ColumnDigest:
    def __init__(self, type_: pa.DataType) -> None:
        self.type = type_
        self._streams = {name: hashlib.sha256() for name in ("valid", "lengths", "values")}

    def update(self, column: pa.ChunkedArray) -> None:
        if column.type != self.type:
            raise CorruptData(f"tables of one stage differ in a column's type: {self.type} and {column.type}")
        self._streams["valid"].update(pc.is_valid(column).to_numpy().astype(np.uint8).tobytes())
        lengths, values = _value_bytes(column.drop_null().combine_chunks())
        self._streams["lengths"].update(lengths)
        self._streams["values"].update(values)

    def hexdigests(self) -> list[str]:
        return [str(self.type), *(stream.hexdigest() for stream in self._streams.values())]


def _is_strictly_ascending(columns: list[np.ndarray]) -> bool:
    """Of rows sorted by `columns`: whether no two neighbours are equal."""
    equal = np.ones(len(columns[0]) - 1, dtype=bool)
    for column in columns:
        equal &= column[1:] == column[:-1]
    return not equal.any()


def _value_bytes(values: pa.Array) -> tuple[bytes, bytes | memoryview]:
    """(lengths as int64, the bytes of all values one after the other) of an array without nulls."""
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _variable_bytes(values.cast(pa.large_binary()))
    if pa.types.is_fixed_size_binary(kind):
        width = kind.byte_width
        start = values.offset * width
        return b"", memoryview(values.buffers()[1])[start : start + len(values) * width]
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return b"", values.to_numpy(zero_copy_only=False).tobytes()
    texts = [json.dumps(value, sort_keys=True, default=str) for value in values.to_pylist()]
    return _variable_bytes(pa.array(texts, pa.large_string()).cast(pa.large_binary()))


def _variable_bytes(values: pa.Array) -> tuple[bytes, memoryview]:
    offsets = np.frombuffer(values.buffers()[1], dtype=np.int64)[
        values.offset : values.offset + len(values) + 1
    ]
    if len(values) == 0:
        return b"", memoryview(b"")
    data = values.buffers()[2]
    span = memoryview(data)[offsets[0] : offsets[-1]] if data is not None else memoryview(b"")
    return np.diff(offsets).tobytes(), span
