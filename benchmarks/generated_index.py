"""Rows by the million, made of a few real images: files of an index that a benchmark opens.

Each row is cut together from the codes of four images. Its points are drawn from those of four images, with a
twentieth of the bits turned; there are VARIANTS of them, dealt out to all rows. Planted queries of a run keep
their originals, vectors and points as they are, among the generated rows.
"""

from __future__ import annotations

import pickle
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckn_scale.core.evidence import QueryPoints
from ckn_scale.core.short_codes import learn_quantiser
from ckn_scale.core.vector_codes import SignCodec
from ckn_scale.core.vector_index import build_signs
from ckn_scale.schemas import read_codes
from ckn_scale.steps.certify_index import CertifyIndex
from ckn_scale.storage.index_files import (
    IndexManifest,
    ShortCodes,
    make_side_table,
    write_index_shard,
    write_manifest,
    write_short_codes,
)
from ckn_scale.storage.models import save_model
from ckn_scale.storage.point_files import HEADER_BYTES, MAGIC
from ckn_scale.storage.run_folder import ENCODE_IMAGES, RunFolder
from ckn_scale.storage.store import Store
from ckn_scale.storage.stored_files import read_table

DIM, DEPTH = 32768, 2000
ROWS_PER_SHARD = 62_500
SIMILARITY = 0.25  # of a random query to its row
VARIANTS = 1024
CODE_BYTES, FRAME_BYTES = 16, 9


@dataclass
class Sources:
    """What rows are made of, and queries with their originals; records are bytes of points sorted by word."""

    codes: np.ndarray  # (S, code_bytes)
    records: list[bytes] | None
    planted: np.ndarray  # (P, code_bytes)
    planted_records: list[bytes] | None
    queries: np.ndarray  # (P, DIM)
    points: list[QueryPoints] | None


