"""The closed form: filters are centroids of unit sub-patches, the kernel is projected onto their span."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.sampling import hash_priorities, smallest

_BLOCK_ROWS = 16_384


def cluster_on_sphere(points: Tensor, num_clusters: int, *, iterations: int, seed: int) -> Tensor:
    """Spherical k-means of unit rows (n, q): (num_clusters, q) unit centroids.

    Starts at points chosen by hash; an empty cluster is restarted at the worst-fitting point.
    """
    if len(points) < num_clusters:
        raise ValueError(f"{num_clusters} filters need as many sub-patches, got {len(points)}")
    chosen = smallest(hash_priorities(seed, np.arange(len(points))), num_clusters)
    centroids = points[torch.from_numpy(chosen).to(points.device)].clone()
    for _ in range(iterations):
        sums, counts, worst = _sum_clusters(points, centroids)
        empty = torch.nonzero(counts == 0).flatten()
        sums[empty] = points[worst[: len(empty)]]
        centroids = torch.nn.functional.normalize(sums)
    return centroids


def _sum_clusters(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum and count of each cluster, and the points in order of their fit, worst first."""
    sums, counts = torch.zeros_like(centroids), torch.zeros(len(centroids), device=points.device)
    fits = points.new_empty(len(points))
    for start in range(0, len(points), _BLOCK_ROWS):
        block = points[start : start + _BLOCK_ROWS]
        best = (block @ centroids.T).max(dim=1)
        fits[start : start + _BLOCK_ROWS] = best.values
        add_to_clusters(sums, best.indices, block)
        counts += torch.bincount(best.indices, minlength=len(centroids))
    worst = torch.topk(fits, min(len(centroids), len(points)), largest=False).indices
    return sums, counts, worst


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
    chosen = torch.nn.functional.one_hot(clusters, len(sums)).to(rows.dtype)
    sums.addmm_(chosen.T, rows)


def kernel(similarity: Tensor, alpha: float) -> Tensor:
    """exp(−‖x − y‖²/(2α²)) of unit vectors with inner product `similarity`."""
    return torch.exp((similarity - 1) / alpha**2)


def inverse_root(gram: np.ndarray, epsilon: float) -> np.ndarray:
    """K^(−1/2) of a symmetric matrix, in float64; directions below `epsilon` × the largest are dropped."""
    values, vectors = np.linalg.eigh(gram.astype(np.float64))
    kept = values > epsilon * values[-1]
    scales = np.where(kept, 1 / np.sqrt(np.where(kept, values, 1)), 0)
    return (vectors * scales) @ vectors.T


def fit_nystrom(
    subpatches: Tensor, num_filters: int, alpha: float, *, iterations: int, epsilon: float, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(weights, bias, factor): ψ(x) = factor · exp(weights x + bias) for unit x, ⟨ψ(x), ψ(y)⟩ ≈ kernel."""
    centroids = cluster_on_sphere(subpatches, num_filters, iterations=iterations, seed=seed).double().cpu()
    factor = inverse_root(kernel(centroids @ centroids.T, alpha).numpy(), epsilon)
    weights = (centroids / alpha**2).numpy().astype(np.float32)
    bias = np.full(num_filters, -1 / alpha**2, np.float32)
    return weights, bias, factor.astype(np.float32)
