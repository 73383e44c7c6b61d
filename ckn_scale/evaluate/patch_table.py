"""Descriptors on scenes with known homographies: one grid of region × smoothing that all share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ckn_scale.config import Settings
from ckn_scale.evaluate.cache import ContentCache
from ckn_scale.evaluate.descriptors import Request, fit_member, list_members
from ckn_scale.evaluate.matching import PairScore, PairTruth, find_truth, score_pair
from ckn_scale.evaluate.regions import Detected, ImageFile, KeyedDescriptor, RegionReader, describe_regions
from ckn_scale.evaluate.report import format_table, points
from ckn_scale.evaluate.scenes import Scene
from ckn_scale.evaluate.training_images import Progress, TrainingPatches

ANY_PIXELS = 2**31  # scenes are not resized: their homographies are in pixels


@dataclass(frozen=True)
class Cell:
    """One descriptor at one place of the grid."""

    region: float
    smoothing_px: float | None  # none: the descriptor's own
    scores: dict[tuple[str, int], PairScore]  # by scene and number of the second image
    dim: int
    train_seconds: float
    describe_seconds: float

    @property
    def mean_ap(self) -> float:
        return float(np.mean([score.ap for score in self.scores.values()]))

    @property
    def mean_ap_normalised(self) -> float:
        return float(np.mean([score.ap_normalised for score in self.scores.values()]))


@dataclass(frozen=True)
class Described:
    """What one descriptor made of all images of all scenes."""

    rows: dict[ImageFile, np.ndarray]
    keyed: KeyedDescriptor
    seconds: float


@dataclass
class PatchTable:
    """A table of descriptors on scenes: its rows, the grid, and where patches and results are kept."""

    scenes: Sequence[Scene]
    requests: Sequence[Request]
    settings: Settings
    train_images: Sequence[Path]
    cache: ContentCache
    on_progress: Progress
    detected: dict[ImageFile, Detected] = field(default_factory=dict)
    truths: dict[tuple[str, int], PairTruth] = field(default_factory=dict)

    def measure(
        self, regions: Sequence[float], smoothings_px: Sequence[float | None]
    ) -> dict[str, list[Cell]]:
        """Every request at every place of the grid."""
        self._detect()
        cells: dict[str, list[Cell]] = {request.name: [] for request in self.requests}
        places = [(region, smoothing_px) for region in regions for smoothing_px in smoothings_px]
        training = TrainingPatches(self.train_images, self._training_reader(), self.on_progress)
        for done, place in enumerate(places):
            described = self._describe_all(*place, training)
            for request in self.requests:
                cells[request.name].append(self._score(request, place, described))
            self.on_progress("grid", done + 1, len(places))
        return cells

    def _training_reader(self) -> RegionReader:
        settings = self.settings
        return RegionReader(settings.images, settings.keypoints, settings.patches, self.cache)

    def _scene_reader(self) -> RegionReader:
        images = replace(self.settings.images, max_pixels=ANY_PIXELS, min_side_px=1, exif_orientation=False)
        return replace(self._training_reader(), images=images)

    def _detect(self) -> None:
        reader, limit = self._scene_reader(), self.settings.keypoints.max_keypoints
        for done, scene in enumerate(self.scenes):
            self.detected |= {file: reader.detect(file) for file in scene.images.values()}
            first = self.detected[scene.images[1]]
            for number, homography in scene.homographies.items():
                second = self.detected[scene.images[number]]
                truth = find_truth(first, second, homography, max_regions=limit)
                self.truths[scene.name, number] = truth
            self.on_progress("scenes", done + 1, len(self.scenes))

    def _describe_all(
        self, region: float, smoothing_px: float | None, training: TrainingPatches
    ) -> dict[str, Described]:
        reader, described = self._scene_reader().with_region(region), {}
        for member in list_members(self.requests):
            source = training.source(region, member.settings.sample)
            keyed = fit_member(member, smoothing_px, source, self.cache)
            done = {file: describe_regions(reader, file, keyed) for file in self.detected}
            rows = {file: one for file, (one, _) in done.items()}
            described[member.label] = Described(rows, keyed, sum(seconds for _, seconds in done.values()))
            smoothing = "own" if smoothing_px is None else f"{smoothing_px:g}"
            self.on_progress(f"region {region:g}, smoothing {smoothing}", len(described), 0)
        return described

    def _score(
        self, request: Request, place: tuple[float, float | None], described: dict[str, Described]
    ) -> Cell:
        members = [described[member.label] for member in request.members]
        scores = {}
        for scene in self.scenes:
            rows = {
                number: np.concatenate([one.rows[file] for one in members], axis=1)
                for number, file in scene.images.items()
            }
            for number in scene.homographies:
                truth = self.truths[scene.name, number]
                scores[scene.name, number] = score_pair(truth, rows[1], rows[number])
        return Cell(
            *place,
            scores=scores,
            dim=sum(one.keyed.dim for one in members),
            train_seconds=sum(one.keyed.train_seconds for one in members),
            describe_seconds=sum(one.seconds for one in members),
        )


def choose_best(cells: Sequence[Cell]) -> Cell:
    """The first of the highest mean."""
    return max(cells, key=lambda cell: cell.mean_ap)


def summarise(cells: Mapping[str, Sequence[Cell]]) -> list[dict[str, Any]]:
    """For each descriptor its best cell, and all of them as `grid`: what --json writes."""
    return [_summarise_descriptor(name, column) for name, column in cells.items()]


def _summarise_descriptor(name: str, cells: Sequence[Cell]) -> dict[str, Any]:
    best = choose_best(cells)
    grid = [{"region": cell.region, "smoothing_px": cell.smoothing_px, "map": cell.mean_ap} for cell in cells]
    pairs = [
        {"scene": scene, "pair": f"1-{number}", **vars(score)}
        for (scene, number), score in best.scores.items()
    ]
    return {
        "descriptor": name,
        "dim": best.dim,
        "map": best.mean_ap,
        "map_normalised_regions": best.mean_ap_normalised,
        "region": best.region,
        "smoothing_px": best.smoothing_px,
        "per_scene": _per_scene(best),
        "pairs": pairs,
        "train_seconds": round(best.train_seconds, 2),
        "describe_seconds": round(best.describe_seconds, 2),
        "grid": grid,
    }


def _per_scene(cell: Cell) -> dict[str, float]:
    names = sorted({scene for scene, _ in cell.scores})
    return {
        name: float(np.mean([score.ap for (scene, _), score in cell.scores.items() if scene == name]))
        for name in names
    }


def format_patch_tables(results: Sequence[dict[str, Any]]) -> str:
    """What the command prints."""
    return "\n".join(
        [
            "mean average precision in points, each descriptor at its best place of the grid:",
            "",
            format_results(results),
            "",
            "the grid, shared by all (* the best of a column):",
            "",
            format_grid(results),
        ]
    )


def format_results(results: Sequence[dict[str, Any]]) -> str:
    """Rows by mean average precision, best first."""
    scenes = list(results[0]["per_scene"])
    header = ["descriptor", "dim", "region", "smooth", "mAP", *scenes, "train s", "describe s"]
    rows = [
        [
            one["descriptor"],
            str(one["dim"]),
            f"{one['region']:g}",
            f"{one['smoothing_px']:g}",
            points(one["map"]),
            *(points(one["per_scene"][scene]) for scene in scenes),
            f"{one['train_seconds']:.1f}",
            f"{one['describe_seconds']:.1f}",
        ]
        for one in sorted(results, key=lambda one: -one["map"])
    ]
    return format_table(header, rows)


def format_grid(results: Sequence[dict[str, Any]]) -> str:
    """Rows are regions and smoothings, columns descriptors; the best of each is starred."""
    header = ["region  smooth", *(one["descriptor"] for one in results)]
    rows = []
    for position, place in enumerate(results[0]["grid"]):
        cells = [_mark(one, position) for one in results]
        rows.append([f"{place['region']:>6g}  {place['smoothing_px']:>6g}", *cells])
    return format_table(header, rows)


def _mark(result: dict[str, Any], position: int) -> str:
    value = result["grid"][position]["map"]
    return f"{'*' if value == result['map'] else ''}{points(value)}"
