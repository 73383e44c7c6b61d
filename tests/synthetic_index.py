"""A small published index of random vectors, written the way the build step writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from ckn_scale.core.vector_index import build_exact
from ckn_scale.storage.index_files import (
    IndexManifest,
    make_side_table,
    write_index_shard,
    write_manifest,
    write_tombstones,
)
from ckn_scale.storage.records import new_attempt
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.run_records import Version
from ckn_scale.storage.stored_files import StoredFile

DIM = 16


@dataclass(frozen=True)
class SyntheticIndex:
    run: RunFolder
    vectors: np.ndarray  # (N, DIM) unit rows; the position is the image id
    manifest: IndexManifest
    version: int


def random_units(rows: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((rows, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def publish_synthetic(
    url: str | Path,
    vectors: np.ndarray,
    num_shards: int,
    models: dict | None = None,
    deleted: Sequence[int] = (),
) -> SyntheticIndex:
    """Publish the next version of a run made of `vectors`, cut into `num_shards` index shards."""
    run = RunFolder.create(str(url), {"synthetic": True})
    attempt = new_attempt()
    folder = run.index_folder("b", attempt)
    shards = tuple(
        write_index_shard(run.store, folder, shard, build_exact(vectors[ids], ids).to_bytes(), side_rows(ids))
        for shard, ids in enumerate(np.array_split(np.arange(len(vectors)), num_shards))
    )
    tombstones = write_tombstones(run.store, folder, np.array(deleted, np.int64))
    rows = len(vectors) - len(deleted)
    manifest = IndexManifest(f"b-{attempt}", DIM, rows, models or {}, shards, tombstones=tombstones)
    file = write_manifest(run.store, folder, manifest)
    return SyntheticIndex(run, vectors, manifest, record_version(run, manifest.build, file))


def record_version(run: RunFolder, build: str, file: StoredFile) -> int:
    return run.versions.append(Version(0, build, file, file.rows, 1, 1, {"ok": file.rows}))


def side_rows(ids: np.ndarray) -> pa.Table:
    uris = [f"photos/{image_id:04d}.jpg" for image_id in ids]
    thumbnails = [None if image_id == 0 else b"jpeg-%d" % image_id for image_id in ids]
    kept = pa.table(
        {"label": [f"label {image_id}" for image_id in ids]}, schema=pa.schema([("label", pa.string())])
    )
    return make_side_table(pa.array(ids, pa.int64()), uris, thumbnails, kept)
