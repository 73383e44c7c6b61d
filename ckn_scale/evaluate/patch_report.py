"""What a patch table says: each descriptor at its own best place of the shared grid, and the grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ckn_scale.evaluate.patch_table import Cell
from ckn_scale.evaluate.report import format_table, points


def choose_best(cells: Sequence[Cell]) -> Cell:
    """The first of the highest mean."""
    return max(cells, key=lambda cell: cell.mean_ap)


def summarise(cells: Mapping[str, Sequence[Cell]]) -> list[dict[str, Any]]:
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
