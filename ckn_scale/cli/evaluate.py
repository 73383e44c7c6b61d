"""`ckn-scale evaluate`: descriptors measured on data sets with ground truth."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ckn_scale.cli.bars import ProgressBar
from ckn_scale.errors import InputError

if TYPE_CHECKING:
    from ckn_scale.evaluate.image_table import ImageTable, Place

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure descriptors on data sets with ground truth, SIFT and RootSIFT beside them.",
)

Data = Annotated[Path, typer.Argument(metavar="DATA", help="The folder of the data set.")]
Descriptors = Annotated[
    str, typer.Option(help="sift, rootsift, ckn-grad, ckn-white, ckn-raw, ckn-mix; a+b; paper:ckn-grad.")
]
Preset = Annotated[str, typer.Option(help="Named settings: compact (default), paper, tiny.")]
Config = Annotated[str | None, typer.Option("--config", help="A TOML file of settings over the preset.")]
Override = Annotated[list[str] | None, typer.Option("--set", help="key.path=value, over all; may repeat.")]
TrainImages = Annotated[
    Path | None, typer.Option(help="Photographs to learn on, with subfolders; by default those of DATA.")
]
Detector = Annotated[
    Literal["hessian-affine", "dense"] | None, typer.Option(help="By default as the preset says.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the results there.")]
CacheFolder = Annotated[
    Path | None, typer.Option(help="Keypoints, patches and descriptors are kept there, by content.")
]
CacheSize = Annotated[float, typer.Option(min=0.1, help="What the cache may hold, in GB.")]


@app.command()
def patches(
    data: Data,
    descriptors: Descriptors = "sift,rootsift,ckn-grad,ckn-white,ckn-grad+ckn-white",
    preset: Preset = "compact",
    config: Config = None,
    override: Override = None,
    train_images: TrainImages = None,
    detector: Detector = None,
    regions: Annotated[str, typer.Option(help="Half sides of the patch, in detection scales.")] = "5.2,10,14",
    smoothing: Annotated[str, typer.Option(help="Blurs of the patch, in its pixels.")] = "0,1,2",
    json_file: JsonFile = None,
    cache: CacheFolder = None,
    cache_gb: CacheSize = 16.0,
) -> None:
    """Match regions of scenes with known homographies: mean average precision.

    \b
    ckn-scale evaluate patches oxford_affine/ --train-images bsds500/
    ckn-scale evaluate patches hpatches/ --descriptors rootsift,ckn-grad+ckn-white --json out.json
    """
    from ckn_scale.evaluate.report import check_writable

    check_writable(json_file)
    grid = parse_numbers(regions, "--regions", 0.5), parse_numbers(smoothing, "--smoothing", 0.0)
    settings = load_evaluation_settings(preset, config, override, detector)
    requests = read_requests(descriptors, settings, config, override)
    from ckn_scale.evaluate.scenes import read_scenes
    from ckn_scale.evaluate.training_images import find_images

    scenes = read_scenes(data)
    train_paths = find_images(train_images or data)
    measured = measure_scenes(scenes, requests, settings, train_paths, grid, open_cache(cache, cache_gb))
    print_patch_results(measured, json_file, settings, str(train_images or data))


@app.command()
def images(
    data: Data,
    protocol: Annotated[str, typer.Option(help="holidays, ukbench, oxford or groups.")],
    descriptors: Descriptors = "sift,rootsift,ckn-grad,ckn-white,ckn-mix",
    preset: Preset = "compact",
    config: Config = None,
    override: Override = None,
    train_images: TrainImages = None,
    detector: Detector = None,
    regions: Annotated[str | None, typer.Option(help="Half sides of the patch, in detection scales.")] = None,
    smoothing: Annotated[
        str | None, typer.Option(help="Blurs of the patch, in its pixels; by default each descriptor's own.")
    ] = None,
    words: Annotated[int | None, typer.Option(min=1, help="Visual words of the VLAD.")] = None,
    intra: Annotated[Literal["yes", "no", "both"], typer.Option(help="VLAD blocks of unit length.")] = "both",
    seeds: Annotated[int, typer.Option(min=1, max=20, help="Codebooks to average over.")] = 3,
    crop: Annotated[bool, typer.Option(help="Oxford: cut the queries to their box.")] = True,
    json_file: JsonFile = None,
    cache: CacheFolder = None,
    cache_gb: CacheSize = 16.0,
) -> None:
    """Find the images of the same thing by their VLAD vectors: mAP, or UKBench's score of 4.

    \b
    ckn-scale evaluate images holidays/ --protocol holidays --train-images bsds500/
    ckn-scale evaluate images photos/ --protocol groups --descriptors rootsift,ckn-mix --json out.json
    """
    from ckn_scale.evaluate.report import check_writable

    check_writable(json_file)
    chosen = [] if words is None else [f"vlad.num_words={words}"]
    override = [*(override or []), *chosen]
    settings = load_evaluation_settings(preset, config, override, detector)
    requests = read_requests(descriptors, settings, config, override)
    from ckn_scale.evaluate.image_sets import read_image_set
    from ckn_scale.evaluate.image_table import ImageTable, Place
    from ckn_scale.evaluate.training_images import find_images

    smoothings = [None] if smoothing is None else parse_numbers(smoothing, "--smoothing", 0.0)
    half_sides = [settings.patches.region] if regions is None else parse_numbers(regions, "--regions", 0.5)
    table = ImageTable(
        read_image_set(data, protocol, crop=crop),
        requests,
        settings,
        find_images(train_images or (data if data.is_dir() else data.parent)),
        open_cache(cache, cache_gb),
        ProgressBar(),
        seeds=range(seeds),
        intra_choices={"yes": [True], "no": [False], "both": [False, True]}[intra],
    )
    places = [Place(region, one) for region in half_sides for one in smoothings]
    run_image_table(table, places, json_file, str(train_images or data))


def run_image_table(table: ImageTable, places: list[Place], json_file: Path | None, trained_on: str) -> None:
    from ckn_scale.core.threads import set_compute_threads
    from ckn_scale.evaluate.image_report import format_image_grid, format_image_results, summarise_images
    from ckn_scale.evaluate.report import write_json

    set_compute_threads(table.settings.numerics.threads)
    protocol = table.images.protocol
    results = summarise_images(table.measure(places), protocol)
    unit = "score of 4" if protocol == "ukbench" else "mean average precision in points"
    print(f"{unit}, mean of {len(table.seeds)} codebooks, each descriptor at its best place of the grid:\n")
    print(format_image_results(results))
    print("\nthe grid, shared by all (* the best of a column):\n")
    print(format_image_grid(results))
    if json_file is not None:
        facts = {"images": len(table.images.database), "queries": len(table.images.queries)}
        content = {"protocol": protocol, "results": results, **facts, "trained_on": trained_on}
        write_json(json_file, {**content, "settings": table.settings.model_dump(mode="json")})


def measure_scenes(
    scenes: Any, requests: Any, settings: Any, train_paths: Any, grid: Any, cache: Any
) -> list[dict[str, Any]]:
    from ckn_scale.core.threads import set_compute_threads
    from ckn_scale.evaluate.patch_report import summarise
    from ckn_scale.evaluate.patch_table import PatchTable

    set_compute_threads(settings.numerics.threads)
    bar = ProgressBar()
    try:
        table = PatchTable(scenes, requests, settings, train_paths, cache, bar)
        return summarise(table.measure(*grid))
    finally:
        bar.close()


def print_patch_results(
    results: list[dict[str, Any]], json_file: Path | None, settings: Any, trained_on: str
) -> None:
    from ckn_scale.evaluate.patch_report import format_grid, format_results
    from ckn_scale.evaluate.report import write_json

    print("mean average precision in points, each descriptor at its best place of the grid:\n")
    print(format_results(results))
    print("\nthe grid, shared by all (* the best of a column):\n")
    print(format_grid(results))
    if json_file is not None:
        content = {
            "protocol": "mikolajczyk",
            "results": results,
            "trained_on": trained_on,
            "settings": settings.model_dump(mode="json"),
        }
        write_json(json_file, content)


def parse_numbers(text: str, option: str, least: float) -> list[float]:
    """`5.2,10` → [5.2, 10.0]."""
    try:
        numbers = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InputError(f"{option} takes numbers separated by commas, got {text!r}") from None
    if not numbers or min(numbers) < least or max(numbers) > 100:
        raise InputError(f"{option} takes numbers from {least:g} to 100, got {text!r}")
    return numbers


def load_evaluation_settings(
    preset: str, config: str | None, override: list[str] | None, detector: str | None
) -> Any:
    from ckn_scale.config import load_settings

    chosen = [] if detector is None else [f'keypoints.detector="{detector}"']
    return load_settings(preset, config, [*(override or []), *chosen])


def read_requests(text: str, settings: Any, config: str | None, override: list[str] | None) -> Any:
    """The descriptors that were asked for; `paper:ckn-grad` takes that preset's, under the same overrides."""
    from ckn_scale.config import load_settings
    from ckn_scale.evaluate.descriptors import parse_requests

    def load(preset: str | None) -> Any:
        return settings if preset is None else load_settings(preset, config, override or [])

    return parse_requests(text, load)


def open_cache(folder: Path | None, limit_gb: float) -> Any:
    from ckn_scale.evaluate.cache import ContentCache

    return ContentCache(folder, int(limit_gb * 1e9))
