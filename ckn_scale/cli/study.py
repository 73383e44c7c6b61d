"""`ckn-scale study`: the paper's studies on the user's data, each a table and a picture."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ckn_scale.cli.evaluate import EvaluateOptions, count_workers
from ckn_scale.cli.output import announce
from ckn_scale.cli.progress import ProgressDisplay
from ckn_scale.errors import InputError

if TYPE_CHECKING:
    from ckn_scale.evaluate.studies.declared import Study

NAMES = Literal[
    "network", "projection", "dense", "crop", "gravity", "context", "training", "supervision", "robustness"
]


def study(
    name: Annotated[NAMES, typer.Argument(metavar="NAME", help="What is varied, see above.")],
    data: Annotated[Path, typer.Argument(metavar="DATA", help="The folder of the data set.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder: study.json, study.txt, study.png.")],
    *,
    protocol: Annotated[
        Literal["mikolajczyk", "rome", "holidays", "ukbench", "oxford", "groups", "photos"],
        typer.Option(help="How DATA is laid out and scored; photos: any images, for robustness."),
    ],
    descriptors: Annotated[str | None, typer.Option(help="Curves, as `evaluate` names them.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=20, help="Image sets: codebooks to average over.")] = 3,
    photos: Annotated[int, typer.Option(min=1, help="Robustness: photographs, drawn by hash.")] = 8,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that describe images; by default one per core.")
    ] = None,
    options: EvaluateOptions,
) -> None:
    """One of the paper's studies: settings changed one at a time, measured on DATA.

    \b
    network      orientations, pooling, sub-patches, filters and α of CKN-grad
    projection   PCA dimensions × whitening
    dense        Hessian-Affine and dense points, with the same and with changed pooling
    crop         Oxford's queries cut to their box or whole
    gravity      dominant orientation against "up is up"
    context      how much a region shows around its point
    training     how many patches filters and projections are learned from
    supervision  descriptors with and without labels
    robustness   blur, light, turn and scale of any photographs

    Each measurement is kept in OUT when it is done: stopped by ^C or anything else, the same command goes on.
    What cannot be measured is left out of the table, and the reason is below it.

    \b
    ckn-scale study projection oxford_affine/ out/ --protocol mikolajczyk --train-images bsds500/
    ckn-scale study robustness photos/ out/ --protocol photos --descriptors rootsift,ckn-grad
    ckn-scale report out/study.json -o report.html
    """
    from ckn_scale.evaluate.studies.declared import STUDIES

    chosen = STUDIES[name]
    if protocol not in chosen.protocols:
        raise InputError(f"the study {name} takes --protocol {' or '.join(chosen.protocols)}, got {protocol}")
    prepare_folder(out, data, name)
    announce(f"study {name}: {chosen.question}")
    names = [one.strip() for one in (descriptors or chosen.descriptors).split(",")]
    measured = {"seeds": range(seeds), "num_photos": photos}
    write_study(chosen, data, out, protocol, names, options, workers, measured)


def write_study(
    chosen: Study,
    data: Path,
    out: Path,
    protocol: str,
    descriptors: list[str],
    options: EvaluateOptions,
    workers: int | None,
    measured: dict[str, Any],
) -> None:
    """Measure, print, and write the three files; InputError when nothing could be measured."""
    from ckn_scale.core.numerics import set_compute_threads
    from ckn_scale.evaluate.cache import ContentCache
    from ckn_scale.evaluate.machine import describe_machine
    from ckn_scale.evaluate.report import write_file, write_json
    from ckn_scale.evaluate.studies.measure import Bench, run_study
    from ckn_scale.evaluate.studies.present import draw_study, encode_png, format_study

    overrides = [] if options.detector is None else [f'keypoints.detector="{options.detector}"']
    settings = options.load(*overrides)
    set_compute_threads(settings.numerics.threads)
    with ProgressDisplay() as display:
        bench = Bench(
            protocol,
            data,
            options.train_images or data,
            lambda *more, preset=None: options.load(*overrides, *more, preset=preset),
            ContentCache(options.cache, int(options.cache_gb * 1e9)),
            display.show_count,
            workers=count_workers(workers, settings.numerics.device),
            weights=options.weights or [],
            **measured,
        )
        bench.check()
        log = StudyLog(display)
        rows = run_study(chosen, bench, descriptors, out, log.add_row)
        sizes = bench.describe_sizes(settings)
    unit = "score of 4" if protocol == "ukbench" else "mAP in points"
    text = format_study(chosen.question, unit, sizes, rows)
    print(text)
    if all(row["figure"] is None for row in rows):
        raise InputError(f"nothing could be measured: {rows[0]['reason']}")
    about: dict[str, Any] = {
        "study": chosen.name,
        "question": chosen.question,
        "protocol": protocol,
        "x_label": chosen.x_label,
        "unit": unit,
    }
    about |= {"data": str(data.absolute()), "trained_on": str(options.train_images or data), "rows": rows}
    seconds = sum(row.get("seconds", 0.0) for row in rows)
    about |= {"sizes": sizes, "seconds": round(seconds, 1), "machine": describe_machine()}
    content = {**about, "settings": settings.model_dump(mode="json")}
    write_file(out / "study.txt", f"{text}\n".encode())
    write_json(options.json_file or out / "study.json", content)
    write_file(out / "study.png", encode_png(draw_study(chosen.question, chosen.x_label, unit, rows)))


class StudyLog:
    """A line for each measurement, with the time that the others will take; one for all that were kept."""

    def __init__(self, display: ProgressDisplay) -> None:
        self._display, self._began_at = display, time.monotonic()
        self._kept, self._measured = 0, 0

    def add_row(self, done: int, total: int, row: Mapping[str, Any], kept: bool) -> None:
        from ckn_scale.evaluate.studies.present import name_place, show_figure

        if kept:
            self._kept += 1
            if done == total:
                self._say_kept(total)
            return
        self._say_kept(total)
        self._measured += 1
        figure = row["figure"]
        what = f"{row['panel']} {name_place(row['x'])}, {row['series']}"
        shown = row["reason"] if figure is None else show_figure(figure, figure)
        left_s = (time.monotonic() - self._began_at) / self._measured * (total - done)
        left = f"  about {left_s:.0f} s left" if done < total else ""
        self._display.show_line(f"{done:>4}/{total}  {what}: {shown}{left}")

    def _say_kept(self, total: int) -> None:
        if self._kept:
            self._display.show_line(f"{self._kept:>4}/{total}  measured before")
            self._kept = 0


def prepare_folder(out: Path, data: Path, name: str) -> None:
    """One study each; refused before any work, as is a missing matplotlib."""
    from ckn_scale.evaluate.pictures.chart import require_matplotlib

    require_matplotlib()
    marker = out / "study.name"
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file: OUT is a folder")
    if out.resolve().is_relative_to(data.resolve()):
        raise InputError(f"{out} lies in {data}, whose images are measured: name a folder elsewhere")
    if out.is_dir() and any(out.iterdir()):
        found = marker.read_text().strip() if marker.is_file() else None
        if found != name:
            what = "other files" if found is None else f"the study {found}"
            raise InputError(f"{out} holds {what}: name another folder for the study {name}")
    out.mkdir(parents=True, exist_ok=True)
    marker.write_text(f"{name}\n")
