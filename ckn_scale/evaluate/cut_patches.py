"""Descriptors on ready-cut patches: FPR@95 over pairs, and RomePatches' mAP over views of points."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ckn_scale.config import Settings
from ckn_scale.core.descriptors.deepcompare import PairNetwork
from ckn_scale.core.sampling import hash_priorities, smallest
from ckn_scale.evaluate.cache import ContentCache
from ckn_scale.evaluate.descriptors import PatchSource, Request, fit_member, list_members
from ckn_scale.evaluate.matching import measure_distances
from ckn_scale.evaluate.metrics import average_precision, average_precision_by_steps, false_positive_rate
from ckn_scale.evaluate.patch_sets import PatchPairs, PatchViews
from ckn_scale.evaluate.regions import KeyedDescriptor, RegionReader
from ckn_scale.evaluate.report import format_table, points
from ckn_scale.evaluate.training_images import Progress, TrainingPatches, find_images

DESCRIBE_ROWS = 4096
Figures = dict[str, float]  # the first says which smoothing is best, larger is better


@dataclass(frozen=True)
class CutCell:
    """One descriptor at one smoothing."""

    smoothing_px: float | None  # none: the descriptor's own
    figures: Figures
    dim: int
    train_seconds: float
    describe_seconds: float


def measure_cut_patches(
    patch_set: PatchPairs | PatchViews,
    requests: Sequence[Request],
    smoothings_px: Sequence[float | None],
    source: PatchSource,
    cache: ContentCache,
    on_progress: Progress,
    pair_networks: Sequence[PairNetwork] = (),
) -> dict[str, list[CutCell]]:
    """Every request at every smoothing; learned descriptors are fitted on the source's patches.

    Networks that compare patches and describe none see them as they are.
    """
    cells: dict[str, list[CutCell]] = {request.name: [] for request in requests}
    for network in pair_networks:
        started = time.perf_counter()
        figures = score_patch_set(patch_set, partial(_compare, network, patch_set.patches))
        cells[network.name] = [CutCell(0.0, figures, 0, 0.0, time.perf_counter() - started)]
    for done, smoothing_px in enumerate(smoothings_px):
        described = {}
        for member in list_members(requests):
            keyed = fit_member(member, smoothing_px, source, cache)
            described[member.label] = (keyed, *_describe(keyed, patch_set.patches))
        for request in requests:
            keyed, rows, seconds = zip(*(described[member.label] for member in request.members), strict=True)
            figures = score_patch_set(patch_set, partial(measure_rows, np.concatenate(rows, axis=1)))
            dim, trained = sum(one.dim for one in keyed), sum(one.train_seconds for one in keyed)
            cells[request.name].append(CutCell(smoothing_px, figures, dim, trained, sum(seconds)))
        on_progress("smoothings", done + 1, len(smoothings_px))
    return cells


def make_source(
    patch_set: PatchPairs | PatchViews,
    train_images: Path | None,
    settings: Settings,
    cache: ContentCache,
    on_progress: Progress,
) -> PatchSource:
    """Patches to learn on, of the set's size: regions of the training images, or else the set's own."""
    if train_images is None:
        order = smallest(hash_priorities(settings.sample.seed, np.arange(len(patch_set.patches))), 2**62)
        return lambda count: as_colour(patch_set.patches[order[:count]])
    spec = replace(settings.patches, size_px=patch_set.patches.shape[1])
    reader = RegionReader(settings.images, settings.keypoints, spec, cache)
    training = TrainingPatches(find_images(train_images), reader, on_progress)
    return training.source(spec.region, settings.sample)


def as_colour(patches: np.ndarray) -> np.ndarray:
    """(N, S, S) or (N, S, S, 3) → (N, S, S, 3)."""
    return patches if patches.ndim == 4 else np.repeat(patches[..., None], 3, axis=3)


def _describe(keyed: KeyedDescriptor, patches: np.ndarray) -> tuple[np.ndarray, float]:
    started, rows = time.perf_counter(), []
    for start in range(0, len(patches), DESCRIBE_ROWS):
        rows.append(keyed.descriptor.describe(as_colour(patches[start : start + DESCRIBE_ROWS])))
    return np.concatenate(rows), time.perf_counter() - started


Distances = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of pairs of patches by their positions


def measure_rows(rows: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Squared distances of descriptors (N, D), one for each patch of the set."""
    if len(first) and (first == first[0]).all():
        distances: np.ndarray = measure_distances(rows[first[:1]], rows[second])[0]
        return distances
    squares: np.ndarray = np.sum((rows[first] - rows[second]) ** 2, axis=1)
    return squares


def _compare(network: PairNetwork, patches: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return -network.compare(patches[first], patches[second])


def score_patch_set(patch_set: PatchPairs | PatchViews, distances: Distances) -> Figures:
    """The figures of what compares the patches of the set."""
    if isinstance(patch_set, PatchPairs):
        return score_pairs(patch_set, distances)
    return score_views(patch_set, distances)


def score_pairs(pairs: PatchPairs, distances: Distances) -> Figures:
    """FPR at 95 % recall over the pairs."""
    rate = false_positive_rate(distances(pairs.first, pairs.second), pairs.matches)
    return {"score": 1 - rate, "fpr95": rate}


def score_views(views: PatchViews, distances: Distances) -> Figures:
    """Each query against all that are no query; both flavours of average precision."""
    targets = np.flatnonzero(~views.is_query)
    areas, steps = [], []
    for query in np.flatnonzero(views.is_query).tolist():
        found = distances(np.full(len(targets), query), targets)
        relevant = views.points[targets][np.argsort(found, kind="stable")] == views.points[query]
        areas.append(average_precision(relevant))
        steps.append(average_precision_by_steps(relevant))
    return {"map": float(np.mean(areas)), "map_by_steps": float(np.mean(steps))}


def summarise_cut_patches(cells: dict[str, list[CutCell]]) -> list[dict[str, Any]]:
    """For each descriptor the best cell, and all of them as `grid`: what --json writes."""

    def first_figure(cell: CutCell) -> float:
        return next(iter(cell.figures.values()))

    results = []
    for name, column in cells.items():
        best = max(column, key=first_figure)
        grid = [{"smoothing_px": cell.smoothing_px, **cell.figures} for cell in column]
        best_cell = {"descriptor": name, "dim": best.dim, **best.figures, "smoothing_px": best.smoothing_px}
        seconds = {"train_seconds": best.train_seconds, "describe_seconds": round(best.describe_seconds, 2)}
        results.append({**best_cell, **seconds, "grid": grid})
    return results


def format_cut_table(results: Sequence[dict[str, Any]]) -> str:
    """Rows are descriptors at their best smoothing; the figures are in points."""
    figures = [name for name in ("map", "map_by_steps", "fpr95") if name in results[0]]
    header = ["descriptor", "dim", "smooth", *figures, "train s", "describe s"]
    rows = [
        [
            one["descriptor"],
            str(one["dim"] or "pairs"),
            f"{one['smoothing_px']:g}",
            *(points(one[name]) for name in figures),
            f"{one['train_seconds']:.1f}",
            f"{one['describe_seconds']:.1f}",
        ]
        for one in results
    ]
    return format_table(header, rows)
