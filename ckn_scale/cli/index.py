"""Verbs that make a run: `index` does everything, the others one step each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckn_scale.cli.options import (
    Accept,
    Background,
    Images,
    KeepSamples,
    PlanOptions,
    Ray,
    Run,
    WorkerOptions,
)
from ckn_scale.cli.output import announce, format_states

if TYPE_CHECKING:
    from ckn_scale.config import Settings
    from ckn_scale.pipeline import IndexReport


def index(
    images: Images,
    run: Run,
    planned: PlanOptions,
    workers: WorkerOptions,
    accept: Accept = False,
    allow_mix: Annotated[
        bool, typer.Option("--allow-mix", help="Let several kinds of CPU share the run, on record.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Read every file of the run; rebuild what is damaged.")
    ] = False,
    keep_samples: KeepSamples = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the images and report; write nothing.")
    ] = False,
) -> None:
    """List, learn, encode, build and publish: everything, resumable.

    \b
    ckn-scale index photos/ run/
    ckn-scale index s3://bucket/photos s3://bucket/run --ray auto --workers 16
    ckn-scale index list.csv run/ --keep title --preset paper --set keypoints.max_keypoints=2000
    ckn-scale index photos/ run/ --background other-photos/
    ckn-scale index photos/ run/ --descriptor rootsift --set patches.region=5.2
    ckn-scale index more-photos/ run/ --append
    ckn-scale index photos/ run/ --sync
    """
    announce(f"listing {images}", quiet=workers.quiet)
    from ckn_scale.cli.progress import ProgressDisplay
    from ckn_scale.pipeline import index_images

    resources, settings = workers.resources(), planned.resolve(run, workers.ray)
    if dry_run:
        _print_dry_run(images, settings, planned.keep or [])
        return
    with ProgressDisplay(quiet=workers.quiet) as display:
        report = index_images(
            images,
            run,
            settings,
            resources,
            **planned.arguments(),
            accept=accept,
            mix=allow_mix,
            check_all=check,
            keep_samples=keep_samples,
            on_progress=display.show_step,
        )
    _print_version(report)


def _print_dry_run(images: str, settings: Settings, keep: list[str]) -> None:
    from ckn_scale.steps.plan_images import list_sorted
    from ckn_scale.storage.plans import shard_size

    count = sum(1 for _ in list_sorted(images, keep).refs)
    shards = -(-count // shard_size(count, settings.plan.images_per_shard))
    sampled = min(count, settings.sample.num_images)
    print(f"{count} images in {shards} shards; {sampled} of them would be sampled for training")
    print(f"channels: {', '.join(settings.channel_names)}; words: {settings.vlad.num_words}")
    print("nothing was written")


def _print_version(report: IndexReport) -> None:
    if report.changes is not None:
        print(report.changes)
    print(f"version {report.version} of {report.run}: {format_states(report.states)}")


def plan(images: Images, run: Run, planned: PlanOptions, ray: Ray = None) -> None:
    """List the images, freeze the list, cut it into shards, and say what the run will take.

    \b
    ckn-scale plan s3://bucket/photos s3://bucket/run
    """
    announce(f"listing {images}")
    from ckn_scale import pipeline
    from ckn_scale.config import parse_settings
    from ckn_scale.errors import RunFailed
    from ckn_scale.runs.estimate import estimate_run
    from ckn_scale.storage.plans import read_segments

    settings = planned.resolve(run, ray)
    opened = pipeline.plan(images, run, settings, **planned.arguments(), on_changes=print)
    for segment in read_segments(opened):
        print(f"segment {segment.number}: {segment.num_images} images in {segment.num_shards} shards")
    print(f"computes on {settings.numerics.device}")
    try:
        lines = estimate_run(opened, parse_settings(opened.settings)).lines()
    except RunFailed as error:  # a few images that cannot be used say nothing about the others
        lines = [f"what it takes cannot be estimated: {error}"]
    for line in lines:
        print(line)


def sample(run: Run, workers: WorkerOptions, background: Background = None) -> None:
    """Draw the training patches from images chosen by hash.

    \b
    ckn-scale sample run/ --workers 4
    """
    with workers.open_driver(run) as driver:
        from ckn_scale import pipeline
        from ckn_scale.config import parse_settings
        from ckn_scale.steps.plan_images import record_background

        if background:
            record_background(driver.run, parse_settings(driver.run.settings), background)
        pipeline.sample(driver)


def train(run: Run, workers: WorkerOptions) -> None:
    """Learn the networks, projections, words and the reduction from the sample.

    \b
    ckn-scale train run/
    """
    with workers.open_driver(run) as driver:
        from ckn_scale import pipeline

        pipeline.train(driver)


def encode(run: Run, workers: WorkerOptions) -> None:
    """Every planned image once: state, vector, strongest points, thumbnail.

    \b
    ckn-scale encode run/ --ray auto --workers 16
    """
    with workers.open_driver(run) as driver:
        from ckn_scale import pipeline

        pipeline.encode(driver)


def build(run: Run, workers: WorkerOptions) -> None:
    """Index shards of what is encoded.

    \b
    ckn-scale build run/
    """
    with workers.open_driver(run) as driver:
        from ckn_scale import pipeline

        pipeline.build(driver)


def publish(
    run: Run, workers: WorkerOptions, accept: Accept = False, keep_samples: KeepSamples = False
) -> None:
    """Certify the build with planted queries and make it the current version.

    \b
    ckn-scale publish run/
    """
    with workers.open_driver(run) as driver:
        from ckn_scale import pipeline

        version = pipeline.publish(driver, accept=accept, keep_samples=keep_samples)
    _print_version(pipeline.summarise(driver, version))
