"""A run as sections of the report: what it holds, what it took, what was predicted, how it was certified."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ckn_scale.report.charts import Bar, draw_bars
from ckn_scale.report.evaluation_sections import format_time, list_settings
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
from ckn_scale.runs.status import list_failures, summarise_run
from ckn_scale.storage.run_folder import RunFolder

FAILURES_SHOWN = 10
SHORT_S = 0.05  # predicted and actual: below it there is nothing to compare
ROUTINE = ("step_begins", "step_ends", "estimate", "garbage_removed")  # events that tell of no trouble


def list_run_sections(run: RunFolder, *, title: str = "") -> list[Element]:
    """All but pictures, which need the models: see `run_pictures.py`."""
    summary, events = summarise_run(run), run.events.read_all()
    begin = f"{title}: " if title else ""
    sections = [
        make_section(f"{begin}The run", make_facts(list_facts(run, summary))),
        make_section(f"{begin}Time and throughput", *describe_steps(run, summary["steps"], events)),
        make_section(f"{begin}Predicted and actual", *compare_estimate(summary)),
        make_section(f"{begin}Images", *describe_images(run, summary)),
        make_section(f"{begin}Certificate", *describe_certificate(summary["certificate"])),
        make_section(f"{begin}Settings", list_settings(run.settings)),
    ]
    if summary["damaged"]:
        lines = [make("li", what, class_="bad") for what in summary["damaged"]]
        sections.insert(0, make_section(f"{begin}Damaged", make("ul", *lines)))
    return sections


def list_facts(run: RunFolder, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    workers = [commit.worker for label in run.logs() for commit in run.commits(label).committed().values()]
    processes = {(one.get("host"), one.get("pid")) for one in workers}
    version = summary["version"]
    return [
        ("folder", run.url),
        ("begun", format_time(run.body.get("created_at", 0.0))),
        ("version", "none published yet" if version is None else f"{version}, {summary['rows']:,} images"),
        ("images planned", f"{summary['images']['planned']:,}"),
        ("written", f"{sum(step['bytes'] for step in summary['steps']) / 1e6:,.1f} MB"),
        ("hosts", _join(one.get("host") for one in workers)),
        ("worker processes", f"{len(processes):,} over time"),
        ("device", _join(one.get("device") for one in workers)),
        ("arithmetic", _join(one.get("arithmetic") for one in workers)),
        ("memory of a worker", f"{summary['peak_memory_mb']:,} MB at its peak"),
    ]


def _join(values: Iterable[Any]) -> str:
    return ", ".join(sorted({str(one) for one in values if one})) or MISSING


def format_step(label: str) -> str:
    """Without the digest of a build, which says nothing to a person."""
    return re.sub(r"-[0-9a-f]{16}$", "", label).replace("_", " ")


def describe_steps(
    run: RunFolder, steps: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]
) -> Iterator[Element]:
    """Work is what all workers took together, by their commits; wall time is by the run's events."""
    walls = measure_walls(events)
    done = [step for step in steps if step["done"]]
    if not done:
        yield make("p", "Nothing is done yet.")
        return
    rows = [
        [
            format_step(step["step"]),
            f"{step['done']:,} of {step['total']:,}",
            f"{step['seconds']:,.1f}",
            f"{walls[step['step']]:,.1f}" if step["step"] in walls else MISSING,
            _measure_rate(run, step["step"], walls),
            f"{step['bytes'] / 1e6:,.1f}",
            str(step["redone"]) if step["redone"] else MISSING,
        ]
        for step in done
    ]
    rows.append(_sum_steps(done, walls))
    yield make_table(["step", "shards", "work in s", "wall in s", "images/s", "MB written", "redone"], rows)
    bars = [Bar(format_step(one["step"]), one["seconds"], f"{one['seconds']:,.1f} s") for one in done]
    yield make_figure(draw_bars(bars, title="Work by step"), "Seconds of work by step, all workers together.")
    troubles = Counter(str(event["kind"]) for event in events if event["kind"] not in ROUTINE)
    text = ", ".join(f"{kind.replace('_', ' ')} {count} ×" for kind, count in sorted(troubles.items()))
    yield make("p", f"Events besides: {text or 'none'}.")


def _sum_steps(steps: Sequence[Mapping[str, Any]], walls: Mapping[str, float]) -> list[str]:
    shards, redone = (sum(step[name] for step in steps) for name in ("done", "redone"))
    total = f"{shards:,} of {sum(step['total'] for step in steps):,}"
    times = [f"{sum(step['seconds'] for step in steps):,.1f}", f"{sum(walls.values()):,.1f}"]
    written = f"{sum(step['bytes'] for step in steps) / 1e6:,.1f}"
    return ["in all", total, *times, MISSING, written, str(redone) if redone else MISSING]


def _measure_rate(run: RunFolder, step: str, walls: Mapping[str, float]) -> str:
    """Images by second of wall time, of a step that works on images."""
    commits = run.commits(step).committed().values()
    images = sum(sum(commit.states.values()) for commit in commits)
    return f"{images / walls[step]:,.1f}" if images and walls.get(step) else MISSING


