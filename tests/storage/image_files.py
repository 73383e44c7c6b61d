"""Builds inputs of every kind, on a local disk or an object store."""

from __future__ import annotations

import io
import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq

from ckn_scale.storage.store import Store


def image_bytes(i: int) -> bytes:
    """Not an image: listing and reading never decode."""
    return b"image %03d " % i * (i + 1)


def tar_bytes(members: dict[str, bytes], format: int = tarfile.DEFAULT_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def webdataset_bytes(keys: range) -> bytes:
    """As img2dataset writes it: image, caption and description of a key side by side."""
    members = {}
    for i in keys:
        members[f"{i:09d}.jpg"] = image_bytes(i)
        members[f"{i:09d}.json"] = json.dumps({"caption": f"no. {i}", "width": i}).encode()
        members[f"{i:09d}.txt"] = f"no. {i}\n".encode()
    return tar_bytes(members)


def parquet_bytes(table: pa.Table, rows_per_group: int = 3) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=rows_per_group)
    return sink.getvalue().to_pybytes()


def write_all(store: Store, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        store.write_new(path, data)
