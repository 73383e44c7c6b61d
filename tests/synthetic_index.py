"""A small published index of random vectors, written the way the build step writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from ckn_scale.core.coarse_lists import learn_lists
from ckn_scale.core.short_codes import learn_quantiser
from ckn_scale.core.vector_codes import SignCodec
from ckn_scale.core.vector_index import StoredIndex, build_exact, build_signs
from ckn_scale.schemas import THUMBNAILS
from ckn_scale.storage.index_files import (
    IndexManifest,
    ShortCodes,
    make_side_table,
    read_ids,
    write_index_shard,
    write_manifest,
    write_short_codes,
    write_tombstones,
)
from ckn_scale.storage.models import save_model
from ckn_scale.storage.records import new_attempt
from ckn_scale.storage.run_folder import ENCODE_IMAGES, THUMBNAILS_STAGE, RunFolder
from ckn_scale.storage.run_records import PlanSource, Segment, Version
from ckn_scale.storage.shards import Commit
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
    kind: str = "exact",
    cuts: Sequence[int] | None = None,
    make_points: Callable[[np.ndarray], bytes | None] = lambda ids: None,
) -> SyntheticIndex:
    """Publish the next version of a run made of `vectors`, cut into `num_shards` shards, or at `cuts`.

    `make_points` gives the file of points for the ids of a shard.
    """
    run = RunFolder.create(str(url), {"synthetic": True})
    attempt = new_attempt()
    folder = run.index_folder("b", attempt)
    if run.plan.latest() is None:
        commit_thumbnails(run, len(vectors))
    parts = np.array_split(np.arange(len(vectors)), num_shards if cuts is None else cuts)
    shards = tuple(
        write_index_shard(
            run.store,
            folder,
            shard,
            make_index(vectors, ids, kind).to_bytes(),
            side_rows(ids),
            make_points(ids),
        )
        for shard, ids in enumerate(parts)
    )
    tombstones = write_tombstones(run.store, folder, np.array(deleted, np.int64))
    rows = len(vectors) - len(deleted)
    manifest = IndexManifest(f"b-{attempt}", DIM, rows, models or {}, shards, kind, tombstones=tombstones)
    file = write_manifest(run.store, folder, manifest)
    return SyntheticIndex(run, vectors, manifest, record_version(run, manifest.build, file))


def commit_thumbnails(run: RunFolder, num_images: int, generation: int = 1, prefix: bytes = b"jpeg") -> None:
    """A plan and the thumbnails of its images in two shards, as far as searches look at them; 0 has none."""
    size = -(-num_images // 2)
    if generation == 1:
        none = StoredFile("none", "0" * 64, 0)
        source = PlanSource(("photos",), 1, "0" * 64, "")
        run.plan.create(Segment(1, 0, num_images, 0, size, (), none, none, source, (), {}))
    for shard in range(2):
        ids = [one for one in range(shard * size, min((shard + 1) * size, num_images)) if one]
        table = pa.table([ids, [prefix + b"-%d" % one for one in ids]], schema=THUMBNAILS)
        file = run.write_table(THUMBNAILS_STAGE, shard, new_attempt(), table)
        files, attempt = {THUMBNAILS_STAGE: file}, new_attempt()
        run.commits(ENCODE_IMAGES).commit(Commit(ENCODE_IMAGES, shard, generation, attempt, "f", files))


def make_index(vectors: np.ndarray, ids: np.ndarray, kind: str) -> StoredIndex:
    if kind == "signs":
        return build_signs(SignCodec(DIM).encode(vectors[ids]), ids, DIM)
    return build_exact(vectors[ids], ids)


def add_short_codes(index: SyntheticIndex, *, lists: int, depth: int, probes: int) -> IndexManifest:
    """The manifest of the same shards with short codes."""
    store, folder = index.run.store, f"codes-{new_attempt()}"
    vectors = index.vectors
    coarse = learn_lists(vectors.__getitem__, len(vectors), lists, 0) if lists else None
    quantiser = learn_quantiser(vectors, seed=0, coarse=coarse)
    named = save_model(store, "quantiser", quantiser.to_part())
    shards = []
    for shard in index.manifest.shards:
        rows = index.vectors[read_ids(store, shard.ids)]
        codes, owners = quantiser.encode(rows), quantiser.assign(rows)
        file = write_short_codes(store, f"{folder}/{shard.shard}.codes", codes, owners)
        shards.append(replace(shard, codes=file))
    spec = ShortCodes("ivf-pq" if lists else "pq", named, depth, probes)
    return replace(index.manifest, shards=tuple(shards), short_codes=spec)


def record_version(run: RunFolder, build: str, file: StoredFile) -> int:
    return run.versions.append(Version(0, build, file, file.rows, 1, 1, {"ok": file.rows}))


def side_rows(ids: np.ndarray) -> pa.Table:
    uris = [f"photos/{image_id:04d}.jpg" for image_id in ids]
    kept = pa.table(
        {"label": [f"label {image_id}" for image_id in ids]}, schema=pa.schema([("label", pa.string())])
    )
    return make_side_table(pa.array(ids, pa.int64()), uris, kept)
