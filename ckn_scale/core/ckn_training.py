"""Training a CKN: layer by layer, each from a sample of the sub-patches that it will see.

`train_ckn` does it in one process; the training steps call the same functions, one shard each. A layer's
filters are learned in closed form here (Nyström: they are centroids of unit sub-patches, and the kernel is
projected onto their span) or by stochastic gradient descent (`ckn_sgd`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.ckn import NORM_FLOOR, CknEncoder, check_patches, pad_batches, unfold_maps
from ckn_scale.core.ckn_inputs import InputSubpatches
from ckn_scale.core.ckn_model import Ckn, CknLayer, layer_sides, orientation_layer, truncate_spec
from ckn_scale.core.ckn_sgd import fit_sgd
from ckn_scale.core.kmeans import cluster
from ckn_scale.core.sampling import hash_priorities, smallest
from ckn_scale.core.specs import CknSpec, CknTrainingSpec, LayerSpec

logger = logging.getLogger(__name__)
_DRAW_BATCH = 64
_NEVER = np.iinfo(np.uint64).max


class LayerStore(Protocol):
    """Where networks are kept layer by layer: those that share their first layers learn them once."""

    def load(self, spec: CknSpec, *, complete: bool) -> Ckn | None:
        """The network of `spec`, which is the first layers of another unless it is `complete`."""
        ...

    def save(self, ckn: Ckn, *, complete: bool) -> None: ...


def train_ckn(
    patches: np.ndarray,
    spec: CknSpec,
    training: CknTrainingSpec,
    *,
    device: str = "cpu",
    store: LayerStore | None = None,
) -> Ckn:
    """Learn all layers from uint8 patches (N, S, S, 3); those that `store` has are taken from it."""
    ckn = start_ckn(spec, patches.shape[1])
    check_patches(patches, ckn)
    if len(patches) == 0:
        raise ValueError("train_ckn needs patches, got none")
    ids = smallest(hash_priorities(training.seed, np.arange(len(patches))), training.num_patches)
    ids.sort()
    per_patch = subpatches_per_patch(training, len(ids))
    while len(ckn.layers) < len(spec.layers):
        count = len(ckn.layers) + 1
        complete = count == len(spec.layers)
        known = None if store is None else store.load(truncate_spec(spec, count), complete=complete)
        if known is not None:
            ckn = known
            continue
        drawn = draw_subpatches(ckn, spec, patches[ids], ids, per_patch, seed=training.seed, device=device)
        sample = Subpatches.merge([drawn], training.num_subpatches)
        ckn = add_layer(ckn, spec, sample.rows, training, device=device)
        if store is not None:
            store.save(ckn, complete=complete)
    return ckn


def subpatches_per_patch(training: CknTrainingSpec, num_patches: int) -> int:
    """How many sub-patches are drawn from each of `num_patches`, so that together they are enough."""
    return -(-training.num_subpatches // num_patches)


def start_ckn(spec: CknSpec, patch_size_px: int) -> Ckn:
    """A CKN without learned layers: for `grad` the fixed orientation layer, else none."""
    layer_sides(spec, patch_size_px)
    fixed = (orientation_layer(spec.layers[0]),) if spec.learned_layers.start else ()
    return Ckn(truncate_spec(spec, max(1, len(fixed))), patch_size_px, fixed)


def add_layer(
    ckn: Ckn,
    spec: CknSpec,
    subpatches: np.ndarray,
    training: CknTrainingSpec,
    *,
    rate: float | None = None,
    device: str = "cpu",
) -> Ckn:
    """`ckn` with its next layer learned from unit sub-patches (n, q); `rate` is SGD's, if known."""
    index = len(ckn.layers)
    alpha = choose_alpha(subpatches, spec.alpha_quantile)
    layer = fit_layer(subpatches, spec.layers[index], alpha, training, rate=rate, device=device)
    if index + 1 == len(spec.layers) and not training.keep_last_factor:
        layer = CknLayer(layer.spec, layer.alpha, layer.weights, layer.bias)
    logger.info("learned layer %d of %s: α %.3f, %s", index, spec.channel, alpha, layer.spec)
    return Ckn(truncate_spec(spec, index + 1), ckn.patch_size_px, (*ckn.layers, layer))


