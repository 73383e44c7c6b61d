"""Milliseconds a query: our exact index against plain FAISS over the same vectors.

    python benchmarks/search.py [--rows 100000] [--dim 1024] [--json FILE]

Random unit vectors, CPU time of one thread, the least of several rounds. FAISS is timed as it comes and with
its BLAS switched on (`distance_compute_blas_threshold`), which is what ours uses; ours scores its shortlist
again in double precision, so that an answer depends neither on its batch nor on the cut into shards.
The last row asks for a vector that a part of the rows equals: all of them tie.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ckn_scale.core.numerics import import_faiss
from ckn_scale.core.vector_index import VectorIndex, build_exact

K = 10
ROUNDS = 5
FAISS_DEFAULT = 128_000  # distance_compute_blas_threshold of FAISS 1.15: queries × dimensions
COPIES = 8_000


def measure_ms(call: Callable[[], Any], queries: int) -> float:
    """The least CPU milliseconds a query over a few rounds."""
    spent = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        call()
        spent.append(time.process_time() - begun)
    return 1e3 * min(spent) / queries


def random_units(rows: int, dim: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((rows, dim), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def compare(index: VectorIndex, plain: Any, name: str, queries: np.ndarray) -> dict[str, Any]:
    faiss = import_faiss()
    as_it_comes, with_blas = FAISS_DEFAULT, 1
    measured: dict[str, Any] = {"queries": name}
    for label, threshold in (("faiss_ms", as_it_comes), ("faiss_blas_ms", with_blas)):
        faiss.cvar.distance_compute_blas_threshold = threshold
        measured[label] = measure_ms(lambda: plain.search(queries, K), len(queries))
    measured["ours_ms"] = measure_ms(lambda: index.search(queries, K), len(queries))
    measured["ratio"] = measured["ours_ms"] / min(measured["faiss_ms"], measured["faiss_blas_ms"])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    faiss = import_faiss()
    faiss.omp_set_num_threads(1)
    vectors, queries = random_units(options.rows, options.dim, 0), random_units(64, options.dim, 1)
    vectors[:COPIES] = vectors[0]
    index = build_exact(vectors, np.arange(options.rows))
    plain = faiss.IndexFlatIP(options.dim)
    plain.add(vectors)
    results = []
    for name, asked in (("1", queries[:1]), ("64", queries), (f"1, {COPIES:,} equal rows", vectors[:1])):
        one = compare(index, plain, name, asked)
        results.append(one)
        print(
            f"{name:>20} queries: FAISS {one['faiss_ms']:.2f}, with BLAS {one['faiss_blas_ms']:.2f}, "
            f"ours {one['ours_ms']:.2f} ms a query: {one['ratio']:.2f} × the faster",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
