"""What a plan knows about an image before it is read, and how any number of them is sorted.

`sort_refs` is an external merge sort: sorted runs on the local disk, merged as they are read, so that
memory does not grow with the images.
"""

from __future__ import annotations

import heapq
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa

from ckn_scale.errors import InputError

_EXTENSIONS = "jpg jpeg jpe jfif png webp bmp tif tiff gif ppm pgm avif heic heif"
IMAGE_EXTENSIONS = frozenset(_EXTENSIONS.split())
_SCHEMA = pa.schema(
    [("uri", pa.string()), ("size_bytes", pa.int64()), ("etag", pa.string()), ("columns", pa.string())]
)
_ROWS_AT_ONCE = 1024
_RUNS_AT_ONCE = 32  # of which each holds that many rows in memory while they are merged
Row = tuple[str, int, str, str | None]  # as _SCHEMA has it; kept columns as JSON


class BrokenContainer(InputError):
    """A tar or Parquet file that is not whole: bad input when listed, corrupt images when read."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """One image: where it is, and what distinguishes its content from another."""

    uri: str
    size_bytes: int = -1  # where the source does not say
    etag: str = ""
    columns: dict[str, Any] | None = None  # kept columns


def extension(name: str) -> str:
    """Lower case, without the dot; empty where there is none."""
    base = name.rpartition("/")[2]
    return base.rpartition(".")[2].lower() if "." in base else ""


def sort_refs(
    refs: Iterable[ImageRef],
    *,
    run_rows: int = 200_000,
    temp_dir: str | Path | None = None,
    runs_at_once: int = _RUNS_AT_ONCE,
) -> Iterator[ImageRef]:
    """The images in the order of their URIs (by code point); of equal URIs the first one given stays.

    Memory holds `run_rows` images at once, however many there are.
    """
    if run_rows < 1:
        raise ValueError(f"run_rows must be ≥ 1, got {run_rows}")
    if runs_at_once < 2:
        raise ValueError(f"runs_at_once must be ≥ 2, got {runs_at_once}")
    folder = Path(tempfile.mkdtemp(prefix="ckn-scale-sort-", dir=temp_dir))
    try:  # also when who asked stops in the middle and the generator is collected
        rest, runs = iter(refs), list[Path]()
        while block := list(islice(rest, run_rows)):
            block.sort(key=attrgetter("uri"))
            runs.append(_write_run(folder / f"0-{len(runs)}", map(_to_row, block)))
        runs = _merge_down(runs, folder, runs_at_once)
        yield from map(_to_ref, _drop_repeats(_merge(runs)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _merge_down(runs: list[Path], folder: Path, runs_at_once: int) -> list[Path]:
    """At most `runs_at_once` runs with the same rows; neighbours are merged, so the first stay first."""
    level = 0
    while len(runs) > runs_at_once:
        level += 1
        groups = [runs[start : start + runs_at_once] for start in range(0, len(runs), runs_at_once)]
        runs = [_merge_group(group, folder / f"{level}-{i}") for i, group in enumerate(groups)]
    return runs


def _merge_group(runs: Sequence[Path], target: Path) -> Path:
    merged = _write_run(target, _drop_repeats(_merge(runs)))
    for run in runs:
        run.unlink()
    return merged


def _merge(runs: Sequence[Path]) -> Iterator[Row]:
    return heapq.merge(*map(_read_run, runs), key=itemgetter(0))


def _write_run(path: Path, rows: Iterator[Row]) -> Path:
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, _SCHEMA, options=options) as stream:
        while block := list(islice(rows, _ROWS_AT_ONCE)):
            columns = [
                pa.array(column, field.type)
                for column, field in zip(zip(*block, strict=True), _SCHEMA, strict=True)
            ]
            stream.write_batch(pa.record_batch(columns, schema=_SCHEMA))
    return path


def _read_run(path: Path) -> Iterator[Row]:
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        for batch in stream:
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _to_row(ref: ImageRef) -> Row:
    columns = None if ref.columns is None else json.dumps(ref.columns, default=str)
    return ref.uri, ref.size_bytes, ref.etag, columns


def _to_ref(row: Row) -> ImageRef:
    uri, size_bytes, etag, columns = row
    return ImageRef(uri, size_bytes, etag, None if columns is None else json.loads(columns))


def _drop_repeats(rows: Iterable[Row]) -> Iterator[Row]:
    last: str | None = None
    for row in rows:
        if row[0] != last:
            yield row
        last = row[0]