def choose_alpha(subpatches: np.ndarray, quantile: float) -> float:
    """The quantile of the distances between row i of the first half and row i of the second."""
    half = len(subpatches) // 2
    if half == 0:
        raise ValueError(f"α needs at least two sub-patches, got {len(subpatches)}")
    distances = np.linalg.norm(subpatches[:half] - subpatches[half : 2 * half], axis=1)
    positive = distances[distances > 0]
    if len(positive) == 0:
        raise ValueError("all sub-patches are equal: there is nothing to learn from")
    return float(np.quantile(positive, quantile))


def fit_layer(
    subpatches: np.ndarray,
    spec: LayerSpec,
    alpha: float,
    training: CknTrainingSpec,
    *,
    rate: float | None = None,
    device: str = "cpu",
) -> CknLayer:
    """Filters whose responses' inner products approximate exp(−‖x − y‖²/(2α²))."""
    rows = torch.from_numpy(subpatches).to(device)
    if training.solver == "sgd":
        return CknLayer(spec, alpha, *fit_sgd(rows, spec.num_filters, alpha, training, rate=rate))
    weights, bias, factor = fit_nystrom(
        rows,
        spec.num_filters,
        alpha,
        iterations=training.kmeans_iterations,
        epsilon=training.nystrom_epsilon,
        seed=training.seed,
    )
    return CknLayer(spec, alpha, weights, bias, factor)


