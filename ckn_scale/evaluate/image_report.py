"""What an image table says: each descriptor at its own best place, and the whole grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckn_scale.evaluate.image_table import ImageCell, Row
from ckn_scale.evaluate.report import format_table, points


def summarise_images(cells: Mapping[Row, Sequence[ImageCell]], protocol: str) -> list[dict[str, Any]]:
    measure = "score" if protocol == "ukbench" else "map"
    return [_summarise(row, column, measure) for row, column in cells.items()]


def _summarise(row: Row, cells: Sequence[ImageCell], measure: str) -> dict[str, Any]:
    best = max(cells, key=lambda cell: cell.mean_score)
    descriptor, reduction = row
    return {
        "descriptor": descriptor,
        "reduction": reduction.partition("-")[0],
        "dim": best.dim,
        "bytes": best.stored_bytes,
        measure: best.mean_score,
        "spread": best.spread,
        "seeds": list(best.seed_scores),
        **_describe_place(best),
        "train_seconds": round(best.train_seconds, 2),
        "describe_seconds": round(best.describe_seconds, 2),
        "grid": [
            {**_describe_place(cell), measure: cell.mean_score, "spread": cell.spread} for cell in cells
        ],
    }


def _describe_place(cell: ImageCell) -> dict[str, Any]:
    return {
        "region": cell.place.region,
        "smoothing_px": cell.place.smoothing_px,
        "intra_normalise": cell.intra_normalise,
    }


def format_image_tables(results: Sequence[dict[str, Any]], num_seeds: int) -> str:
    """What the command prints."""
    unit = "score of 4" if "score" in results[0] else "mean average precision in points"
    codebooks = "one codebook" if num_seeds == 1 else f"mean of {num_seeds} codebooks"
    return "\n".join(
        [
            f"{unit}, {codebooks}, each descriptor at its best place of the grid:",
            "",
            format_image_results(results),
            "",
            "the grid, shared by all (* the best of a column):",
            "",
            format_image_grid(results),
        ]
    )


def format_image_results(results: Sequence[dict[str, Any]]) -> str:
    measure = "score" if "score" in results[0] else "map"
    header = [
        "descriptor",
        "dim",
        "bytes",
        "region",
        "smooth",
        "intra",
        measure,
        "±",
        "train s",
        "describe s",
    ]
    rows = [
        [
            _name(one),
            str(one["dim"]),
            str(one["bytes"]),
            *_format_place(one),
            _format_score(one, measure, measure),
            _format_score(one, "spread", measure),
            f"{one['train_seconds']:.1f}",
            f"{one['describe_seconds']:.1f}",
        ]
        for one in sorted(results, key=lambda one: -one[measure])
    ]
    return format_table(header, rows)


def format_image_grid(results: Sequence[dict[str, Any]]) -> str:
    """Rows are places, columns descriptors; the best of each is starred."""
    measure = "score" if "score" in results[0] else "map"
    header = ["region  smooth  intra", *map(_name, results)]
    rows = []
    for position, place in enumerate(results[0]["grid"]):
        region, smoothing, intra = _format_place(place)
        cells = [_mark(one, position, measure) for one in results]
        rows.append([f"{region:>6}  {smoothing:>6}  {intra:>5}", *cells])
    return format_table(header, rows)


def _name(result: Mapping[str, Any]) -> str:
    """`ckn`, `ckn, signs`, `ckn, pca 512`."""
    words = {"none": "", "pca": f", pca {result['dim']}"}
    return result["descriptor"] + words.get(result["reduction"], f", {result['reduction']}")


def _format_place(place: Mapping[str, Any]) -> list[str]:
    smoothing = place["smoothing_px"]
    return [
        f"{place['region']:g}",
        "own" if smoothing is None else f"{smoothing:g}",
        "yes" if place["intra_normalise"] else "no",
    ]


def _mark(result: Mapping[str, Any], position: int, measure: str) -> str:
    cell = result["grid"][position]
    star = "*" if cell[measure] == result[measure] else ""
    return f"{star}{_format_score(cell, measure, measure)} ±{_format_score(cell, 'spread', measure)}"


def _format_score(result: Mapping[str, Any], key: str, measure: str) -> str:
    return f"{result[key]:.3f}" if measure == "score" else points(result[key])
