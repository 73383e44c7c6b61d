"""What a published version holds, as files that other tools read; in the order of the ids.

    npy       vectors.npy (N, D) float32, ids.npy (N,) int64, images.csv: image_id, uri, kept columns
    parquet   vectors.parquet: image_id, uri, kept columns, vector (D float32)
    faiss     index.faiss, which plain FAISS searches, and images.csv, because it answers with ids

A vector is what the index compares a query with; of an index of signs, what the signs stand for. An export
is a new local folder that is there as a whole or not at all. Vectors pass through memory in blocks; an index
of FAISS lies in memory as a whole, as it will where it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from ckn_scale.core.faiss_library import import_faiss
from ckn_scale.core.plain_index import describe_index, join_indexes, read_blocks
from ckn_scale.errors import RunFailed
from ckn_scale.search.shard import OpenShard, ShardGroup
from ckn_scale.search.versions import open_version
from ckn_scale.storage.index_files import SIDE_COLUMNS, IndexManifest
from ckn_scale.storage.output_folders import new_folder
from ckn_scale.storage.run_folder import RunFolder

OnRows = Callable[[int, int], None]  # done, total
FORMS = ("npy", "parquet", "faiss")


@dataclass(frozen=True)
class Export:
    """What was written."""

    version: int
    rows: int
    dim: int
    files: dict[str, int]  # bytes by name, in the folder
    index: str | None = None  # the classes of the FAISS index


def export_version(
    run: RunFolder,
    target: str,
    form: str,
    version: int | None = None,
    on_rows: OnRows = lambda done, total: None,
) -> Export:
    """Write the current (or a given) version to the new local folder `target`, in one of FORMS.

    InputError when the target is there already or is no local path, or there is no such version;
    CorruptData when a file has other bytes than were recorded.
    """
    if form not in FORMS:
        raise ValueError(f"no form of an export named {form!r}; there are {', '.join(FORMS)}")
    index = None
    with new_folder(target, run) as folder:
        published = open_version(run, version)
        manifest = published.manifest
        shards = ShardGroup(run.store, manifest).shards
        if form == "npy":
            _write_npy(folder, manifest, shards, on_rows)
        elif form == "parquet":
            _write_parquet(folder, manifest, shards, on_rows)
        else:
            index = _write_faiss(folder, manifest, shards, on_rows)
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    return Export(published.number, manifest.rows, manifest.dim, files, index)


def _write_npy(folder: Path, manifest: IndexManifest, shards: Sequence[OpenShard], on_rows: OnRows) -> None:
    # Written on and on rather than through a memory map: a full disk is an error there, not a signal.
    form = {"descr": "<f4", "fortran_order": False, "shape": (manifest.rows, manifest.dim)}
    done = 0
    with (folder / "vectors.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, form)
        for shard in shards:
            for rows, vectors in read_blocks(shard.index):
                living = vectors[shard.living[rows]]
                file.write(np.ascontiguousarray(living, "<f4").data)
                done += len(living)
                on_rows(done, manifest.rows)
    np.save(
        folder / "ids.npy",
        np.concatenate([np.empty(0, np.int64), *(one.index.ids[one.living] for one in shards)]),
    )
    _write_images(folder, shards)


def _write_parquet(
    folder: Path, manifest: IndexManifest, shards: Sequence[OpenShard], on_rows: OnRows
) -> None:
    images = _schema_of_images(shards)
    vector = pa.field("vector", pa.list_(pa.float32(), manifest.dim))
    done = 0
    with pq.ParquetWriter(folder / "vectors.parquet", images.append(vector)) as writer:
        for shard in shards:
            for rows, vectors in read_blocks(shard.index):
                table, living = _read_images(shard, rows, images), vectors[shard.living[rows]]
                numbers = pa.array(np.ascontiguousarray(living).reshape(-1))
                lists = pa.FixedSizeListArray.from_arrays(numbers, manifest.dim)
                writer.write_table(table.append_column(vector, lists))
                done += len(living)
                on_rows(done, manifest.rows)


def _write_faiss(folder: Path, manifest: IndexManifest, shards: Sequence[OpenShard], on_rows: OnRows) -> str:
    parts = [shard.index for shard in shards]
    dead = np.concatenate([np.empty(0, np.int64), *(one.index.ids[~one.living] for one in shards)])
    index = join_indexes(parts, manifest.kind, manifest.dim, lambda rows: on_rows(rows, manifest.rows))
    if len(dead):
        index.remove_ids(dead)
    try:
        import_faiss().write_index(index, str(folder / "index.faiss"))
    except RuntimeError as error:  # a full disk
        raise RunFailed(f"{folder / 'index.faiss'} could not be written: {error}") from error
    _write_images(folder, shards)
    return describe_index(index)


def _write_images(folder: Path, shards: Sequence[OpenShard]) -> None:
    schema = _schema_of_images(shards)
    with pa.csv.CSVWriter(str(folder / "images.csv"), schema) as writer:
        for shard in shards:
            writer.write_table(_read_images(shard, slice(0, shard.index.rows), schema))


def _schema_of_images(shards: Sequence[OpenShard]) -> pa.Schema:
    """image_id, uri and the kept columns; a column has the type of the first shard with a value of it."""
    kept: dict[str, pa.DataType] = {}
    valued: set[str] = set()
    for shard in shards:
        for field in shard.table.schema:
            if field.name in SIDE_COLUMNS.names or field.name in valued:
                continue
            if has_value := shard.table.column(field.name).null_count < len(shard.table):
                valued.add(field.name)
            if has_value or field.name not in kept:
                kept[field.name] = field.type
    return pa.schema([SIDE_COLUMNS.field("image_id"), SIDE_COLUMNS.field("uri"), *kept.items()])


def _read_images(shard: OpenShard, rows: slice, schema: pa.Schema) -> pa.Table:
    """Of some rows of a shard, those that are in answers."""
    table = shard.table.slice(rows.start, rows.stop - rows.start).filter(pa.array(shard.living[rows]))
    columns = [
        table.column(field.name)
        if field.name in table.column_names and table.schema.field(field.name).type == field.type
        else pa.nulls(len(table), field.type)  # no value was seen when this shard was built
        for field in schema
    ]
    return pa.table(columns, schema=schema)
