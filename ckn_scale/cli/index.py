"""Verbs that make a run: `index` does everything, the others one step each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from ckn_scale.cli.options import (
    Accept,
    AllowMix,
    Append,
    Background,
    Check,
    Config,
    Device,
    DryRun,
    GpusPerWorker,
    Images,
    Keep,
    KeepSamples,
    Models,
    Override,
    Preset,
    Quiet,
    Ray,
    Run,
    Workers,
    announce,
    count_states,
)

if TYPE_CHECKING:
    from ckn_scale.config import Settings
    from ckn_scale.runners.driver import Driver


def index(
    images: Images,
    run: Run,
    preset: Preset = "compact",
    config: Config = None,
    override: Override = None,
    workers: Workers = 2,
    ray: Ray = None,
    gpus_per_worker: GpusPerWorker = 1.0,
    device: Device = "auto",
    models: Models = None,
    background: Background = None,
    keep: Keep = None,
    append: Append = False,
    accept: Accept = False,
    allow_mix: AllowMix = False,
    check: Check = False,
    keep_samples: KeepSamples = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
) -> None:
    """List, learn, encode, build and publish: everything, resumable.

    \b
    ckn-scale index photos/ run/
    ckn-scale index s3://bucket/photos s3://bucket/run --ray auto --workers 16
    ckn-scale index list.csv run/ --keep title --preset paper --set keypoints.max_keypoints=2000
    ckn-scale index photos/ run/ --background other-photos/
    ckn-scale index photos/ run/ --append
    """
    if dry_run:
        _tell_dry_run(images, _load_settings(preset, config, override, models), keep or [])
        return
    announce(f"listing {images}", quiet=quiet)
    from ckn_scale.cli.progress import ProgressLine
    from ckn_scale.config import parse_resources
    from ckn_scale.pipeline import index_images, resolve_settings

    settings = resolve_settings(run, preset, config, override or [], device=device, ray=ray, models=models)
    report = index_images(
        images,
        run,
        settings,
        parse_resources({"workers": workers, "ray": ray, "gpus_per_worker": gpus_per_worker}),
        keep=keep or [],
        append=append,
        models=models,
        background=background or [],
        accept=accept,
        mix=allow_mix,
        check_all=check,
        keep_samples=keep_samples,
        on_progress=ProgressLine(quiet=quiet),
    )
    print(f"version {report.version} of {report.run}: {count_states(report.states)}")


def plan(
    images: Images,
    run: Run,
    preset: Preset = "compact",
    config: Config = None,
    override: Override = None,
    ray: Ray = None,
    device: Device = "auto",
    models: Models = None,
    background: Background = None,
    keep: Keep = None,
    append: Append = False,
) -> None:
    """List the images, freeze the list, cut it into shards, and say what the run will take.

    \b
    ckn-scale plan s3://bucket/photos s3://bucket/run
    """
    announce(f"listing {images}")
    from ckn_scale.errors import RunFailed
    from ckn_scale.pipeline import resolve_settings
    from ckn_scale.runs.estimate import estimate_run
    from ckn_scale.steps.plan_images import plan_with_background
    from ckn_scale.steps.record_models import adopt_models
    from ckn_scale.storage.plans import read_segments

    settings = resolve_settings(run, preset, config, override or [], device=device, ray=ray, models=models)
    opened = plan_with_background(
        run, settings, images, keep or [], append=append, background=background or [], models=models
    )
    if models is not None:
        adopt_models(opened, models)
    for segment in read_segments(opened):
        print(f"segment {segment.number}: {segment.num_images} images in {segment.num_shards} shards")
    print(f"computes on {settings.numerics.device}")
    try:
        lines = estimate_run(opened, settings).lines()
    except RunFailed as error:  # a few images that cannot be used say nothing about the others
        lines = [f"what it takes cannot be told: {error}"]
    for line in lines:
        print(line)


def sample(
    run: Run,
    workers: Workers = 2,
    ray: Ray = None,
    gpus_per_worker: GpusPerWorker = 1.0,
    background: Background = None,
    quiet: Quiet = False,
) -> None:
    """Draw the training patches from images chosen by hash.

    \b
    ckn-scale sample run/ --workers 4
    """
    with _open_driver(run, workers, ray, gpus_per_worker, quiet) as (driver, settings):
        from ckn_scale import pipeline
        from ckn_scale.steps.plan_images import record_background

        if background:
            record_background(driver.run, settings, background)
        pipeline.sample(driver)


def train(
    run: Run,
    workers: Workers = 2,
    ray: Ray = None,
    gpus_per_worker: GpusPerWorker = 1.0,
    quiet: Quiet = False,
) -> None:
    """Learn the networks, projections, words and the reduction from the sample.

    \b
    ckn-scale train run/
    """
    with _open_driver(run, workers, ray, gpus_per_worker, quiet) as (driver, _):
        from ckn_scale import pipeline

        pipeline.train(driver)


def encode(
    run: Run,
    workers: Workers = 2,
    ray: Ray = None,
    gpus_per_worker: GpusPerWorker = 1.0,
    quiet: Quiet = False,
) -> None:
    """Every planned image once: state, vector, strongest points, thumbnail.

    \b
    ckn-scale encode run/ --ray auto --workers 16
    """
    with _open_driver(run, workers, ray, gpus_per_worker, quiet) as (driver, _):
        from ckn_scale import pipeline

        pipeline.encode(driver)


def build(
    run: Run,
    workers: Workers = 2,
    ray: Ray = None,
    gpus_per_worker: GpusPerWorker = 1.0,
    quiet: Quiet = False,
) -> None:
    """Index shards of what is encoded.

    \b
    ckn-scale build run/
    """
    with _open_driver(run, workers, ray, gpus_per_worker, quiet) as (driver, _):
        from ckn_scale import pipeline

        pipeline.build(driver)


def publish(
    run: Run,
    workers: Workers = 2,
    ray: Ray = None,
    gpus_per_worker: GpusPerWorker = 1.0,
    accept: Accept = False,
    keep_samples: KeepSamples = False,
    quiet: Quiet = False,
) -> None:
    """Certify the build with planted queries and make it the current version.

    \b
    ckn-scale publish run/
    """
    with _open_driver(run, workers, ray, gpus_per_worker, quiet) as (driver, _):
        from ckn_scale import pipeline

        version = pipeline.publish(driver, accept=accept, keep_samples=keep_samples)
    report = pipeline.summarise(driver, version)
    print(f"version {version} of {report.run}: {count_states(report.states)}")


def register(app: typer.Typer) -> None:
    for verb in (index, plan, sample, train, encode, build, publish):
        app.command()(verb)


@contextmanager
def _open_driver(
    run: str, workers: int, ray: str | None, gpus_per_worker: float, quiet: bool
) -> Iterator[tuple[Driver, Settings]]:
    announce(f"opening {run}", quiet=quiet)
    from ckn_scale.cli.progress import ProgressLine
    from ckn_scale.config import parse_resources, parse_settings
    from ckn_scale.runners.driver import open_driver
    from ckn_scale.storage.run_folder import RunFolder

    opened = RunFolder.open(run)
    resources = parse_resources({"workers": workers, "ray": ray, "gpus_per_worker": gpus_per_worker})
    with open_driver(opened, resources, ProgressLine(quiet=quiet)) as driver:
        yield driver, parse_settings(opened.settings)


def _load_settings(
    preset: str, config: str | None, override: list[str] | None, models: str | None
) -> Settings:
    from ckn_scale.config import load_settings

    settings = load_settings(preset, config, override or [])
    if models is None:
        return settings
    from ckn_scale.steps.record_models import settings_for_models

    return settings_for_models(settings, models)


def _tell_dry_run(images: str, settings: Settings, keep: list[str]) -> None:
    """What would be done, with nothing written."""
    from ckn_scale.steps.plan_images import list_sorted
    from ckn_scale.storage.plans import shard_size

    count = sum(1 for _ in list_sorted(images, keep).refs)
    shards = -(-count // shard_size(count, settings.plan.images_per_shard))
    sampled = min(count, settings.sample.num_images)
    print(f"{count} images in {shards} shards; {sampled} of them would be sampled for training")
    print(f"channels: {', '.join(settings.channel_names)}; words: {settings.vlad.num_words}")
    print("nothing was written")
