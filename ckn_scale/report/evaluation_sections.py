"""Evaluations as sections of the report: tables like the paper's, then each evaluation by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckn_scale.report.charts import draw_lines
from ckn_scale.report.evaluations import Answered, Evaluation, Example, Result
from ckn_scale.report.html import (
    MISSING,
    Cell,
    Element,
    make,
    make_facts,
    make_figure,
    make_section,
    make_table,
)
from ckn_scale.report.paper import NAMES, PRINTED, Printed, printed_name
from ckn_scale.report.pictures import show_answer, show_photo

FAMILIES = {
    "Patch retrieval, beside the paper": ("mikolajczyk", "rome", "fpr95"),
    "Image retrieval, beside the paper": ("holidays", "ukbench", "oxford", "groups"),
}
AXES = {  # of a grid
    "region": "half side of the patch, in detection scales",
    "smoothing_px": "blur, in pixels of the patch",
}


def list_evaluation_sections(evaluations: Sequence[Evaluation]) -> Iterator[Element]:
    for title, protocols in FAMILIES.items():
        members = [one for one in evaluations if one.protocol in protocols and _list_plain(one)]
        if members:
            yield make_section(title, *_compare(members))
    for evaluation in evaluations:
        yield describe_evaluation(evaluation, None if evaluation is evaluations[0] else evaluations[0])


def _list_plain(evaluation: Evaluation) -> dict[str, Result]:
    return {one.descriptor: one for one in evaluation.results if one.plain}


def _compare(evaluations: Sequence[Evaluation]) -> Iterator[Element]:
    """One table for all; a column of ours and the paper's for each."""
    plain = [_list_plain(one) for one in evaluations]
    printed = [PRINTED.get(one.protocol, ()) for one in evaluations]
    measured = list(dict.fromkeys(name for column in plain for name in column))
    known = [name for name in NAMES if any(name in one.figures for columns in printed for one in columns)]
    of_paper = {name.rpartition(":")[2] for name in measured}
    order = sorted([*measured, *(name for name in known if name not in of_paper)], key=_place)
    header, notes = ["descriptor", "dim"], []
    for evaluation, columns in zip(evaluations, printed, strict=True):
        header += [f"{evaluation.title}: here", *(f"paper: {one.title}" for one in columns)]
        notes.append(_explain_data(evaluation, columns))
    rows = [_compare_row(name, evaluations, plain, printed) for name in order]
    yield make_table(header, rows)
    yield make("p", "Bold: the best of a column here. Grey: as the paper prints it, on its own data:")
    yield make("ul", *(make("li", note) for note in notes))


def _place(descriptor: str) -> int:
    """The paper's order, then ours."""
    names = list(NAMES)
    kind = descriptor.rpartition(":")[2]
    return names.index(kind) if kind in names else len(names)


def _compare_row(
    name: str,
    evaluations: Sequence[Evaluation],
    plain: Sequence[Mapping[str, Result]],
    printed: Sequence[Sequence[Printed]],
) -> list[str | Cell]:
    kind = name.rpartition(":")[2]
    found = next((column[name] for column in plain if name in column), None)
    shown = printed_name(name) or name
    title = shown if ":" not in name else f"{shown} ({name})"
    row: list[str | Cell] = [title if found else Cell(title, "printed")]
    row.append(f"{found.dim:,}" if found and found.dim else MISSING)
    for evaluation, column, columns in zip(evaluations, plain, printed, strict=True):
        row.append(_show_here(evaluation, column, name))
        for one in columns:
            figure = one.figures.get(kind)
            digits = 2 if one.title in ("UKBench", "Liberty") else 1
            row.append(Cell(MISSING if figure is None else f"{figure:.{digits}f}", "printed"))
    return row


def _show_here(evaluation: Evaluation, column: Mapping[str, Result], name: str) -> Cell:
    if name not in column:
        return Cell("not measured", "printed")
    best = next(one for one in evaluation.rank() if one.plain)
    text = evaluation.format(evaluation.figure_of(column[name]))
    return Cell(text, "best" if column[name] is best else "")


