"""An index from ten thousand rows to a billion: disk, memory, time to open and to answer, kept firsts.

    python benchmarks/scale.py [--rows 10000,100000,1000000] [--vectors FILE.npy] [--json FILE] [--png FILE]

Rows of 32,768 numbers as `compact` keeps them: signs in files that are mapped, short codes in memory (pq).
Real vectors, or 512 random ones, are encoded; each row but the planted ones is cut together from the codes
of four of them. A query is a planted row with noise, of similarity 0.25. Files are written once, in eight
shards; another process opens them and is asked, one thread, CPU time, warm. *Kept*: of the queries that a
comparison of all signs answers, those with the same first. Memory is anonymous memory (mapped files are the
system's cache), its peak while the index is opened, against `predict_memory`. Ten million rows are codes
alone, made in memory: a scan of all, and of an eighth of 4,096 lists. Larger ones are groups of ten million
by the line through what was measured.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything that starts a thread pool

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ckn_scale.core.numerics import set_compute_threads
from ckn_scale.core.short_codes import CodeScan, Quantiser, learn_quantiser, sketch
from ckn_scale.core.vector_codes import SignCodec
from ckn_scale.core.vector_index import build_signs
from ckn_scale.search.shard import ShardGroup
from ckn_scale.search.shortlist import predict_memory
from ckn_scale.storage.index_files import (
    IndexManifest,
    ShortCodes,
    make_side_table,
    read_manifest,
    write_index_shard,
    write_manifest,
    write_short_codes,
)
from ckn_scale.storage.models import save_model
from ckn_scale.storage.store import Store
from ckn_scale.storage.stored_files import StoredFile

DIM, SOURCES, PLANTED, SHARDS, DEPTH, K = 32768, 512, 64, 8, 2000, 10
SIMILARITY = 0.25
GENERATED_ROWS, LISTS = 10_000_000, 4096
COMPARED = 16  # queries that are also answered by a comparison of all rows


def units(rows: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return scaled.astype(np.float32)


def read_sources(path: Path | None) -> np.ndarray:
    if path is None:
        return units(np.random.default_rng(0).standard_normal((SOURCES + PLANTED, DIM)))
    return units(np.load(path, mmap_mode="r")[: SOURCES + PLANTED].astype(np.float32))


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


def write_index(folder: Path, rows: int, vectors: np.ndarray) -> dict[str, Any]:
    """Files of `rows` rows, the planted ones spread among them; what it took and where they are."""
    sources, planted = vectors[:SOURCES], vectors[SOURCES:]
    begun = time.process_time()
    quantiser = learn_quantiser(sources, sketch(sources), 0, seed=0)
    learn_s, store, codec = time.process_time() - begun, Store(str(folder)), SignCodec(DIM)
    signs = codec.encode(vectors)
    begun = time.process_time()
    decoded = np.concatenate([codec.decode(signs[start : start + 64]) for start in range(0, len(signs), 64)])
    short = quantiser.encode(decoded)
    code_s = (time.process_time() - begun) / len(vectors)
    places = np.sort(np.random.default_rng(3).choice(rows, len(planted), replace=False))
    shards, build_s = [], 0.0
    for number, ids in enumerate(np.array_split(np.arange(rows), SHARDS)):
        long_codes = np.concatenate(list(mix(signs[:SOURCES], len(ids), 64, number)))
        short_codes = np.concatenate(list(mix(short[:SOURCES], len(ids), 8, number)))
        here = np.flatnonzero((places >= ids[0]) & (places <= ids[-1]))
        long_codes[places[here] - ids[0]] = signs[SOURCES:][here]
        short_codes[places[here] - ids[0]] = short[SOURCES:][here]
        begun = time.process_time()
        data = build_signs(long_codes, ids, DIM).to_bytes()
        table = make_side_table(pa.array(ids), [f"s3://bucket/photos/{one:09d}.jpg" for one in ids])
        shard = write_index_shard(store, "index", number, data, table)
        coded = write_short_codes(store, f"index/{number}.codes", short_codes, np.zeros(len(ids), np.int32))
        shards.append(replace(shard, codes=coded))
        build_s += time.process_time() - begun
    model = save_model(store, "quantiser", quantiser.to_part())
    spec = ShortCodes("pq", model, DEPTH, 1)
    manifest = IndexManifest("b", DIM, rows, {}, tuple(shards), "signs", short_codes=spec)
    noise = units(np.random.default_rng(4).standard_normal(planted.shape))
    np.save(folder / "queries.npy", units(SIMILARITY * planted + np.sqrt(1 - SIMILARITY**2) * noise))
    (folder / "manifest.ref").write_text(json.dumps(asdict(write_manifest(store, "index", manifest))))
    disk = sum(file.size_bytes for shard in shards for file in shard.files)
    return {
        "rows": rows,
        "disk_bytes_per_row": disk / rows,
        "learn_s": learn_s,
        "code_rows_per_s": 1 / code_s,
        "write_rows_per_s": rows / build_s,
    }


class AnonymousPeak:
    """The largest anonymous memory of this process since it was entered, sampled."""

    def __enter__(self) -> AnonymousPeak:
        self.before = self.peak = _anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.peak = max(self.peak, _anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.bytes = max(self.peak, _anonymous_bytes()) - self.before


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def spent_ms(call: Callable[[], Any]) -> float:
    begun = time.process_time()
    call()
    return 1e3 * (time.process_time() - begun)


def ask(folder: Path) -> dict[str, Any]:
    """In a process of its own: open the index and ask it."""
    store, reference = Store(str(folder)), json.loads((folder / "manifest.ref").read_text())
    manifest, queries = read_manifest(store, StoredFile(**reference)), np.load(folder / "queries.npy")
    with AnonymousPeak() as memory:
        begun = time.process_time()
        group = ShardGroup(store, manifest)
        open_s = time.process_time() - begun
    begun = time.process_time()
    ShardGroup(store, manifest)
    again_s = time.process_time() - begun
    group.find(queries, K)
    single = [spent_ms(lambda q=query: group.find(q[None], K)) for query in queries]
    batch = min(spent_ms(lambda: group.find(queries, K)) for _ in range(3)) / len(queries)
    plain = ShardGroup(store, replace(manifest, short_codes=None))
    plain_ms = []
    expected, found = [], group.find(queries[:COMPARED], K)[1][:, 0]
    for query in queries[:COMPARED]:
        begun = time.process_time()
        expected.append(int(plain.find(query[None], K)[1][0, 0]))
        plain_ms.append(1e3 * (time.process_time() - begun))
    predicted = predict_memory(manifest.rows, 128)
    return {
        "open_s": open_s,
        "open_again_s": again_s,
        "ms_batch_1": float(np.median(single)),
        "ms_batch_64": batch,
        "plain_ms": float(np.median(plain_ms)),
        "kept": float(np.mean(found == expected)),
        "memory_bytes": memory.bytes,
        "predicted_bytes": predicted,
        "predicted_to_actual": predicted / max(1, memory.bytes),
    }


def scan_generated(rows: int) -> dict[str, Any]:
    """Short codes of so many rows, made in memory: a scan of all, and of an eighth of the lists."""
    vectors = read_sources(None)
    result: dict[str, Any] = {"rows": rows}
    for kind, lists in (("pq", 0), ("ivf-pq", LISTS)):
        quantiser = learn_quantiser(vectors, sketch(vectors), min(lists, len(vectors)), seed=0)
        if lists:  # as many lists as there would be; which rows are in them does not matter to the time
            coarse = units(np.random.default_rng(1).standard_normal((lists, 1024)))
            quantiser = Quantiser(DIM, quantiser.centroids, coarse)
        codes = np.concatenate(list(mix(quantiser.encode(vectors), rows, 8, 7)))
        owners = np.random.default_rng(2).integers(0, max(1, lists), rows, dtype=np.int32)
        with AnonymousPeak() as memory:
            scan = CodeScan(quantiser, [codes], [owners], max(1, lists // 8))
        scan.shortlist(vectors[:1], DEPTH, K)
        spent = [spent_ms(lambda s=scan, q=query: s.shortlist(q[None], DEPTH, K)) for query in vectors[:16]]
        result[kind] = {"scan_ms": float(np.median(spent)), "memory_bytes": memory.bytes}
        predicted = CodeScan.predict_memory(rows, quantiser.code_bytes, lists)
        result[kind]["predicted_to_actual"] = predicted / memory.bytes
        del codes
    return result


def run_apart(*arguments: str) -> dict[str, Any]:
    """This script in another process, which prints its result."""
    command = [sys.executable, __file__, *arguments]
    environment = {**os.environ, "CKN_SCALE_CACHE": tempfile.mkdtemp()}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def extrapolate(measured: list[dict[str, Any]], generated: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Groups of ten million rows, each with a core: by the line through what was measured."""
    sizes = np.array([one["rows"] for one in measured], float)
    fits = {
        name: np.polyfit(sizes, [one[name] for one in measured], 1)
        for name in ("ms_batch_1", "memory_bytes", "open_s")
    }
    rows = []
    for total in (10**7, 10**8, 10**9):
        groups = -(-total // GENERATED_ROWS)
        group = {name: float(np.polyval(line, GENERATED_ROWS)) for name, line in fits.items()}
        disk = measured[-1]["disk_bytes_per_row"] * total
        one = {"rows": total, "groups": groups, "disk_bytes": disk, "ms_a_group": group["ms_batch_1"]}
        one |= {
            "memory_bytes_a_group": group["memory_bytes"],
            "code_core_s": total / measured[-1]["code_rows_per_s"],
        }
        if generated is not None:
            lists_ms = generated["ivf-pq"]["scan_ms"] - generated["pq"]["scan_ms"] + group["ms_batch_1"]
            one["ms_a_group_with_lists"] = lists_ms
        rows.append(one)
    return rows


def draw(measured: list[dict[str, Any]], fitted: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots(1, 3)
    panels: tuple[tuple[str, Callable[..., float], Callable[..., float]], ...] = (
        ("disk, GB", lambda one: one["disk_bytes_per_row"] * one["rows"], lambda one: one["disk_bytes"]),
        (
            "memory, GB",
            lambda one: one["memory_bytes"],
            lambda one: one["groups"] * one["memory_bytes_a_group"],
        ),
        ("ms a query, one core a group", lambda one: one["ms_batch_1"], lambda one: one["ms_a_group"]),
    )
    for axis, (title, seen, fit) in zip(axes, panels, strict=True):
        scale = 1e9 if "GB" in title else 1
        for rows, value, form, label in ((measured, seen, "o-", "measured"), (fitted, fit, "s--", "fit")):
            axis.loglog(
                [one["rows"] for one in rows], [value(one) / scale for one in rows], form, label=label
            )
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("images")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="10000,100000,1000000")
    parser.add_argument("--vectors", type=Path, help="(N, 32768) real vectors, N ≥ 576")
    parser.add_argument("--folder", type=Path, help="where files are written; a temporary one by default")
    parser.add_argument("--no-generated", action="store_true", help="leave out the ten million")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--ask", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--scan", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    set_compute_threads(1)
    if options.ask is not None or options.scan is not None:
        print(json.dumps(ask(options.ask) if options.ask is not None else scan_generated(options.scan)))
        return
    vectors, measured = read_sources(options.vectors), []
    for rows in [int(one) for one in options.rows.split(",")]:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            one = write_index(Path(folder), rows, vectors)
            measured.append(one | run_apart("--ask", folder))
        print(json.dumps(measured[-1]), flush=True)
    generated = None if options.no_generated else run_apart("--scan", str(GENERATED_ROWS))
    fitted = extrapolate(measured, generated) if len(measured) > 1 else []
    for line in (generated, *fitted):
        print(json.dumps(line), flush=True)
    if options.json is not None:
        options.json.write_text(
            json.dumps({"measured": measured, "generated": generated, "fit": fitted}, indent=1)
        )
    if options.png is not None and fitted:
        draw(measured, fitted, options.png)


if __name__ == "__main__":
    main()
