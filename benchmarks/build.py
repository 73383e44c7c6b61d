"""Rows a second that an index of each kind is built at, and what is learned first, against plain FAISS.

    python benchmarks/build.py [--rows 4000] [--dim 32768] [--json FILE]

Unit vectors drawn at random, as `vectors/` keeps them (signs; float16 for exact). Ours goes the way of the
build: codes to an index shard in FAISS's own format; for pq and ivf-pq codes back to vectors, then to short
codes. FAISS is given the float32 vectors and adds them to an index with the same bytes a row. CPU time of one
thread. The steps are the same for every index shard, so cores and nodes multiply the rate.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything that starts a thread pool

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ckn_scale.core.coarse_lists import learn_lists
from ckn_scale.core.faiss_library import import_faiss
from ckn_scale.core.numerics import set_compute_threads
from ckn_scale.core.plain_index import read_blocks
from ckn_scale.core.short_codes import Quantiser, learn_quantiser
from ckn_scale.core.vector_codes import make_codec
from ckn_scale.core.vector_index import StoredIndex, build_index

LISTS = 64
LEARNED_FROM = 2048


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.process_time()
    result = call()
    return result, time.process_time() - begun


def encode_all(index: StoredIndex, quantiser: Quantiser) -> int:
    """The short codes of an index shard, as the build makes them; their bytes."""
    made = 0
    for _, vectors in read_blocks(index):
        made += quantiser.encode(vectors).nbytes + quantiser.assign(vectors).nbytes
    return made


def learn(sample: np.ndarray, lists: int) -> Quantiser:
    coarse = learn_lists(sample.__getitem__, len(sample), lists, 0) if lists else None
    return learn_quantiser(sample, seed=0, coarse=coarse)


def make_rival(kind: str, dim: int) -> Any:
    faiss = import_faiss()
    metric = faiss.METRIC_INNER_PRODUCT
    if kind == "exact":
        return faiss.IndexFlatIP(dim)
    if kind == "signs":
        return faiss.IndexRaBitQ(dim, metric)
    if kind == "pq":
        return faiss.IndexPQFastScan(dim, 256, 4, metric)
    index = faiss.IndexIVFPQFastScan(faiss.IndexFlatIP(dim), dim, LISTS, 256, 4, metric)
    index.by_residual = False
    return index


def measure(kind: str, vectors: np.ndarray) -> dict[str, Any]:
    rows, dim = vectors.shape
    codec = make_codec("float16" if kind == "exact" else "signs", dim)
    codes, ids = codec.encode(vectors), np.arange(rows)
    index, add_s = timed(lambda: build_index(codec, codes, ids))
    data, write_s = timed(index.to_bytes)
    result: dict[str, Any] = {"kind": kind, "rows": rows, "learn_s": 0.0, "bytes_per_row": len(data) / rows}
    short_s = 0.0
    if "pq" in kind:
        sample, lists = vectors[:LEARNED_FROM], LISTS if kind == "ivf-pq" else 0
        quantiser, result["learn_s"] = timed(lambda: learn(sample, lists))
        made, short_s = timed(lambda: encode_all(index, quantiser))
        result["bytes_per_row"] += made / rows
    result["rows_per_s"] = rows / (add_s + write_s + short_s)
    rival = make_rival(kind, dim)
    _, result["faiss_learn_s"] = timed(lambda: rival.train(vectors[:LEARNED_FROM]))
    _, spent = timed(lambda: rival.add(vectors))
    result["faiss_rows_per_s"] = rows / spent
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--dim", type=int, default=32768)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    set_compute_threads(1)
    vectors = np.random.default_rng(0).standard_normal((options.rows, options.dim), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    results = []
    for kind in ("exact", "signs", "pq", "ivf-pq"):
        one = measure(kind, vectors)
        results.append(one)
        print(
            f"{kind:>7}: {one['rows_per_s']:,.0f} rows/s (FAISS {one['faiss_rows_per_s']:,.0f}), "
            f"{one['bytes_per_row']:,.0f} bytes a row; learning {one['learn_s']:.1f} s "
            f"(FAISS {one['faiss_learn_s']:.1f})",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