def _explain_data(evaluation: Evaluation, columns: Sequence[Printed]) -> str:
    pairs = evaluation.results[0].pairs
    counts = [f"{len({pair.scene for pair in pairs})} scenes, {len(pairs)} pairs"] if pairs else []
    counts += [f"{evaluation.images:,} images"] if evaluation.images else []
    counts += [f"{evaluation.queries:,} queries"] if evaluation.queries else []
    learned = [f"learned on {evaluation.trained_on}"] if evaluation.trained_on else []
    here = f"{evaluation.title} ({evaluation.unit}) here: {'; '.join([*counts, *learned]) or 'no note'}"
    there = "".join(f". {one.title} in the paper: {one.data}" for one in columns)
    return here + (there or ". The paper has no such set")


def describe_evaluation(evaluation: Evaluation, first: Evaluation | None) -> Element:
    """All rows, curves, examples, and how it was measured."""
    parts: list[Element] = [make_table(*_list_rows(evaluation))]
    parts += _draw_curves(evaluation)
    parts += _show_examples(evaluation)
    parts.append(make("h3", "How it was measured"))
    parts.append(make_facts(_list_facts(evaluation)))
    parts += show_settings("Settings", evaluation.settings, None if first is None else first.settings)
    return make_section(f"{evaluation.title}: {evaluation.protocol}", *parts)


def _list_rows(evaluation: Evaluation) -> tuple[list[str], list[list[str | Cell]]]:
    columns: dict[str, Callable[[Result], str | None]] = {
        "dim": lambda one: None if one.dim is None else f"{one.dim:,}",
        "bytes": lambda one: None if one.bytes is None else f"{one.bytes:,}",
        "region": lambda one: None if one.region is None else f"{one.region:g}",
        "smoothing": lambda one: None if one.smoothing_px is None else f"{one.smoothing_px:g} px",
        "unit blocks": lambda one: None if one.intra_normalise is None else _yes(one.intra_normalise),
        evaluation.unit: lambda one: evaluation.format(evaluation.figure_of(one)),
        "±": lambda one: None if one.spread is None else evaluation.format(one.spread),
        "training s": lambda one: None if one.train_seconds is None else f"{one.train_seconds:.1f}",
        "describing s": lambda one: None if one.describe_seconds is None else f"{one.describe_seconds:.1f}",
        "ms a query": lambda one: None if one.ms is None else f"{one.ms:.0f}",
    }
    scenes = sorted({scene for one in evaluation.results for scene in one.per_scene})
    used = [name for name, show in columns.items() if any(show(one) for one in evaluation.results)]
    rows: list[list[str | Cell]] = []
    for one in evaluation.rank():
        shown = [columns[name](one) or MISSING for name in used]
        shown += [
            f"{100 * one.per_scene[scene]:.1f}" if scene in one.per_scene else MISSING for scene in scenes
        ]
        rows.append([one.name, *shown])
    return ["descriptor", *used, *scenes], rows


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _draw_curves(evaluation: Evaluation) -> Iterator[Element]:
    named = {one.name: one for one in evaluation.rank()}
    scale = 1.0 if evaluation.measure == "score" else 100.0
    for axis, label in (
        ("region", "half side of the patch, in detection scales"),
        ("smoothing_px", "blur in pixels"),
    ):
        curves = {name: _best_along(evaluation, one, axis) for name, one in named.items()}
        curves = {name: curve for name, curve in curves.items() if len(curve) > 1}
        places = sorted({place for curve in curves.values() for place in curve})
        whole = {
            name: [scale * curve[x] for x in places]
            for name, curve in curves.items()
            if len(curve) == len(places)
        }
        if whole:
            chart = draw_lines(places, whole, x_label=label, y_label=evaluation.unit)
            yield make_figure(chart, f"The best of the grid at each {label.split(',')[0]}.")
    recalls = {name: one.recall_at for name, one in named.items() if one.recall_at}
    if recalls:
        depths = sorted(set.intersection(*(set(one) for one in recalls.values())))
        curves_of = {name: [100 * one[depth] for depth in depths] for name, one in recalls.items()}
        chart = draw_lines(depths, curves_of, x_label="images looked at", y_label="recall in %")
        yield make_figure(
            chart, "The share of what a query should find among the first images of its answer."
        )
    yield from _draw_pairs(named)


def _best_along(evaluation: Evaluation, result: Result, axis: str) -> dict[float, float]:
    """The best figure of the grid at each value of one of its axes."""
    pick = min if evaluation.measure == "fpr95" else max
    found: dict[float, float] = {}
    for place in result.grid:
        at, figure = getattr(place, axis), evaluation.figure_of(place)
        if at is not None:
            found[at] = pick(found.get(at, figure), figure)
    return found