def units(rows: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return scaled.astype(np.float32)


def draw_sources(num_queries: int) -> Sources:
    rng, codec = np.random.default_rng(0), SignCodec(DIM)
    originals = units(rng.standard_normal((num_queries, DIM)))
    noise = units(rng.standard_normal(originals.shape))
    queries = units(SIMILARITY * originals + np.sqrt(1 - SIMILARITY**2) * noise)
    codes = codec.encode(units(rng.standard_normal((512, DIM))))
    return Sources(codes, None, codec.encode(originals), None, queries, None)


def read_sources(url: str, num_queries: int) -> Sources:
    """Vectors, points and planted queries of a published run."""
    run = RunFolder.open(url)
    version = run.versions.latest()
    assert version is not None, f"{url} has no version"
    asked = CertifyIndex(run, version.manifest, version.certificate.draw).asked
    usable = [one for one in asked if one.vector is not None and one.points is not None][:num_queries]
    codes: dict[int, np.ndarray] = {}
    records: dict[int, bytes] = {}
    for _, commit in sorted(run.commits(ENCODE_IMAGES).committed().items()):
        table = read_table(run.store, commit.files["vectors"])
        table = table.filter(pc.equal(table.column("state"), "ok"))
        codes |= zip(table.column("image_id").to_pylist(), read_codes(table), strict=True)
        for row in read_table(run.store, commit.files["descriptors"]).to_pylist():
            records[row["image_id"]] = sort_record(row["words"], row["codes"], row["frames"])
    ids = [one.image_id for one in usable]
    others = [one for one in codes if one not in set(ids) and records.get(one)]
    return Sources(
        np.array([codes[one] for one in others]),
        mix_records([records[one] for one in others]),
        np.array([codes[one] for one in ids]),
        [records[one] for one in ids],
        np.array([one.vector for one in usable]),
        [one.points for one in usable if one.points is not None],
    )


def split_record(record: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    count = len(record) // (2 + CODE_BYTES + FRAME_BYTES)
    words, rest = np.frombuffer(record, "<u2", count), record[2 * count :]
    codes = np.frombuffer(rest, np.uint8, CODE_BYTES * count).reshape(count, CODE_BYTES)
    return words, codes, np.frombuffer(rest[CODE_BYTES * count :], np.uint8).reshape(count, FRAME_BYTES)


def sort_record(words: bytes, codes: bytes, frames: bytes) -> bytes:
    order = np.argsort(np.frombuffer(words, "<u2"), kind="stable")
    columns = [np.frombuffer(one, np.uint8).reshape(len(order), -1) for one in (words, codes, frames)]
    return b"".join(one[order].tobytes() for one in columns)


def mix_records(records: Sequence[bytes]) -> list[bytes]:
    """Points of four images each, as many as one of them has, some bits turned."""
    rng, mixed = np.random.default_rng(5), []
    for _ in range(VARIANTS):
        four = [split_record(records[one]) for one in rng.choice(len(records), 4, replace=False)]
        count = len(four[0][0])
        columns = [np.concatenate([one[place] for one in four]) for place in range(3)]
        chosen = rng.choice(len(columns[0]), min(count, len(columns[0])), replace=False)
        words, codes, frames = (column[chosen] for column in columns)
        turned = np.packbits(rng.random((len(codes), 8 * CODE_BYTES)) < 0.05, axis=1)
        mixed.append(sort_record(words.tobytes(), (codes ^ turned).tobytes(), frames.tobytes()))
    return mixed


def join_records(ids: np.ndarray, records: Sequence[bytes]) -> bytes:
    """A file of points, as `point_files.py` describes it."""
    width = 2 + CODE_BYTES + FRAME_BYTES
    offsets = np.concatenate([[0], np.cumsum([len(one) // width for one in records])]).astype("<i8")
    sizes = np.tile(np.array([640, 480, 640, 480], "<i4"), (len(ids), 1))
    header = struct.pack("<8s4q", MAGIC, len(ids), int(offsets[-1]), CODE_BYTES, FRAME_BYTES)
    tables = (
        header.ljust(HEADER_BYTES, b"\0"),
        ids.astype("<i8").tobytes(),
        offsets.tobytes(),
        sizes.tobytes(),
    )
    return b"".join([*tables, *records])


def mix(codes: np.ndarray, rows: int, chunk: int, seed: int) -> Iterator[np.ndarray]:
    """Blocks of rows, each cut together from four codes in chunks; what is left over is of the first."""
    rng, whole = np.random.default_rng(seed), codes.shape[1] // chunk
    parts, rest = codes[:, : whole * chunk].reshape(len(codes), whole, chunk), codes[:, whole * chunk :]
    for start in range(0, rows, 4096):
        count = min(4096, rows - start)
        four, which = rng.integers(0, len(codes), (count, 4)), rng.integers(0, 4, (count, whole))
        chosen = np.take_along_axis(four, which, axis=1)
        body = parts[chosen, np.arange(whole)].reshape(count, -1)
        yield np.concatenate([body, rest[four[:, 0]]], axis=1)


def write_index(folder: Path, rows: int, sources: Sources) -> dict[str, Any]:
    """Files of `rows` rows, the planted ones spread among them; what it took and where they are."""
    store, codec, every = Store(str(folder)), SignCodec(DIM), np.concatenate([sources.codes, sources.planted])
    begun = time.process_time()
    decoded = np.concatenate([codec.decode(every[start : start + 64]) for start in range(0, len(every), 64)])
    decode_s = time.process_time() - begun
    quantiser = learn_quantiser(decoded[: len(sources.codes)], seed=0)
    learned = time.process_time()
    short = quantiser.encode(decoded)
    code_s = (decode_s + time.process_time() - learned) / len(every)
    del decoded
    places = np.sort(np.random.default_rng(3).choice(rows, len(sources.planted), replace=False))
    shards, build_s, num_shards = [], 0.0, max(8, -(-rows // ROWS_PER_SHARD))
    for number, ids in enumerate(np.array_split(np.arange(rows), num_shards)):
        here = np.flatnonzero((places >= ids[0]) & (places <= ids[-1]))
        long_codes = np.concatenate(list(mix(sources.codes, len(ids), 64, number)))
        short_codes = np.concatenate(list(mix(short[: len(sources.codes)], len(ids), 8, number)))
        long_codes[places[here] - ids[0]] = sources.planted[here]
        short_codes[places[here] - ids[0]] = short[len(sources.codes) :][here]
        points = None
        if sources.records is not None and sources.planted_records is not None:
            records = [
                sources.records[one] for one in np.random.default_rng(number).integers(0, VARIANTS, len(ids))
            ]
            for place in here.tolist():
                records[places[place] - ids[0]] = sources.planted_records[place]
            points = join_records(ids, records)
        begun = time.process_time()
        data = build_signs(long_codes, ids, DIM).to_bytes()
        table = make_side_table(pa.array(ids), [f"s3://bucket/photos/{one:09d}.jpg" for one in ids])
        shard = write_index_shard(store, "index", number, data, table, points)
        coded = write_short_codes(store, f"index/{number}.codes", short_codes, np.zeros(len(ids), np.int32))
        shards.append(replace(shard, codes=coded))
        build_s += time.process_time() - begun
    spec = ShortCodes("pq", save_model(store, "quantiser", quantiser.to_part()), DEPTH, 1)
    manifest = IndexManifest("b", DIM, rows, {}, tuple(shards), "signs", short_codes=spec)
    file = write_manifest(store, "index", manifest)
    (folder / "asked.pkl").write_bytes(pickle.dumps((asdict(file), sources.queries, sources.points, places)))
    points_bytes = sum(shard.points.size_bytes for shard in shards if shard.points is not None)
    disk = sum(one.size_bytes for shard in shards for one in shard.files)
    return {
        "rows": rows,
        "disk_bytes_per_row": (disk - points_bytes) / rows,
        "points_bytes_per_row": points_bytes / rows,
        "code_rows_per_s": 1 / code_s,
        "write_rows_per_s": rows / build_s,
    }