def fit_nystrom(
    subpatches: Tensor, num_filters: int, alpha: float, *, iterations: int, epsilon: float, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(weights, bias, factor): ψ(x) = factor · exp(weights x + bias) for unit x, ⟨ψ(x), ψ(y)⟩ ≈ kernel."""
    if len(subpatches) < num_filters:
        raise ValueError(f"{num_filters} filters need as many sub-patches, got {len(subpatches)}")
    found = cluster(subpatches, num_filters, iterations=iterations, seed=seed, spherical=True)
    centroids = found.double().cpu()
    factor = inverse_root(kernel(centroids @ centroids.T, alpha).numpy(), epsilon)
    weights = (centroids / alpha**2).numpy().astype(np.float32)
    bias = np.full(num_filters, -1 / alpha**2, np.float32)
    return weights, bias, factor.astype(np.float32)


def kernel(similarity: Tensor, alpha: float) -> Tensor:
    """exp(−‖x − y‖²/(2α²)) of unit vectors with inner product `similarity`."""
    return torch.exp((similarity - 1) / alpha**2)


def inverse_root(gram: np.ndarray, epsilon: float) -> np.ndarray:
    """K^(−1/2) of a symmetric matrix, in float64; directions below `epsilon` × the largest are dropped."""
    values, vectors = np.linalg.eigh(gram.astype(np.float64))
    kept = values > epsilon * values[-1]
    scales = np.where(kept, 1 / np.sqrt(np.where(kept, values, 1)), 0)
    root: np.ndarray = (vectors * scales) @ vectors.T
    return root


@dataclass(frozen=True)
class Subpatches:
    """Unit rows (n, q) float32 with the priority (n,) uint64 each was chosen by."""

    rows: np.ndarray
    priorities: np.ndarray

    @classmethod
    def merge(cls, parts: list[Subpatches], count: int) -> Subpatches:
        """The `count` first of all parts; the same however the patches were split into parts."""
        priorities = np.concatenate([part.priorities for part in parts])
        chosen = smallest(priorities, count)
        return cls(np.concatenate([part.rows for part in parts])[chosen], priorities[chosen])


def draw_subpatches(
    ckn: Ckn,
    spec: CknSpec,
    patches: np.ndarray,
    patch_ids: np.ndarray,
    per_patch: int,
    *,
    seed: int,
    device: str = "cpu",
) -> Subpatches:
    """Up to `per_patch` unit sub-patches of each patch as the next layer of `ckn` sees them.

    Positions with nothing in them are left out.
    """
    extract = _make_extractor(ckn, spec, device)
    parts = []
    for start, batch in pad_batches(patches, _DRAW_BATCH):
        ids = patch_ids[start : start + _DRAW_BATCH]
        with torch.inference_mode():
            rows = extract(batch)[: len(ids)]
            parts.append(_draw_rows(rows, ids, per_patch, seed, len(ckn.layers)))
    return Subpatches.merge(parts, len(patches) * per_patch)


def _make_extractor(ckn: Ckn, spec: CknSpec, device: str) -> Callable[[np.ndarray], Tensor]:
    """uint8 patches (64, S, S, 3) → sub-patches (64, positions, q) of the next layer."""
    if not ckn.layers:
        inputs = InputSubpatches(spec, ckn.patch_size_px, _DRAW_BATCH, torch.device(device))
        basis = inputs.basis

        def read_pixels(batch: np.ndarray) -> Tensor:
            coordinates = inputs(batch)[:, :, : inputs.count].mT
            return coordinates if basis is None else coordinates @ basis

        return read_pixels
    encoder = CknEncoder(ckn, batch_size=_DRAW_BATCH, device=device)
    kernel, filters = spec.layers[len(ckn.layers)].patch_px, ckn.spec.layers[-1].num_filters
    side = layer_sides(ckn.spec, ckn.patch_size_px)[-1][1]

    def extract(batch: np.ndarray) -> Tensor:
        maps = encoder.encode_batch(batch).view(-1, side, side, filters)
        return unfold_maps(maps, kernel).flatten(3).flatten(1, 2)

    return extract


def _draw_rows(rows: Tensor, ids: np.ndarray, per_patch: int, seed: int, layer: int) -> Subpatches:
    """The sub-patches (B, positions, q) with the smallest priorities in each patch."""
    norms = torch.linalg.vector_norm(rows, dim=2)
    keys = np.arange(rows.shape[1])[None]
    priorities = hash_priorities(seed, np.array([[layer]]), ids[:, None], keys)
    priorities[norms.cpu().numpy() < NORM_FLOOR] = _NEVER
    per_patch = min(per_patch, rows.shape[1])
    positions = np.argpartition(priorities, per_patch - 1, axis=1)[:, :per_patch]
    chosen = np.take_along_axis(priorities, positions, axis=1)
    patch, slot = np.nonzero(chosen != _NEVER)
    where = torch.from_numpy(patch), torch.from_numpy(positions[patch, slot])
    unit = rows[where] / norms[where][:, None]
    return Subpatches(unit.float().cpu().numpy(), chosen[patch, slot])


def measure_kernel_error(layer: CknLayer, left: np.ndarray, right: np.ndarray) -> float:
    """mean (⟨ψ(x), ψ(y)⟩ − κ(x, y))² / mean κ² over pairs of unit rows: 0 is exact, 1 is predicting zero."""
    target = np.exp((np.sum(left * right, axis=1, dtype=np.float64) - 1) / layer.alpha**2)
    features = [_evaluate_features(layer, rows) for rows in (left, right)]
    predicted = np.sum(features[0] * features[1], axis=1)
    return float(np.mean((predicted - target) ** 2) / np.mean(target**2))


def _evaluate_features(layer: CknLayer, rows: np.ndarray) -> np.ndarray:
    features: np.ndarray = np.exp(rows.astype(np.float64) @ layer.weights.T + layer.bias)
    if layer.factor is not None:
        features = features @ layer.factor.T
    return features
