"""Lists of rows that are alike: each row is in the list of the centroid that is nearest to it.

Centroids are of whole vectors: those of a sketch with 1,024 numbers send a query to the wrong lists far too
often (benchmarks/README.md). They are learned by spherical k-means from rows that are decoded a block at a
time, so that memory holds the centroids twice and one block, and they are kept and compared the way indexed
images are, by their signs: 4 KB each for 32,768 numbers instead of 128. Signs of short vectors tell too
little; these are kept as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch.nn.functional import normalize

from ckn_scale.core.kmeans import add_to_clusters
from ckn_scale.core.sampling import hash_priorities, smallest
from ckn_scale.core.vector_codes import VectorCodec, make_codec
from ckn_scale.core.vector_index import StoredIndex, build_index

ITERATIONS = 10
VECTORS_PER_LIST = 39  # that a centroid is learned from, where there are so many
SIGNS_FROM_DIM = 8192
BLOCK_BYTES = 32 * 2**20  # of decoded rows

ReadRows: TypeAlias = Callable[[np.ndarray], np.ndarray]  # positions (N,) → (N, dim) float32


def choose_codec(dim: int) -> VectorCodec:
    """How centroids of so many numbers are kept."""
    return make_codec("signs" if dim >= SIGNS_FROM_DIM else "float16", dim)


def open_lists(codes: np.ndarray, dim: int) -> StoredIndex:
    """An index of the centroids, whose ids are the numbers of the lists."""
    return build_index(choose_codec(dim), codes, np.arange(len(codes)))


def predict_memory(dim: int, lists: int) -> int:
    """Bytes that learning so many centroids takes at its peak, beside the rows they are learned from."""
    return 4 * dim * lists * 2 + 3 * BLOCK_BYTES


def learn_lists(
    read_rows: ReadRows, num_rows: int, lists: int, seed: int, *, device: str = "cpu"
) -> np.ndarray:
    """Codes (lists, code_bytes) of centroids of `num_rows` rows, each read once in every iteration.

    It starts at rows chosen by hash; an empty list is restarted at a row that fits its own badly. The same
    rows in the same order give the same bytes. ValueError when there are fewer rows than lists.
    """
    if not 1 <= lists <= num_rows:
        raise ValueError(f"{lists} lists need as many rows, got {num_rows}")
    dim = read_rows(np.arange(1)).shape[1]
    step = max(1, BLOCK_BYTES // (4 * dim))

    def read(positions: np.ndarray) -> torch.Tensor:
        return normalize(torch.from_numpy(read_rows(positions)).to(device))

    centroids = torch.empty((lists, dim), device=device)
    first = smallest(hash_priorities(seed, np.arange(num_rows)), lists)
    for start in range(0, lists, step):
        centroids[start : start + step] = read(first[start : start + step])
    for _ in range(ITERATIONS):
        sums, counts = torch.zeros_like(centroids), torch.zeros(lists, dtype=torch.int64, device=device)
        fits = np.empty(num_rows, np.float32)
        for start in range(0, num_rows, step):
            rows = read(np.arange(start, min(start + step, num_rows)))
            best = (rows @ centroids.T).max(dim=1)
            add_to_clusters(sums, best.indices, rows)
            counts += torch.bincount(best.indices, minlength=lists)
            fits[start : start + step] = best.values.cpu().numpy()
        empty = torch.nonzero(counts == 0).flatten()
        if len(empty):
            worst = np.sort(np.argsort(fits, kind="stable")[: len(empty)])
            for owner, position in zip(empty.tolist(), worst.tolist(), strict=True):
                sums[owner] = read(np.array([position]))[0]
        centroids = normalize(sums, out=sums)
    codec = choose_codec(dim)
    codes = [codec.encode(centroids[start : start + step].cpu().numpy()) for start in range(0, lists, step)]
    return np.concatenate(codes)
