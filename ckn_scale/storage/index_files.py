"""One index build as files: an immutable folder of shards and the manifest that names them.

    <folder>/shard-00000.faiss   vectors with global ids, opened memory-mapped
    <folder>/shard-00000.arrow   the same rows: image_id, uri, kept columns (Arrow IPC, mapped)
    <folder>/shard-00000.codes   the same rows: short codes and their lists, for a shortlist (some builds)
    <folder>/shard-00000.ids     the same rows: their ids alone, int64
    <folder>/shard-00000.points  the same rows: their points, for matching (see point_files.py)
    <folder>/tombstones.ids      of a version: rows of its shards that are in no answer any more
    <folder>/manifest.json       sha256 and size of every file, id ranges, rows, dim, models

A folder belongs to one attempt and is never written twice. Readers start from a published version,
which names the manifest and its sha256; the manifest vouches for everything below it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ckn_scale.errors import CorruptData
from ckn_scale.storage.run_folder import index_shard_path, manifest_path, tombstones_path
from ckn_scale.storage.store import Store
from ckn_scale.storage.stored_files import StoredFile, read_file, write_file

MANIFEST_FORMAT = 3
METRIC = "inner_product"
SIDE_COLUMNS = pa.schema([("image_id", pa.int64()), ("uri", pa.string())])
ROWS_PER_BATCH = 4096


@dataclass(frozen=True)
class IndexShard:
    """The files of one index shard; `first_id` and `last_id` are -1 when it has no rows."""

    shard: int
    index: StoredFile
    table: StoredFile
    ids: StoredFile
    rows: int
    first_id: int
    last_id: int
    points: StoredFile | None = None  # for evidence, where the run keeps points
    codes: StoredFile | None = None  # short ones for a shortlist, and their lists, where the build has them

    def ids_within(self, ids: np.ndarray) -> np.ndarray:
        """Of sorted ids, those of its range."""
        return ids[slice(*np.searchsorted(ids, (self.first_id, self.last_id + 1)))]

    @property
    def files(self) -> list[StoredFile]:
        named = (self.index, self.table, self.ids, self.points, self.codes)
        return [file for file in named if file is not None]


@dataclass(frozen=True)
class ShortCodes:
    """How a shortlist is made before rows are compared: see `core/short_codes.py`."""

    kind: str  # "pq": all codes are scanned; "ivf-pq": those of the nearest lists
    quantiser: StoredFile
    depth: int  # of the shortlist
    probes: int  # how many lists are looked at


@dataclass(frozen=True)
class IndexManifest:
    """What a build is made of, and what it was made with."""

    build: str
    dim: int
    rows: int  # that answers may hold: those of the shards without the tombstones
    models: Mapping[str, StoredFile]  # by name: what encodes a query
    shards: tuple[IndexShard, ...]
    kind: str = "exact"  # or "signs": which class of core opens the shards
    metric: str = METRIC
    format: int = MANIFEST_FORMAT
    generation: int = 0  # of the models
    short_codes: ShortCodes | None = None  # none: every row is compared
    tombstones: StoredFile | None = None  # sorted ids of rows that are deleted or replaced; none: no file


def make_side_table(
    image_ids: Sequence[int] | pa.Array,
    uris: Sequence[str] | pa.Array,
    columns: pa.Table | None = None,
) -> pa.Table:
    """Rows of a side table in id order; `columns` are the user's own, one row per image."""
    table = pa.table([image_ids, uris], schema=SIDE_COLUMNS)
    for name in columns.column_names if columns is not None else ():
        if name in table.column_names:
            raise ValueError(f"a kept column may not be named {name!r}: the side table has its own")
        table = table.append_column(name, columns.column(name))  # type: ignore[union-attr]
    return table


def write_index_shard(
    store: Store, folder: str, shard_id: int, index: bytes, table: pa.Table, points: bytes | None = None
) -> IndexShard:
    """Write one shard: `index` as FAISS serialises it, `table` with a row per vector, in id order.

    `points` as `point_files.serialise_points` gives them for the same rows.
    """
    ids = _check_side_table(table)
    suffixes = ("faiss", "arrow", "ids", "points")
    paths = (index_shard_path(folder, shard_id, one) for one in suffixes)
    index_path, table_path, ids_path, points_path = paths
    return IndexShard(
        shard=shard_id,
        index=write_file(store, index_path, index, len(ids)),
        table=write_file(store, table_path, _serialise_table(table), len(ids)),
        ids=write_ids(store, ids_path, ids),
        points=None if points is None else write_file(store, points_path, points, len(ids)),
        rows=len(ids),
        first_id=int(ids[0]) if len(ids) else -1,
        last_id=int(ids[-1]) if len(ids) else -1,
    )


def write_ids(store: Store, path: str, ids: np.ndarray) -> StoredFile:
    """Image ids as a plain file of int64."""
    return write_file(store, path, np.ascontiguousarray(ids, "<i8").tobytes(), len(ids))


def read_ids(store: Store, file: StoredFile | None) -> np.ndarray:
    """The ids of such a file; none when there is none."""
    if file is None:
        return np.empty(0, np.int64)
    return np.frombuffer(read_file(store, file), "<i8").astype(np.int64, copy=False)


