"""Sort more images than fit in memory: sorted runs on disk, merged, each URI once."""

from __future__ import annotations

import heapq
import json
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import attrgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ckn_scale.storage.image_refs import ImageRef

_SCHEMA = pa.schema(
    [("uri", pa.string()), ("size_bytes", pa.int64()), ("etag", pa.string()), ("columns", pa.string())]
)
_ROWS_AT_ONCE = 4096


def sort_refs(
    refs: Iterable[ImageRef], *, run_rows: int = 200_000, temp_dir: str | Path | None = None
) -> Iterator[ImageRef]:
    """The images in the order of their URIs (by code point); of equal URIs the first one given stays.

    Memory holds `run_rows` images at once, however many there are.
    """
    if run_rows < 1:
        raise ValueError(f"run_rows must be ≥ 1, got {run_rows}")
    with tempfile.TemporaryDirectory(prefix="ckn-scale-sort-", dir=temp_dir) as folder:
        runs = [_write_run(Path(folder) / f"{i}.parquet", run) for i, run in enumerate(_cut(refs, run_rows))]
        merged = heapq.merge(*map(_read_run, runs), key=attrgetter("uri"))
        yield from _drop_repeats(merged)


def _cut(refs: Iterable[ImageRef], run_rows: int) -> Iterator[list[ImageRef]]:
    rest = iter(refs)
    while run := list(islice(rest, run_rows)):
        run.sort(key=attrgetter("uri"))
        yield run


def _write_run(path: Path, run: list[ImageRef]) -> Path:
    columns = [None if ref.columns is None else json.dumps(ref.columns, default=str) for ref in run]
    arrays = [
        pa.array([ref.uri for ref in run]),
        pa.array([ref.size_bytes for ref in run], pa.int64()),
        pa.array([ref.etag for ref in run]),
        pa.array(columns, pa.string()),
    ]
    table = pa.Table.from_arrays(arrays, schema=_SCHEMA)
    pq.write_table(table, path, compression="zstd", row_group_size=_ROWS_AT_ONCE * 4)
    return path


def _read_run(path: Path) -> Iterator[ImageRef]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_ROWS_AT_ONCE, use_threads=False):
            for uri, size_bytes, etag, columns in zip(
                *(column.to_pylist() for column in batch.columns), strict=True
            ):
                yield ImageRef(uri, size_bytes, etag, None if columns is None else json.loads(columns))


def _drop_repeats(refs: Iterable[ImageRef]) -> Iterator[ImageRef]:
    last: str | None = None
    for ref in refs:
        if ref.uri != last:
            yield ref
        last = ref.uri
