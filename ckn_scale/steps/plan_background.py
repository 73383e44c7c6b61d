"""Plan: the background, photographs of other things, from which the reduction of the vector is learned.

They are listed once, drawn by hash and frozen in a record of their own (background/000001.json). They
are never indexed and have no ids of the plan. Learned on them, the reduction knows what is common to
photographs without knowing what is common to the places of this collection.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from ckn_scale.config import Settings
from ckn_scale.errors import InputError, RunMismatch
from ckn_scale.steps.plan import (
    PlannedImage,
    SampleDraw,
    Source,
    describe_source,
    iter_images,
    iter_planned,
    list_sorted,
    name_source,
    plan_images,
    require_segments,
    tabulate_refs,
)
from ckn_scale.storage.image_sources import ImageRef
from ckn_scale.storage.input_files import is_glob
from ckn_scale.storage.records import new_attempt
from ckn_scale.storage.run_folder import RunFolder, is_run
from ckn_scale.storage.shards import DataFile, read_table, write_table

log = logging.getLogger(__name__)

STAGE = "background"
_REFS_AT_ONCE = 4096
_LEARNED_FROM = "sample_vlads"  # the first step that reads the background


@dataclass(frozen=True)
class Background:
    source: dict[str, Any]
    num_images: int  # that were listed; at most `reduction.num_images` of them are used
    images: DataFile


def plan_with_background(
    run_url: str,
    settings: Settings,
    source: Source,
    keep: Sequence[str] = (),
    *,
    append: bool = False,
    background: Source = (),
    models: str | None = None,
) -> RunFolder:
    """`plan_images`, and the background beside it. What cannot be learned is refused before all else."""
    if background and models is not None:
        raise InputError("--background is of no use with --models: what is learned from it is taken over")
    begun = is_run(run_url)
    drawn = draw_background(settings, background) if background and not begun else None
    needed = 0 if background or models is not None else settings.reduction.needed_images
    run = plan_images(run_url, settings, source, keep, append=append, at_least=needed)
    if background:
        settle_background(run, settings, background, drawn)
    return run


def settle_background(
    run: RunFolder, settings: Settings, source: Source, drawn: tuple[pa.Table, int] | None = None
) -> None:
    """Freeze the background of a run; RunMismatch when it has another one or learned without one."""
    standing = read_background(run)
    if standing is None and (run.models.latest() is not None or run.commits(_LEARNED_FROM).committed()):
        raise RunMismatch(
            f"the models of {run.url} are learned already, without a background: "
            "give --background when a run is first indexed, or use another run folder"
        )
    if standing is None:
        table, num_images = drawn or draw_background(settings, source)
        attempt = new_attempt()
        images = write_table(run, STAGE, 1, attempt, table)
        body = {"attempt": attempt, "source": describe_source(source), "num_images": num_images}
        run.background.create(1, {**body, "images": asdict(images)})
        standing = read_background(run)
        assert standing is not None
    given = describe_source(source)
    if standing.source["sha256"] != given["sha256"]:
        raise RunMismatch(
            f"the background of {run.url} is {name_source(standing.source)}, not {name_source(given)}: "
            "leave --background out to go on with it, or use another run folder"
        )


def read_background(run: RunFolder) -> Background | None:
    standing = run.background.latest()
    if standing is None:
        return None
    body = standing[1]
    return Background(body["source"], body["num_images"], DataFile(**body["images"]))


def read_background_images(run: RunFolder, background: Background) -> list[PlannedImage]:
    """In the order of their URIs; their ids count within the background only."""
    return list(iter_images(read_table(run.store, background.images)))


def draw_background(settings: Settings, source: Source) -> tuple[pa.Table, int]:
    """The images of smallest hash, and how many there are; InputError when they are too few."""
    draw, count = SampleDraw(settings.sample.seed, settings.reduction.num_images), 0
    waiting: list[ImageRef] = []
    for ref in _list_photographs(source):
        waiting.append(ref)
        if len(waiting) == _REFS_AT_ONCE:
            draw.add(tabulate_refs(waiting, count))
            count, waiting = count + len(waiting), []
    if waiting:
        draw.add(tabulate_refs(waiting, count))
    count += len(waiting)
    if settings.reduction.method == "flatten" and count < settings.reduction.min_images:
        raise InputError(
            f"a background of {count} images teaches nothing: give at least {settings.reduction.min_images} "
            "(reduction.min_images), or leave --background out"
        )
    if count < settings.reduction.needed_images:
        raise InputError(
            f"reduction.method=pca to {settings.reduction.dim} dimensions is learned on at least "
            f"{settings.reduction.needed_images} images, the background has {count}: give more of them, "
            "or use --set reduction.method=flatten"
        )
    return draw.table(), count


def _list_photographs(source: Source) -> Iterator[ImageRef]:
    """What a source of images has; of a run, what it planned."""
    urls = [source] if isinstance(source, str) else list(source)
    for url in urls:
        if not is_glob(url) and is_run(url):
            run = RunFolder.open(url)
            for image in iter_planned(run, require_segments(run)):
                yield ImageRef(image.uri, image.size_bytes, image.etag)
        else:
            for ref in list_sorted(url).refs:
                yield ImageRef(ref.uri, ref.size_bytes, ref.etag)
