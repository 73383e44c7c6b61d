"""VLAD: the residuals of an image's descriptors, summed per visual word."""

from __future__ import annotations

import numpy as np
import torch

from ckn_scale.core.codebook import assign_words


def aggregate_vlad(descriptors: np.ndarray, centroids: np.ndarray, *, intra_normalise: bool) -> np.ndarray:
    """(N, D) descriptors and (K, D) words → (K · D,) float32: sign-square-root, [unit blocks], unit length.

    Zeros when there is no descriptor. Descriptors that are zero (blank patches) do not count.
    """
    blocks = sum_residuals(descriptors, centroids)
    blocks = np.sign(blocks) * np.sqrt(np.abs(blocks))
    if intra_normalise:
        blocks = _unit(blocks, axis=1)
    return _unit(blocks, axis=None).astype(np.float32).ravel()


def sum_residuals(descriptors: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Σ (x − c) over the descriptors x of each word c: (K, D) float64."""
    rows = descriptors[np.any(descriptors != 0, axis=1)] if len(descriptors) else descriptors
    words = torch.from_numpy(assign_words(rows, centroids))
    sums = torch.zeros(centroids.shape, dtype=torch.float64)
    sums.index_add_(0, words, torch.from_numpy(rows.astype(np.float64)))
    counts = torch.bincount(words, minlength=len(centroids))
    return (sums - counts[:, None] * torch.from_numpy(centroids).double()).numpy()


def _unit(values: np.ndarray, axis: int | None) -> np.ndarray:
    norms = np.linalg.norm(values) if axis is None else np.linalg.norm(values, axis=axis, keepdims=True)
    return values / np.where(norms > 0, norms, 1)
