"""Milliseconds a query: our sharded search against plain FAISS over the same vectors, each kind of index.

    python benchmarks/search.py [--rows 100000] [--kinds exact,signs,pq,ivf-pq] [--json FILE]

Unit vectors drawn at random (exact: 1,024 numbers, the others 4,096); queries are rows with noise. Ours is a
group of 1 or of 8 shards, opened from files as a search opens them. FAISS is one index in memory: IndexFlatIP
as it comes or with its BLAS switched on, whichever is faster; IndexRaBitQ; and IndexRefine of a PQ fast-scan
(or an IVF of it) and an IndexRaBitQ, with as long a shortlist. Rotations of queries count on both sides. CPU
time of one thread, the least of several rounds; the share of queries whose row comes first stands beside it.
`filtered` asks for ten rows of what a filter admits, 1 of 10,000; its masks are made once, as for one in use.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything that starts a thread pool

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ckn_scale.core.coarse_lists import learn_lists
from ckn_scale.core.faiss_library import import_faiss
from ckn_scale.core.numerics import set_compute_threads
from ckn_scale.core.short_codes import Quantiser, learn_quantiser
from ckn_scale.core.vector_codes import SignCodec, empty_sign_index
from ckn_scale.core.vector_index import QUERY_BITS, build_exact, build_signs
from ckn_scale.search.filters import only_ids
from ckn_scale.search.shard import ShardGroup
from ckn_scale.storage.index_files import (
    IndexManifest,
    ShortCodes,
    make_side_table,
    write_index_shard,
    write_short_codes,
)
from ckn_scale.storage.models import save_model
from ckn_scale.storage.store import Store

K = 10
ROUNDS = 5
QUERIES = 64
SINGLE = 16  # of them that are asked one by one
DIMS = {"exact": 1024, "signs": 4096, "pq": 4096, "ivf-pq": 4096}
DEPTH = 2000
LISTS, PROBES = 64, 16
NOISE = 1.5  # a query's similarity to its row is 0.55
FAISS_DEFAULT = 128_000  # distance_compute_blas_threshold of FAISS 1.15: queries × dimensions


def measure_ms(search: Callable[[np.ndarray], Any], batches: Sequence[np.ndarray]) -> float:
    """The least CPU milliseconds a query over a few rounds of these batches."""
    spent = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        for batch in batches:
            search(batch)
        spent.append(time.process_time() - begun)
    return 1e3 * min(spent) / sum(map(len, batches))


def random_units(rows: int, dim: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((rows, dim), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def plant_queries(vectors: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    chosen = np.random.default_rng(seed).choice(len(vectors), QUERIES, replace=False)
    noisy = vectors[chosen] + NOISE * random_units(QUERIES, vectors.shape[1], seed + 1)
    return noisy / np.linalg.norm(noisy, axis=1, keepdims=True), chosen


def write_group(
    folder: Path, vectors: np.ndarray, kind: str, num_shards: int, quantiser: Quantiser | None
) -> ShardGroup:
    """The files of an index of this kind, opened."""
    store, dim, shards = Store(str(folder)), vectors.shape[1], []
    stored, codec = "exact" if kind == "exact" else "signs", SignCodec(dim)
    for number, ids in enumerate(np.array_split(np.arange(len(vectors)), num_shards)):
        rows = vectors[ids]
        built = build_exact(rows, ids) if kind == "exact" else build_signs(codec.encode(rows), ids, dim)
        table = make_side_table(pa.array(ids), [f"{one}.jpg" for one in ids])
        shard = write_index_shard(store, "index", number, built.to_bytes(), table)
        if quantiser is not None:
            codes = write_short_codes(
                store, f"index/{number}.codes", quantiser.encode(rows), quantiser.assign(rows)
            )
            shard = replace(shard, codes=codes)
        shards.append(shard)
    manifest = IndexManifest("b", dim, len(vectors), {}, tuple(shards), stored)
    if quantiser is not None:
        file = save_model(store, "quantiser", quantiser.to_part())
        manifest = replace(manifest, short_codes=ShortCodes(kind, file, DEPTH, PROBES))
    return ShardGroup(store, manifest)


def make_plain(vectors: np.ndarray, kind: str) -> Callable[[np.ndarray], np.ndarray]:
    """Plain FAISS: queries → ids."""
    faiss = import_faiss()
    if kind == "exact":
        flat = faiss.IndexFlatIP(vectors.shape[1])
        flat.add(vectors)
        return lambda queries: flat.search(queries, K)[1]
    codec = SignCodec(vectors.shape[1])
    rotation = codec.rotation
    signs = empty_sign_index(rotation.padded_dim)
    signs.qb = QUERY_BITS
    signs.add_sa_codes(codec.encode(vectors))
    if kind == "signs":
        return lambda queries: signs.search(rotation.apply(queries), K)[1]
    rotated = rotation.apply(vectors)
    if kind == "pq":
        base = faiss.IndexPQFastScan(rotation.padded_dim, 256, 4, faiss.METRIC_INNER_PRODUCT)
    else:
        coarse = faiss.IndexFlatIP(rotation.padded_dim)
        base = faiss.IndexIVFPQFastScan(
            coarse, rotation.padded_dim, LISTS, 256, 4, faiss.METRIC_INNER_PRODUCT
        )
        base.by_residual, base.nprobe = False, PROBES
    base.train(rotated[:4096])
    base.add(rotated)
    refined = faiss.IndexRefine(base, signs)
    refined.k_factor = DEPTH / K
    return lambda queries: refined.search(rotation.apply(queries), K)[1]


def measure_plain(
    plain: Callable[[np.ndarray], np.ndarray], batches: Sequence[np.ndarray], kind: str
) -> float:
    faiss = import_faiss()
    spent = []
    for threshold in (FAISS_DEFAULT, 1) if kind == "exact" else (FAISS_DEFAULT,):
        faiss.cvar.distance_compute_blas_threshold = threshold
        spent.append(measure_ms(plain, batches))
    return min(spent)


def compare(kind: str, rows: int, folder: Path) -> list[dict[str, Any]]:
    vectors = random_units(rows, DIMS[kind], 0)
    queries, truth = plant_queries(vectors, 1)
    quantiser = None
    if "pq" in kind:
        sample = vectors[:4096]
        coarse = learn_lists(sample.__getitem__, len(sample), LISTS, 0) if kind == "ivf-pq" else None
        quantiser = learn_quantiser(sample, seed=0, coarse=coarse)
    plain = make_plain(vectors, kind)
    batches = {"1": np.split(queries[:SINGLE], SINGLE), str(QUERIES): [queries]}
    rival = {name: measure_plain(plain, asked, kind) for name, asked in batches.items()}
    rival_first = float(np.mean(plain(queries)[:, 0] == truth))
    results = []
    for num_shards in (1, 8):
        group = write_group(folder / f"{kind}-{num_shards}", vectors, kind, num_shards, quantiser)
        first = float(np.mean(group.find(queries, K)[1][:, 0] == truth))
        few = group.allow(only_ids(np.random.default_rng(2).choice(rows, max(K, rows // 10_000)).tolist()))
        filtered = measure_ms(lambda one, g=group, f=few: g.find(one, K, allowed=f), batches["1"])
        for name, asked in batches.items():
            ours = measure_ms(lambda one, g=group: g.find(one, K), asked)
            one = {"kind": kind, "rows": rows, "shards": num_shards, "batch": name, "ours_ms": ours}
            one |= {"faiss_ms": rival[name], "rate": rival[name] / ours, "first": first}
            results.append(one | {"faiss_first": rival_first, "filter_ms": filtered})
            print(
                f"{kind:>7}, {rows:,} rows, {num_shards} shards, batch {name:>2}: "
                f"FAISS {rival[name]:.2f}, ours {ours:.2f} ms a query: {one['rate']:.2f} of its rate; "
                f"first {rival_first:.3f} and {first:.3f}; filtered, batch 1: {filtered:.2f} ms",
                flush=True,
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--kinds", default=",".join(DIMS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    set_compute_threads(1)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds.split(","):
            results += compare(kind, options.rows, Path(folder))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