def measure_walls(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds between begin and end of each step; what several drivers took adds up."""
    begun: dict[tuple[Any, ...], float] = {}
    walls: dict[str, float] = defaultdict(float)
    for event in events:
        key = (event.get("host"), event.get("pid"), event.get("step"))
        if event["kind"] == "step_begins":
            begun[key] = event["at"]
        elif event["kind"] == "step_ends" and key in begun:
            walls[str(event["step"])] += event["at"] - begun.pop(key)
    return walls


def compare_estimate(summary: Mapping[str, Any]) -> Iterator[Element]:
    """What `ckn-scale plan` predicted, step by step."""
    guess = summary["estimate"]
    if guess is None:
        yield make("p", "Nothing was predicted: `ckn-scale plan` rehearses a run before it is begun.")
        return
    predicted: dict[str, Mapping[str, float]] = guess["steps"]
    seconds: Counter[str] = Counter()
    written: Counter[str] = Counter()
    for step in summary["steps"]:
        name = next((one for one in predicted if step["step"].startswith(one)), None)
        if name is not None:
            seconds[name] += step["seconds"]
            written[name] += step["bytes"]
    rows, bars = [], []
    for name, cost in predicted.items():
        guess_s, guess_mb, title = cost["seconds"], cost["stored_bytes"] / 1e6, format_step(name)
        if max(guess_s, seconds[name]) < SHORT_S:
            continue
        rows.append([title, *_compare(guess_s, seconds[name]), *_compare(guess_mb, written[name] / 1e6)])
        bars.append(Bar(title, seconds[name], f"{seconds[name]:,.1f} s of {guess_s:,.1f}", guess_s))
    seconds_of_all = _compare(sum(cost["seconds"] for cost in predicted.values()), seconds.total())
    bytes_of_all = sum(cost["stored_bytes"] for cost in predicted.values())
    rows.append(["in all", *seconds_of_all, *_compare(bytes_of_all / 1e6, written.total() / 1e6)])
    header = ["step", "predicted s", "actual s", "ratio", "predicted MB", "actual MB", "ratio"]
    yield make_table(header, rows)
    chart = draw_bars(bars, title="Predicted and actual")
    yield make_figure(chart, "Bars: actual work; outlines: predicted.")
    yield make(
        "p",
        f"Predicted for {guess['num_images']:,} images, with {guess['worker_memory_mb']:,.0f} MB of a "
        f"worker; at its peak one had {summary['peak_memory_mb']:,} MB.",
    )


def _compare(predicted: float, actual: float) -> list[str]:
    ratio = f"{actual / predicted:.2f}" if predicted > 0 and actual > 0 else MISSING
    return [f"{predicted:,.1f}", f"{actual:,.1f}", ratio]


def describe_images(run: RunFolder, summary: Mapping[str, Any]) -> Iterator[Element]:
    states, planned = summary["images"]["states"], summary["images"]["planned"]
    if not states:
        yield make("p", f"{planned:,} images are planned, none is encoded yet.")
        return
    bars = [
        Bar(state, count, f"{count:,}") for state, count in sorted(states.items(), key=lambda one: -one[1])
    ]
    yield make_figure(draw_bars(bars, title="Images by state"), f"{planned:,} planned images by state.")
    failures = list(islice(list_failures(run), FAILURES_SHOWN))
    if failures:
        rows = [[one["uri"], one["state"], one["reason"] or ""] for one in failures]
        yield make_table(["could not be used", "state", "reason"], rows)
        total = sum(count for state, count in states.items() if state not in ("ok", "deleted", "replaced"))
        if total > len(failures):
            yield make("p", f"And {total - len(failures):,} more: `ckn-scale failures` lists all.")


def describe_certificate(certificate: Mapping[str, Any] | None) -> Iterator[Element]:
    if certificate is None or not certificate["queries"]:
        yield make("p", "No version was certified yet.")
        return
    verdict = Cell("passed", "good") if certificate["passed"] else Cell("not passed", "bad")
    accepted = " It was published all the same, on record." if certificate["accepted"] else ""
    yield make(
        "p",
        f"{certificate['first']:,} of {certificate['queries']:,} planted queries came back first; with "
        f"{100 * certificate['confidence']:g} % confidence at least {100 * certificate['lower']:.1f} % do. "
        f"The target is {100 * certificate['target']:g} %: ",
        make("span", verdict.text, class_=verdict.kind),
        f".{accepted}",
    )
    facts = {
        "asked for this version": certificate["asked"],
        "taken over from the one before": certificate["taken_over"],
        "of images that the models learned from": certificate["in_sample"],
        "first behind copies only": certificate["behind_copies"],
        "index shards asked": f"{certificate['asked_shards']:,} of {certificate['index_shards']:,}",
        "rows asked": f"{certificate['asked_rows']:,} of {certificate['rows']:,}",
    }
    yield make_facts(
        [(name, f"{value:,}" if isinstance(value, int) else value) for name, value in facts.items()]
    )
    if certificate["by_view"]:
        bars = [Bar(view, share, f"{100 * share:.1f} %") for view, share in certificate["by_view"].items()]
        yield make_figure(
            draw_bars(bars, title="First by view"), "Planted queries that came back first, by view."
        )
    if certificate["evidence"]:
        yield from _describe_evidence(certificate["evidence"])


def _describe_evidence(evidence: Mapping[str, Any]) -> Iterator[Element]:
    rows = [[f"1 in {1 / float(rate):,.0f}", f"{count:,}"] for rate, count in evidence["thresholds"].items()]
    yield make_table(["false alarms", "inliers of a match"], rows)
    others = sum(evidence["other_pairs"].values())
    yield make(
        "p",
        f"Fitted on half of the queries. Of {others:,} random pairs of the other half "
        f"{evidence['false_alarms']:,} reach the first threshold, of {evidence['planted']:,} planted views "
        f"{evidence['matched']:,} the last.",
    )
