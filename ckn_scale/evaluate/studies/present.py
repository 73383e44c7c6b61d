"""A study's rows as a table for each panel, and as one picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cv2
import numpy as np

from ckn_scale.evaluate.pictures.canvas import add_caption
from ckn_scale.evaluate.pictures.chart import Panel, draw_panels
from ckn_scale.evaluate.report import format_table

PANELS_PER_ROW = 3
MISSING = "–"

Row = Mapping[str, Any]


def list_panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by the chart they belong to, in order."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(row["panel"], []).append(row)
    return panels


def format_study(question: str, unit: str, sizes: str, rows: Sequence[Row]) -> str:
    """What the command prints and study.txt holds."""
    parts = [f"{question}; {unit}", sizes]
    for panel, members in list_panels(rows).items():
        header, cells = arrange(members)
        parts += ["", format_table([panel, *header[1:]], cells)]
    reasons = {f"{row['series']}, {row['x']}: {row['reason']}": None for row in rows if row["figure"] is None}
    return "\n".join([*parts, *(["", "not measured:", *reasons] if reasons else [])])


def arrange(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells: a line for each x, a column for each series."""
    places, series = (list(dict.fromkeys(row[name] for row in rows)) for name in ("x", "series"))
    found = {(row["x"], row["series"]): row for row in rows}
    cells = [[name_place(x), *(_format(found.get((x, one))) for one in series)] for x in places]
    return ["x", *series], cells


def name_place(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:g}"


def _format(row: Row | None) -> str:
    if row is None or row["figure"] is None:
        return MISSING
    spread = f" ± {show_figure(row['spread'], row['figure'])}" if row.get("spread") else ""
    return show_figure(row["figure"], row["figure"]) + spread


def show_figure(value: float, scale: float) -> str:
    """mAP in points; UKBench's score, which is above one, as it is."""
    return f"{value:.3f}" if scale > 1 else f"{100 * value:.1f}"


def draw_study(question: str, x_label: str, unit: str, rows: Sequence[Row]) -> np.ndarray:
    """(H, W, 3) uint8: a panel each, all on one scale; without an `x_label` a panel's name is its own."""
    measured = [row for row in rows if row["figure"] is not None]
    factor = 1.0 if max(row["figure"] for row in measured) > 1 else 100.0
    low = factor * min(row["figure"] - (row.get("spread") or 0.0) for row in measured)
    high = factor * max(row["figure"] + (row.get("spread") or 0.0) for row in measured)
    margin = max(0.08 * (high - low), 0.01 * factor)
    panels = list(_make_panels(rows, x_label, factor))
    columns = 2 if len(panels) == 4 else PANELS_PER_ROW  # a square, not three and one
    picture = draw_panels(panels, y_label=unit, y_limits=(low - margin, high + margin), columns=columns)
    return add_caption(picture, question.replace("×", "by").replace("α", "alpha"))


def encode_png(picture: np.ndarray) -> bytes:
    return cv2.imencode(".png", picture[..., ::-1])[1].tobytes()


def _make_panels(rows: Sequence[Row], x_label: str, factor: float) -> Iterator[Panel]:
    for panel, members in list_panels(rows).items():
        places, series = (list(dict.fromkeys(row[name] for row in members)) for name in ("x", "series"))
        found = {(row["x"], row["series"]): row for row in members if row["figure"] is not None}
        curves, spreads = {}, {}
        for one in series:
            at = [found.get((x, one)) for x in places]
            curves[one] = np.array([np.nan if row is None else factor * row["figure"] for row in at])
            spread = np.array([0.0 if row is None else factor * (row.get("spread") or 0.0) for row in at])
            if spread.any():
                spreads[one] = spread
        title, label = (panel, x_label) if x_label else ("", panel)
        joined = not any(isinstance(x, str) for x in places)
        ticks = [name_place(x) for x in places]
        yield Panel(title, label, list(range(len(places))), curves, ticks, spreads, joined)
