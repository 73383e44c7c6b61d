"""`ckn-scale evaluate`: descriptors measured on data sets with ground truth."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ckn_scale.cli.options import SettingsOptions, Weights, spread_options
from ckn_scale.cli.output import announce
from ckn_scale.cli.progress import ProgressDisplay
from ckn_scale.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckn_scale.config import Settings
    from ckn_scale.core.descriptors.deepcompare import PairNetwork
    from ckn_scale.evaluate.cache import ContentCache
    from ckn_scale.evaluate.descriptors import Request
    from ckn_scale.evaluate.image_sets import ImageSet
    from ckn_scale.evaluate.image_table import ImageTable, Place

MAX_WORKERS = 16

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure descriptors on data sets with ground truth, SIFT and RootSIFT beside them.",
)

Data = Annotated[Path, typer.Argument(metavar="DATA", help="The folder of the data set.")]
Descriptors = Annotated[
    str,
    typer.Option(
        help="sift, rootsift, tfeat …; ckn-grad, ckn-white, ckn-raw; ckn: all channels of the preset; "
        "ckn-mix: grad, white and raw; a+b: both; paper:ckn-grad: of another preset."
    ),
]
Measured = tuple[list[dict[str, Any]], str, dict[str, Any]]  # results, text, facts about the measurement


@dataclass(frozen=True)
class EvaluateOptions(SettingsOptions):
    """What both kinds of measurements take."""

    train_images: Annotated[
        Path | None, typer.Option(help="Photographs to learn on, with subfolders; by default those of DATA.")
    ] = None
    weights: Weights = None
    detector: Annotated[
        Literal["hessian-affine", "dense"] | None, typer.Option(help="By default as the preset says.")
    ] = None
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results there.")
    ] = None
    cache: Annotated[
        Path | None, typer.Option(help="Keypoints, patches and descriptors are kept there, by content.")
    ] = None
    cache_gb: Annotated[float, typer.Option(min=0.1, help="What the cache may hold, in GB.")] = 16.0


@dataclass(frozen=True)
class VectorOptions:
    """How images become vectors, and how often."""

    regions: Annotated[
        str | None, typer.Option(help="Half sides of the patch, in detection scales; the preset's.")
    ] = None
    smoothing: Annotated[
        str | None, typer.Option(help="Blurs of the patch, in its pixels; each descriptor's own.")
    ] = None
    words: Annotated[int | None, typer.Option(min=1, help="Visual words of the VLAD.")] = None
    intra: Annotated[Literal["yes", "no", "both"], typer.Option(help="VLAD blocks of unit length.")] = "both"
    seeds: Annotated[int, typer.Option(min=1, max=20, help="Codebooks to average over.")] = 3
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that describe images; by default one per core.")
    ] = None
    reduction_images: Annotated[
        Path | None,
        typer.Option(help="Other photographs, to learn on what is done to a VLAD before it is stored."),
    ] = None
    dim: Annotated[
        str | None, typer.Option(help="Also a PCA to so many dimensions (512,1024), learned on those.")
    ] = None

    def overrides(self) -> list[str]:
        return [] if self.words is None else [f"vlad.num_words={self.words}"]

    def places(self, settings: Settings) -> list[Place]:
        from ckn_scale.evaluate.image_table import Place

        given = self.regions, self.smoothing
        sides = [settings.patches.region] if given[0] is None else parse_numbers(given[0], "--regions", 0.5)
        blurs = [None] if given[1] is None else parse_numbers(given[1], "--smoothing", 0.0)
        return [Place(region, blur) for region in sides for blur in blurs]

    def arguments(self, settings: Settings) -> dict[str, Any]:
        """What an `ImageTable` takes beside images, descriptors and settings."""
        return {
            "seeds": range(self.seeds),
            "intra_choices": {"yes": [True], "no": [False], "both": [False, True]}[self.intra],
            "workers": count_workers(self.workers, settings.numerics.device),
            **find_reduction_images(self.reduction_images, self.dim),
        }


@dataclass(frozen=True)
class EvidenceOptions:
    """What is measured beyond the vectors, and by which points."""

    verify: Annotated[bool, typer.Option(help="Then by their points: selective matching, geometry.")] = False
    expand: Annotated[bool, typer.Option(help="Then once more, asked with the verified hits.")] = False
    discriminative: Annotated[
        bool, typer.Option(help="Expand by what tells the hits from other images, not by their mean.")
    ] = False
    points: Annotated[
        str,
        typer.Option(help="Whose codes --verify matches: ckn (the preset's), ckn-white, rootsift@REGION."),
    ] = "ckn,rootsift@6.5"
    through_index: Annotated[
        bool, typer.Option(help="By searches of a run that is built on the spot: codes, shards and all.")
    ] = False

    @property
    def stages(self) -> bool:
        """Whether points are looked at: every expansion begins with verified hits."""
        return self.verify or self.expand or self.discriminative

    @property
    def expansion(self) -> dict[str, bool]:
        return {"expand": self.expand or self.discriminative, "discriminative": self.discriminative}


@app.command()
@spread_options
def patches(
    data: Data,
    *,
    protocol: Annotated[
        Literal["mikolajczyk", "fpr95", "rome"], typer.Option(help="What DATA holds and how it is scored.")
    ] = "mikolajczyk",
    descriptors: Descriptors = "sift,rootsift,ckn-grad,ckn-white,ckn-grad+ckn-white",
    regions: Annotated[
        str, typer.Option(help="Half sides of the patch, in detection scales.")
    ] = "5.2,10,12,14",
    smoothing: Annotated[str, typer.Option(help="Blurs of the patch, in its pixels.")] = "0,1,2",
    pairs: Annotated[Path | None, typer.Option(help="fpr95: the file of pairs.")] = None,
    options: EvaluateOptions,
) -> None:
    """How well descriptors distinguish regions: mAP on scenes, FPR@95 on pairs, mAP on views of points.

    \b
    ckn-scale evaluate patches oxford_affine/ --train-images bsds500/
    ckn-scale evaluate patches hpatches/ --descriptors rootsift,ckn-grad+ckn-white --json out.json
    ckn-scale evaluate patches liberty/ --protocol fpr95 --pairs liberty/m50_100000_100000_0.txt
    ckn-scale evaluate patches rome/ --protocol rome
    """
    task = prepare_task(options, data, descriptors, pairs=protocol != "mikolajczyk")
    smoothings = parse_numbers(smoothing, "--smoothing", 0.0)
    if protocol == "mikolajczyk":
        task.report(protocol, measure_scenes(task, data, regions, smoothings))
    elif (pairs is None) == (protocol == "fpr95"):
        raise InputError("--pairs names the file of pairs of the protocol fpr95, and only of that one")
    else:
        task.report(protocol, measure_cut(task, data, pairs, smoothings))


@app.command()
@spread_options
def images(
    data: Data,
    *,
    protocol: Annotated[
        Literal["holidays", "ukbench", "oxford", "groups"],
        typer.Option(help="How DATA is laid out and scored."),
    ],
    descriptors: Annotated[
        str | None, typer.Option(help="As of `patches`; all of them, or ckn with --verify.")
    ] = None,
    crop: Annotated[bool, typer.Option(help="Oxford: cut the queries to their box.")] = True,
    distractors: Annotated[
        Path | None,
        typer.Option(help="Photographs that no query should find, with subfolders: they join the set."),
    ] = None,
    vectors: VectorOptions,
    evidence: EvidenceOptions,
    options: EvaluateOptions,
) -> None:
    """Find the images of the same thing by their VLAD vectors: mAP, or UKBench's score of 4.

    With --verify and --expand also by their points, as a search does it: a row for each stage. With
    --through-index images are indexed and searched as a user does it, with models of --train-images.

    \b
    ckn-scale evaluate images holidays/ --protocol holidays --train-images bsds500/
    ckn-scale evaluate images photos/ --protocol groups --descriptors rootsift,ckn-mix --json out.json
    ckn-scale evaluate images holidays/ --protocol holidays --descriptors ckn --train-images bsds500/ \\
      --reduction-images flickr/ --dim 128,512
    ckn-scale evaluate images oxford5k/ --protocol oxford --train-images bsds500/ \\
      --reduction-images flickr/ --verify --expand --json out.json
    """
    descriptors = descriptors or (
        "ckn" if evidence.stages or evidence.through_index else "sift,rootsift,ckn-grad,ckn-white,ckn,ckn-mix"
    )
    task = prepare_task(options, data, descriptors, *vectors.overrides())
    from ckn_scale.evaluate.image_sets import add_distractors, read_image_set

    places, how = vectors.places(task.settings), vectors.arguments(task.settings)
    image_set = read_image_set(data.absolute(), protocol, crop=crop)
    if distractors is not None:
        image_set = add_distractors(image_set, distractors.absolute())
    trained_on = task.options.train_images or (data if data.is_dir() else data.parent)
    if evidence.through_index:
        task.report(
            protocol, measure_through_index(task, image_set, trained_on, vectors.reduction_images, how)
        )
    elif evidence.stages:
        if len(places) > 1:
            raise InputError("--verify takes one region and one smoothing")
        task.report(protocol, measure_stages(task, image_set, trained_on, places[0], how, evidence))
    else:
        task.report(protocol, measure_images(task, image_set, trained_on, places, how))


@dataclass(frozen=True)
class Task:
    """What every table needs, and where its results go."""

    settings: Settings
    requests: list[Request]
    cache: ContentCache
    options: EvaluateOptions
    data: Path
    pair_networks: Sequence[PairNetwork] = ()
    started: float = field(default_factory=time.monotonic)

    def report(self, protocol: str, measured: Measured) -> None:
        """Print the text; write the JSON when asked for, with what `ckn-scale report` says beside figures."""
        results, text, facts = measured
        print(text)
        if self.options.json_file is not None:
            from ckn_scale.evaluate.machine import describe_machine
            from ckn_scale.evaluate.report import write_json

            about = {
                "data": str(self.data.absolute()),
                **facts,
                "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "seconds": round(time.monotonic() - self.started, 1),
                "machine": describe_machine(),
                "settings": self.settings.model_dump(mode="json"),
            }
            write_json(self.options.json_file, {"protocol": protocol, "results": results, **about})


def prepare_task(
    options: EvaluateOptions, data: Path, descriptors: str, *overrides: str, pairs: bool = False
) -> Task:
    """Everything that can be wrong with the options is found here, before any work.

    With `pairs` networks may be named that compare patches and describe none.
    """
    from ckn_scale.evaluate.report import check_writable

    check_writable(options.json_file)
    if options.detector is not None:
        overrides = (*overrides, f'keypoints.detector="{options.detector}"')
    settings = options.load(*overrides)
    announce("loading what describes images")
    from ckn_scale.core.numerics import require_device, set_compute_threads
    from ckn_scale.evaluate.cache import ContentCache
    from ckn_scale.evaluate.descriptors import parse_requests, read_pair_network, split_pair_networks

    weights, (described, compared) = options.weights or [], split_pair_networks(descriptors)
    if compared and not pairs:
        raise InputError(f"{compared[0]} compares patches and describes none: --protocol fpr95 or rome")
    networks = [read_pair_network(name, weights) for name in compared]
    requests = []
    if described or not compared:
        requests = parse_requests(described, lambda preset: options.load(*overrides, preset=preset), weights)
    require_device(settings.numerics.device)
    set_compute_threads(settings.numerics.threads)
    cache = ContentCache(options.cache, int(options.cache_gb * 1e9))
    return Task(settings, requests, cache, options, data, networks)


def measure_scenes(task: Task, data: Path, regions: str, smoothings: list[float]) -> Measured:
    from ckn_scale.evaluate.patch_table import PatchTable, format_patch_tables, summarise
    from ckn_scale.evaluate.scenes import read_scenes
    from ckn_scale.evaluate.training_images import find_images

    sides, scenes = parse_numbers(regions, "--regions", 0.5), read_scenes(data)
    trained_on = task.options.train_images or data
    with ProgressDisplay() as display:
        train = find_images(trained_on)
        table = PatchTable(scenes, task.requests, task.settings, train, task.cache, display.show_count)
        results = summarise(table.measure(sides, smoothings))
    return results, format_patch_tables(results), {"trained_on": str(trained_on)}


def measure_cut(task: Task, data: Path, pairs: Path | None, smoothings: list[float]) -> Measured:
    from ckn_scale.evaluate.cut_patches import (
        format_cut_table,
        make_source,
        measure_cut_patches,
        summarise_cut_patches,
    )
    from ckn_scale.evaluate.patch_sets import read_pairs, read_views

    patch_set = read_views(data) if pairs is None else read_pairs(data, pairs)
    train_images, cache = task.options.train_images, task.cache
    with ProgressDisplay() as display:
        show = display.show_count
        source = make_source(patch_set, train_images, task.settings, cache, show)
        cells = measure_cut_patches(
            patch_set, task.requests, smoothings, source, cache, show, task.pair_networks
        )
    results = summarise_cut_patches(cells)
    return results, format_cut_table(results), {"trained_on": str(train_images or data)}


def measure_images(
    task: Task, image_set: ImageSet, trained_on: Path, places: list[Place], how: dict[str, Any]
) -> Measured:
    from ckn_scale.evaluate.image_table import ImageTable, format_image_tables, summarise_images
    from ckn_scale.evaluate.training_images import find_images

    with ProgressDisplay() as display:
        train, show = find_images(trained_on), display.show_count
        table = ImageTable(image_set, task.requests, task.settings, train, task.cache, show, **how)
        results = summarise_images(table.measure(places), image_set.protocol)
    text = format_image_tables(results, len(table.seeds))
    return results, text, count_images(table, trained_on)


def measure_stages(
    task: Task,
    image_set: ImageSet,
    trained_on: Path,
    place: Place,
    how: dict[str, Any],
    evidence: EvidenceOptions,
) -> Measured:
    from ckn_scale.evaluate.evidence_table import EvidenceTable, format_stages, parse_points
    from ckn_scale.evaluate.image_table import ImageTable
    from ckn_scale.evaluate.training_images import find_images

    requests = parse_points(evidence.points, task.settings, task.options.weights or [])
    with ProgressDisplay() as display:
        train, show = find_images(trained_on), display.show_count
        table = ImageTable(image_set, task.requests, task.settings, train, task.cache, show, **how)
        results = EvidenceTable(table, requests, **evidence.expansion).measure(place)
    return results, format_stages(results), count_images(table, trained_on)


def measure_through_index(
    task: Task, image_set: ImageSet, trained_on: Path, background: Path | None, how: dict[str, Any]
) -> Measured:
    from tempfile import TemporaryDirectory

    from ckn_scale.config import parse_resources, with_channels
    from ckn_scale.evaluate.through_index import format_answers, measure_index
    from ckn_scale.pipeline import index_images
    from ckn_scale.search.engine import open_index

    if len(task.requests) != 1:
        raise InputError("--through-index takes one of --descriptors")
    request, resources = task.requests[0], parse_resources({"workers": how["workers"]})
    settings = with_channels(task.settings, [member.channel for member in request.members])
    with TemporaryDirectory() as folder, ProgressDisplay() as display:
        learned, run, listed = (f"{folder}/{name}" for name in ("models", "run", "images.txt"))
        Path(listed).write_text("\n".join(str(file.path) for file in image_set.database))
        others = () if background is None else str(background.absolute())
        announce("learning models")
        index_images(str(trained_on.absolute()), learned, settings, resources, background=others, accept=True)
        announce("indexing the set")
        index_images(listed, run, settings, resources, models=learned, accept=True)
        results = measure_index(image_set, open_index(run), request.name, display.show_count)
    facts = {"images": len(image_set.database), "queries": len(image_set.queries), "through_index": True}
    return results, format_answers(results), {**facts, "trained_on": str(trained_on)}


def count_images(table: ImageTable, trained_on: Path) -> dict[str, Any]:
    images = table.images
    return {
        "images": len(images.database),
        "queries": len(images.queries),
        "trained_on": str(trained_on),
    }


def find_reduction_images(folder: Path | None, dim: str | None) -> dict[str, Any]:
    from ckn_scale.evaluate.training_images import find_images

    if folder is None and dim is not None:
        raise InputError("--dim needs --reduction-images: other photographs to learn the PCA on")
    dims = [] if dim is None else parse_counts(dim, "--dim")
    return {"reduction_images": [] if folder is None else find_images(folder), "dims": dims}


def count_workers(asked: int | None, device: str) -> int:
    """One process drives a GPU; without one, every core that this process may use has its own."""
    if asked is not None:
        return asked
    return 1 if device == "cuda" else min(len(os.sched_getaffinity(0)), MAX_WORKERS)


def parse_numbers(text: str, option: str, least: float) -> list[float]:
    """`5.2,10` → [5.2, 10.0]."""
    try:
        numbers = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InputError(f"{option} takes numbers separated by commas, got {text!r}") from None
    if not numbers or not all(least <= number <= 100 for number in numbers):
        raise InputError(f"{option} takes numbers from {least:g} to 100, got {text!r}")
    return numbers


def parse_counts(text: str, option: str) -> list[int]:
    """`512,1024` → [512, 1024]."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise InputError(f"{option} takes whole numbers from 1, separated by commas, got {text!r}")
    return sorted({int(part) for part in parts})
