"""Studies as sections of the report: a table and a chart for each setting that was varied.

All charts of a study have one scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ckn_scale.report.charts import draw_lines
from ckn_scale.report.evaluation_sections import describe_hardware, show_settings
from ckn_scale.report.evaluations import StudyFile, StudyRow
from ckn_scale.report.html import (
    MISSING,
    Cell,
    Element,
    make,
    make_facts,
    make_section,
    make_table,
)
from ckn_scale.report.paper import FINDINGS, PRINTED_STUDIES, PrintedStudy

NOTHING_PRINTED = PrintedStudy("", {})


def list_study_sections(studies: Sequence[StudyFile]) -> Iterator[Element]:
    """Settings of the first in full, of the others what is different."""
    for study in studies:
        yield describe_study(study, None if study is studies[0] else studies[0])


def describe_study(study: StudyFile, first: StudyFile | None) -> Element:
    figures = [row.figure for row in study.rows if row.figure is not None]
    factor = 1.0 if figures and max(figures) > 1 else 100.0
    printed = PRINTED_STUDIES.get((study.study, study.protocol), NOTHING_PRINTED)
    parts: list[Element] = []
    if study.study in FINDINGS:
        parts.append(make("p", f"The paper on this: {FINDINGS[study.study]}"))
    for panel in dict.fromkeys(row.panel for row in study.rows):
        rows = [row for row in study.rows if row.panel == panel]
        among = [factor * one for one in figures]
        parts += _show_panel(panel, study.x_label or panel, rows, factor, study.unit, among, printed)
    reasons = dict.fromkeys(
        f"{row.series}, {_name(row.x)}: {row.reason}" for row in study.rows if row.figure is None
    )
    if reasons:
        parts += [make("p", "Not measured:"), make("ul", *(make("li", one) for one in reasons))]
    parts += [make("h3", "How it was measured"), make_facts(_list_facts(study))]
    title = "Settings where the study does not vary them"
    parts += show_settings(title, study.settings, None if first is None else first.settings)
    return make_section(f"Study: {study.question}", *parts)


def _show_panel(
    panel: str,
    x_label: str,
    rows: Sequence[StudyRow],
    factor: float,
    unit: str,
    among: Sequence[float],
    printed: PrintedStudy,
) -> Iterator[Element]:
    places = list(dict.fromkeys(row.x for row in rows))
    series = list(dict.fromkeys(row.series for row in rows))
    found = {(row.x, row.series): row for row in rows}
    curves = {}
    for one in series:
        at = [found.get((x, one)) for x in places]
        curves[one] = [None if row is None or row.figure is None else factor * row.figure for row in at]
    digits, beside = 3 if factor == 1 else 1, [one for one in series if one in printed.figures]
    cells: list[list[str | Cell]] = []
    for x in places:
        name = _name(x)
        of_paper = [printed.figures[one].get(name) for one in beside]
        cells.append(
            [
                name,
                *(_format_row(found.get((x, one)), factor, digits) for one in series),
                *(Cell(_format(figure, 1), "printed") for figure in of_paper),
            ]
        )
    yield make("h3", panel)
    parts = [make_table([x_label, *series, *(f"paper: {one}" for one in beside)], cells)]
    if among and len(places) > 1:
        chart = draw_lines(places, curves, x_label=x_label, y_label=unit, among=[min(among), max(among)])
        parts.append(make("figure", chart))
    yield make("div", *parts, class_="panel")
    if beside:
        yield make("p", f"Grey: as the paper prints it, measured on {printed.data}.")


def _name(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:g}"


def _format_row(row: StudyRow | None, factor: float, digits: int) -> str:
    """With its deviation over codebooks, where there were several."""
    if row is None or row.figure is None:
        return MISSING
    spread = f" ± {factor * row.spread:.{digits}f}" if row.spread else ""
    return _format(factor * row.figure, digits) + spread


def _format(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _list_facts(study: StudyFile) -> list[tuple[str, str]]:
    facts = {
        "data": f"{study.data} ({study.protocol})",
        "sizes": study.sizes,
        "learned on": Path(study.trained_on).as_posix() if study.trained_on else "",
        "took": "" if study.seconds is None else f"{study.seconds:,.0f} s, without what the cache had",
        "machine": describe_hardware(study.machine),
    }
    return [(name, value) for name, value in facts.items() if value]
