"""k-means by Lloyd's iterations: of descriptors (for a codebook), of unit vectors (for a CKN's filters)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.sampling import hash_priorities, smallest

_BLOCK_ROWS = 16_384
_BLOCK_PRODUCTS = 1 << 24  # of rows and centroids, at a time


def cluster(
    points: Tensor, num_clusters: int, *, iterations: int, seed: int, spherical: bool = False
) -> Tensor:
    """Centroids (num_clusters, D) of points (N, D), float32.

    Starts at points chosen by hash; an empty cluster is restarted at a point that fits its own badly.
    `spherical`: points are unit vectors, compared by their inner product, and so are the centroids.
    ValueError when there are fewer points than clusters.
    """
    if len(points) < num_clusters:
        raise ValueError(f"{num_clusters} clusters need as many points, got {len(points)}")
    chosen = smallest(hash_priorities(seed, np.arange(len(points))), num_clusters)
    centroids = points[torch.from_numpy(chosen).to(points.device)].clone()
    for _ in range(iterations):
        clusters, scores = find_nearest(points, centroids, spherical=spherical)
        sums = torch.zeros_like(centroids, dtype=torch.float32 if spherical else torch.float64)
        for start in range(0, len(points), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            add_to_clusters(sums, clusters[block], points[block].to(sums.dtype))
        counts = torch.bincount(clusters, minlength=num_clusters)
        empty = torch.nonzero(counts == 0).flatten()
        if len(empty):
            if spherical:
                worst = torch.topk(scores, num_clusters, largest=False).indices[: len(empty)]
            else:
                distances = points.square().sum(dim=1) - 2 * scores
                worst = torch.argsort(distances, descending=True, stable=True)[: len(empty)]
            sums[empty], counts[empty] = points[worst].to(sums.dtype), 1
        centroids = torch.nn.functional.normalize(sums) if spherical else (sums / counts[:, None]).float()
    return centroids


def find_nearest(points: Tensor, centroids: Tensor, *, spherical: bool = False) -> tuple[Tensor, Tensor]:
    """The nearest centroid (N,) of each point (N, D), and its score: x·c, less ‖c‖²/2 unless `spherical`."""
    half_squares = centroids.square().sum(dim=1).mul_(0 if spherical else 0.5)
    block = min(_BLOCK_ROWS, max(256, _BLOCK_PRODUCTS // len(centroids)))
    clusters, scores = [], []
    for start in range(0, len(points), block):
        best = compare_to_centroids(points[start : start + block], centroids, half_squares).max(dim=1)
        clusters.append(best.indices)
        scores.append(best.values)
    return torch.cat(clusters), torch.cat(scores)


def compare_to_centroids(points: Tensor, centroids: Tensor, half_squares: Tensor) -> Tensor:
    """(N, K): x·c − ‖c‖²/2, the largest where c is nearest to x."""
    return torch.addmm(half_squares, points, centroids.T, beta=-1)


def add_to_clusters(sums: Tensor, clusters: Tensor, rows: Tensor) -> None:
    """Add each row to the sum of its cluster, in an order that is the same each time.

    On a CPU `index_add_` goes through the rows in order. On CUDA it adds by atomics in whatever order
    threads arrive, so equal runs would differ in the last bits: there a product with one-hot rows is used.
    """
    if sums.is_cuda:
        add_by_product(sums, clusters, rows)
    else:
        sums.index_add_(0, clusters, rows)


def add_by_product(sums: Tensor, clusters: Tensor, rows: Tensor) -> None:
    """The same sums by a product with one-hot rows."""
    chosen = torch.nn.functional.one_hot(clusters, len(sums)).to(rows.dtype)
    sums.addmm_(chosen.T, rows)