def _draw_pairs(named: Mapping[str, Result]) -> Iterator[Element]:
    """Average precision by the second image of a pair: changes grow with its number."""
    curves: dict[str, dict[str, list[float]]] = {}
    for name, one in named.items():
        for pair in one.pairs:
            curves.setdefault(pair.pair, {}).setdefault(name, []).append(100 * pair.ap)
    pairs = sorted(curves)
    if len(pairs) < 2:
        return
    names = [name for name in named if all(name in curves[pair] for pair in pairs)]
    means = {name: [sum(curves[pair][name]) / len(curves[pair][name]) for pair in pairs] for name in names}
    numbers = [float(pair.rpartition("-")[2]) if pair.rpartition("-")[2].isdigit() else 0.0 for pair in pairs]
    if means:
        chart = draw_lines(numbers, means, x_label="second image of the pair", y_label="mean AP in points")
        yield make_figure(
            chart, "By pair: in most scenes the change of view, blur or light grows with its number."
        )


def _show_examples(evaluation: Evaluation) -> Iterator[Element]:
    shown = next((one for one in evaluation.rank() if one.examples), None)
    if shown is None:
        return
    yield make("h3", f"Worst and best answers of {shown.name}")
    yield make("p", "The query, then the first images of its answer; green: right, dashed orange: wrong.")
    for example in sorted(shown.examples, key=lambda one: one.score):
        score = f"{example.score:.2f}" if evaluation.measure == "map" else f"{example.score:g}"
        query = show_photo(Path(example.query), example.box)
        title = f"{Path(example.query).name}: {score}, {example.relevant} to be found"
        shown_images = _cut_answer(example)
        tiles = [(show_photo(Path(one.image)), Path(one.image).name, one.right) for one in shown_images]
        yield show_answer(query, title, tiles)


def _cut_answer(example: Example) -> list[Answered]:
    """Up to the last that was to be found, if all are there: what follows must be something else."""
    right = [number for number, one in enumerate(example.answer) if one.right]
    return example.answer[: right[-1] + 1] if len(right) >= example.relevant > 0 else example.answer


def _list_facts(evaluation: Evaluation) -> list[tuple[str, str]]:
    facts = {
        "data": evaluation.data,
        "images": "" if evaluation.images is None else f"{evaluation.images:,}",
        "queries": "" if evaluation.queries is None else f"{evaluation.queries:,}",
        "learned on": evaluation.trained_on,
        "measured": evaluation.measured_at,
        "took": "" if evaluation.seconds is None else f"{evaluation.seconds:,.0f} s",
        "machine": describe_hardware(evaluation.machine),
    }
    return [(name, value) for name, value in facts.items() if value]


def describe_hardware(machine: Mapping[str, Any]) -> str:
    """`AMD EPYC …, 2 cores, 24 GB; ckn-scale 0.1.0, torch 2.13.0`; empty for nothing."""
    if not machine:
        return ""
    releases = machine.get("releases")
    made_with = releases.items() if isinstance(releases, dict) else ()
    where = (
        f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores, {machine.get('memory_gb', '?')} GB"
    )
    return "; ".join([where, ", ".join(f"{name} {release}" for name, release in made_with)])


def show_settings(
    title: str, settings: Mapping[str, Any], first: Mapping[str, Any] | None
) -> Iterator[Element]:
    """In full, or what differs from those of the first of its kind."""
    if not settings:
        return
    yield make("h3", title)
    if not first:
        yield list_settings(settings)
        return
    known = dict(flatten(first))
    changed = {path: value for path, value in flatten(settings) if known.get(path) != value}
    yield make("p", f"As of the first of this report{', but:' if changed else '.'}")
    yield list_settings(changed)


def list_settings(settings: Mapping[str, Any]) -> Element:
    """Every setting by its path, as `--set` takes it."""
    lines = [make("div", f"{path} = {value}") for path, value in flatten(settings)]
    return make("div", *lines, class_="settings")


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """`{"vlad": {"num_words": 64}}` → `vlad.num_words`, `64`."""
    if isinstance(value, dict):
        pairs = [(str(key), one) for key, one in value.items()]
    elif isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        pairs = [(str(key), one) for key, one in enumerate(value)]
    else:
        yield path, str(value)
        return
    for key, one in pairs:
        yield from flatten(one, f"{path}.{key}" if path else key)


def format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
