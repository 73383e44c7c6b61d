"""Descriptors on ready-cut patches: FPR@95 over pairs, and RomePatches' mAP over views of points."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ckn_scale.config import Settings
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
) -> dict[str, list[CutCell]]:
    """Every request at every smoothing; learned descriptors are fitted on the source's patches."""
    cells: dict[str, list[CutCell]] = {request.name: [] for request in requests}
    for done, smoothing_px in enumerate(smoothings_px):
        described = {}
        for member in list_members(requests):
            keyed = fit_member(member, smoothing_px, source, cache)
            described[member.label] = (keyed, *_describe(keyed, patch_set.patches))
        for request in requests:
            keyed, rows, seconds = zip(*(described[member.label] for member in request.members), strict=True)
            figures = score_patch_set(patch_set, np.concatenate(rows, axis=1))
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


def score_patch_set(patch_set: PatchPairs | PatchViews, rows: np.ndarray) -> Figures:
    """The figures of descriptors (N, D), one for each patch of the set."""
    return score_pairs(patch_set, rows) if isinstance(patch_set, PatchPairs) else score_views(patch_set, rows)


def score_pairs(pairs: PatchPairs, rows: np.ndarray) -> Figures:
    """FPR at 95 % recall over the pairs."""
    distances = np.sum((rows[pairs.first] - rows[pairs.second]) ** 2, axis=1)
    rate = false_positive_rate(distances, pairs.matches)
    return {"score": 1 - rate, "fpr95": rate}


def score_views(views: PatchViews, rows: np.ndarray) -> Figures:
    """Each query against all that are no query; both flavours of average precision."""
    targets = np.flatnonzero(~views.is_query)
    areas, steps = [], []
    for query in np.flatnonzero(views.is_query):
        distances = measure_distances(rows[query : query + 1], rows[targets])[0]
        relevant = views.points[targets][np.argsort(distances, kind="stable")] == views.points[query]
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
            str(one["dim"]),
            f"{one['smoothing_px']:g}",
            *(points(one[name]) for name in figures),
            f"{one['train_seconds']:.1f}",
            f"{one['describe_seconds']:.1f}",
        ]
        for one in results
    ]
    return format_table(header, rows)