def write_tombstones(store: Store, folder: str, ids: np.ndarray) -> StoredFile | None:
    """Sorted ids of rows that no answer may hold; no file when there are none."""
    return write_ids(store, tombstones_path(folder), ids) if len(ids) else None


def write_manifest(store: Store, folder: str, manifest: IndexManifest) -> StoredFile:
    """Write the manifest last, once all shards are durable; its sha256 belongs into the version record."""
    _check_manifest(manifest)
    body = json.dumps(asdict(manifest), sort_keys=True, indent=1, ensure_ascii=False)
    return write_file(store, manifest_path(folder), body.encode(), manifest.rows)


def read_manifest(store: Store, file: StoredFile) -> IndexManifest:
    """The manifest that a version names; CorruptData when it is missing or has other bytes."""
    body = json.loads(read_file(store, file))
    if body["format"] != MANIFEST_FORMAT:
        raise CorruptData(f"{file.path} has format {body['format']}; this release reads {MANIFEST_FORMAT}")
    shards = tuple(_parse_shard(shard) for shard in body.pop("shards"))
    models = {name: StoredFile(**model) for name, model in body.pop("models").items()}
    tombstones = _parse_file(body.pop("tombstones"))
    short_codes = _parse_short_codes(body.pop("short_codes"))
    manifest = IndexManifest(
        shards=shards, models=models, tombstones=tombstones, short_codes=short_codes, **body
    )
    _check_manifest(manifest)
    return manifest


def write_short_codes(store: Store, path: str, codes: np.ndarray, lists: np.ndarray) -> StoredFile:
    """(N, code_bytes) uint8, then the list of each row, int32."""
    data = np.ascontiguousarray(codes).tobytes() + np.ascontiguousarray(lists, "<i4").tobytes()
    return write_file(store, path, data, len(codes))


def open_short_codes(path: Path, rows: int, code_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes (N, code_bytes) and lists (N,), mapped; CorruptData when the file holds those of other rows."""
    data = np.memmap(path, np.uint8, "r") if rows else np.empty(0, np.uint8)
    if len(data) != rows * (code_bytes + 4):
        raise CorruptData(f"{path} has {len(data)} bytes, {rows} rows of {code_bytes} + 4 were expected")
    split = rows * code_bytes
    return data[:split].reshape(rows, code_bytes), data[split:].view("<i4")


def open_side_table(path: Path) -> pa.Table:
    """A side table from a local file, memory-mapped: only the rows that are asked for are read."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def _serialise_table(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    # Uncompressed, because a compressed batch cannot be mapped.
    with pa.ipc.new_file(sink, table.schema) as writer:
        # Batches of one size, each a fresh copy of its rows: equal tables give equal bytes, however
        # they were cut before.
        for start in range(0, len(table), ROWS_PER_BATCH):
            rows = table.slice(start, ROWS_PER_BATCH)
            writer.write_table(rows.take(pa.array(range(len(rows)))).combine_chunks())
    return bytes(sink.getvalue().to_pybytes())


def _check_side_table(table: pa.Table) -> np.ndarray:
    for column in SIDE_COLUMNS:
        if column.name not in table.column_names or table.schema.field(column.name).type != column.type:
            raise ValueError(
                f"a side table needs the column {column.name}: {column.type}, got {table.schema}"
            )
    ids: np.ndarray = table.column("image_id").to_numpy()
    if (np.diff(ids) <= 0).any():
        raise ValueError("the side table's image_id must ascend strictly")
    return ids


def _check_manifest(manifest: IndexManifest) -> None:
    dead = manifest.tombstones.rows if manifest.tombstones else 0
    rows = sum(shard.rows for shard in manifest.shards)
    if rows - dead != manifest.rows:
        raise ValueError(
            f"the manifest says {manifest.rows} rows, its shards hold {rows}, {dead} of them tombstones"
        )
    numbers = [shard.shard for shard in manifest.shards]
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"shard numbers must differ, got {numbers}")
    ranges = sorted((shard.first_id, shard.last_id) for shard in manifest.shards if shard.rows)
    for (_, last), (first, _) in pairwise(ranges):
        if first <= last:  # an image is looked up by the range that its id falls into
            raise ValueError(
                f"shards must hold ranges of ids apart from each other, got {last} before {first}"
            )
    if manifest.short_codes is not None and any(shard.codes is None for shard in manifest.shards):
        raise ValueError("the manifest names short codes, but not those of all of its shards")
    if manifest.metric != METRIC:
        raise ValueError(f"metric must be {METRIC}, got {manifest.metric}")


def _parse_shard(body: dict[str, Any]) -> IndexShard:
    files = {name: StoredFile(**body.pop(name)) for name in ("index", "table", "ids")}
    optional = {name: _parse_file(body.pop(name)) for name in ("points", "codes")}
    return IndexShard(**{**body, **files, **optional})


def _parse_short_codes(body: dict[str, Any] | None) -> ShortCodes | None:
    return None if body is None else ShortCodes(quantiser=StoredFile(**body.pop("quantiser")), **body)


def _parse_file(body: dict[str, Any] | None) -> StoredFile | None:
    return None if body is None else StoredFile(**body)
