"""`ckn-scale report`: one HTML file of what was measured and what a run took."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckn_scale.cli.output import announce
from ckn_scale.errors import InputError

if TYPE_CHECKING:
    from ckn_scale.report.html import Element


def report(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Run folders (a path or s3://bucket/prefix), and what `evaluate --json` and `study` wrote.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The file.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="What stands above it; by default the sources.")] = None,
    examples: Annotated[
        int, typer.Option(min=0, max=50, help="Hits and misses of a run, so many of each.")
    ] = 3,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE if there is one.")] = False,
) -> None:
    """One HTML file without any other: figures beside the paper's, curves, filters, times, examples.

    Of an evaluation: tables like the paper's with its printed figures in columns beside ours, curves, worst
    and best answers. Of a run: time and throughput of its steps, predicted and actual, images by state, its
    certificate, filters, planted queries missed and found. Of a study its tables and curves. All: machine
    and settings.

    \b
    ckn-scale report run/ -o report.html
    ckn-scale report holidays.json oxford.json run/ -o report.html --title "March" --overwrite
    """
    from ckn_scale.evaluate.report import check_writable, write_file

    check_writable(out)
    if out.exists() and not overwrite:
        raise InputError(f"{out} exists: give another --out, or --overwrite")
    announce("reading what was measured")
    from ckn_scale.evaluate.machine import describe_machine
    from ckn_scale.report.evaluation_sections import describe_hardware
    from ckn_scale.report.html import write_page

    sections = list(list_sections(sources, examples))
    names = ", ".join(map(name_source, sources))
    subtitle = f"Written by {describe_hardware(describe_machine())}"
    page = write_page(title or f"ckn-scale: {names}", subtitle, sections)
    write_file(out, page)
    print(f"{out}: {len(sections)} parts, {len(page) / 1e6:.1f} MB")


def name_source(source: str) -> str:
    """The last part of its path; every study's file is study.json, so it goes by its folder."""
    parts = source.removesuffix("/study.json").rstrip("/").split("/")
    return parts[-1]


def list_sections(sources: list[str], examples: int) -> Iterator[Element]:
    """Runs first, in their order; evaluations share tables."""
    from ckn_scale.report.evaluation_sections import list_evaluation_sections
    from ckn_scale.report.evaluations import Evaluation, StudyFile, read_measured
    from ckn_scale.report.run_sections import list_run_sections
    from ckn_scale.report.study_sections import list_study_sections
    from ckn_scale.storage.run_folder import RunFolder

    files = [source for source in sources if source.endswith(".json")]
    measured = [read_measured(Path(file)) for file in files]
    runs = [RunFolder.open(source) for source in sources if source not in files]
    for run in runs:
        title = run.url.rstrip("/").rpartition("/")[2] if len(runs) > 1 else ""
        *sections, settings = list_run_sections(run, title=title)
        yield from sections
        if run.models.latest() is not None:
            announce(f"drawing pictures of {run.url}")
            from ckn_scale.report.run_pictures import list_run_pictures

            yield from list_run_pictures(run, examples, title=title)
        yield settings
    yield from list_evaluation_sections([one for one in measured if isinstance(one, Evaluation)])
    yield from list_study_sections([one for one in measured if isinstance(one, StudyFile)])
