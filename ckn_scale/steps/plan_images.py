"""Plan: list the images once, freeze the list, give ids, cut it into shards, draw the sample.

A plan segment is a numbered record; new images later are the next segment. Whoever loses the race for
a number looks again at what is new against the plan as it is then. A sync also records what is gone from
the source as deleted. Ids are dense and in sorted-URI order within a segment. The sample is the k smallest
hashes of URIs: the same images for any sharding, order and worker count.

A background, photographs that are not indexed but teach the reduction, is drawn and frozen the same way.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from ckn_scale.config import Settings, parse_settings
from ckn_scale.errors import InputError, RunFailed, RunMismatch, TransientStoreError
from ckn_scale.failpoints import hit_failpoint
from ckn_scale.schemas import PLANNED_IMAGES
from ckn_scale.storage.deletions import BY_SYNC, BY_USER, list_deleted, read_deletions, record_deletion
from ckn_scale.storage.filesystems import normalise_url
from ckn_scale.storage.image_refs import sort_refs
from ckn_scale.storage.image_sources import ImageRef, list_images
from ckn_scale.storage.input_files import is_glob, stat_input
from ckn_scale.storage.kept_columns import KeptColumns, to_arrow
from ckn_scale.storage.plan_changes import ChangeCounts, SourceComparison
from ckn_scale.storage.plans import (
    SHARDS_PER_FILE,
    hash_uri,
    iter_planned,
    read_segments,
    require_segments,
    shard_size,
)
from ckn_scale.storage.records import new_attempt
from ckn_scale.storage.run_folder import (
    BACKGROUND_STAGE,
    QUERY_STAGE,
    SAMPLE_STAGE,
    SAMPLE_VLADS,
    RunFolder,
    is_run,
    segment_stage,
)
from ckn_scale.storage.run_records import Background, PlanSource, Segment
from ckn_scale.storage.stored_files import StoredFile

log = logging.getLogger(__name__)
QUERY_SEED = 1  # apart from the sample's, so that the queries are a draw of their own
QUERY_SPARE = 2  # times as many as are asked, for those that are replaced later
MAX_RACES = 20  # lost one after the other: something else is wrong then
SOURCES_SHOWN = 3
_FRESH_START = "or if the first list was wrong, use another run folder or remove this one"
_REFS_AT_ONCE = 4096

Source: TypeAlias = "str | Sequence[str]"
OnChanges: TypeAlias = Callable[[ChangeCounts], None]


def plan_images(
    run_url: str,
    settings: Settings,
    source: Source,
    keep: Sequence[str] = (),
    *,
    append: bool = False,
    sync: bool = False,
    undelete: bool = False,
    accept: bool = False,
    at_least: int = 0,
    on_changes: OnChanges = lambda counts: None,
) -> RunFolder:
    """The run, with its plan. The first call lists `source`; later ones find the plan frozen.

    With `append` what `source` has beyond the plan becomes the next segment, but for what was deleted by
    hand and did not change since (`undelete` adds that, too). `sync` also deletes what is gone from the
    source, one that the run was planned from; RunFailed, and nothing is deleted, when that is more than
    publish.max_gone_share of what it had, unless `accept`. Without either another source than the run's
    own, or other columns to keep, are refused. Bad input is refused before anything is written: a source is
    listed, and found to hold an image and enough of them to learn from (`at_least`), before the folder is
    made. `on_changes` is told what an existing plan came to beside the source.
    """
    if normalise_url(run_url) in {normalise_url(one) for one in _as_list(source)}:
        raise InputError(
            f"{run_url} holds the images: give the run a folder of its own, such as {run_url.rstrip('/')}/run"
        )
    listing = None if is_run(run_url) else _require_enough(list_sorted(source, keep), at_least, settings)
    run = RunFolder.create(run_url, _as_recorded(run_url, settings))
    gone = 0
    for _ in range(MAX_RACES):
        segments = read_segments(run)
        if segments and not append and not sync:
            _require_same_source(run, segments, source)
            _require_same_columns(run, segments, keep)
            return run
        if segments and sync:
            _require_same_source(run, segments, source, changed=True)
        listing = listing or list_sorted(source, keep, may_be_empty=bool(segments) and sync)
        compared = _compare_with_deleted(run, segments, source if sync else None, undelete=undelete)
        added = _add_segment(run, settings, segments, listing, source, compared, accept=accept)
        gone += len(compared.gone)
        if added and segments:
            on_changes(replace(compared.counts, deleted=gone))
        if added:
            return run
        listing = None  # used up; what is new is looked at again, against the plan as it is now
        log.warning("%s: another process has just planned images; looking again at what is new", run.url)
    raise RunFailed(f"{run.url}: {MAX_RACES} times another process was first to add to the plan; try again")


def _as_list(source: Source) -> Sequence[str]:
    return [source] if isinstance(source, str) else source


def _require_same_source(
    run: RunFolder, segments: Sequence[Segment], source: Source, *, changed: bool = False
) -> None:
    """RunMismatch unless some segment was planned from `source`.

    A warning when a list was edited since, unless it may have `changed`.
    """
    now = describe_source(source)
    planned = [segment.source for segment in segments]
    same = [one for one in planned if one.sha256 == now.sha256]
    if not same:
        known = "; ".join(dict.fromkeys(map(str, planned[:SOURCES_SHOWN])))
        raise RunMismatch(
            f"{run.url} was planned from {known}, not from {now}: `--append` adds what {now} has to it; "
            f"to index that alone, {_FRESH_START}"
        )
    if not changed and now.file and now.file not in {one.file for one in same}:
        log.warning(
            "%s changed after %s was planned from it, and the plan is frozen: `--append` adds what is new, "
            "`--sync` also deletes what is gone",
            *(now, run.url),
        )


def _require_same_columns(run: RunFolder, segments: Sequence[Segment], keep: Sequence[str]) -> None:
    """RunMismatch when other columns are asked for than the plan keeps; none asked for: those of the plan."""
    planned = segments[-1].columns
    if keep and set(keep) != set(planned):
        raise RunMismatch(
            f"{run.url} was planned with {_name_columns(planned)}, not with {_name_columns(keep)}: leave "
            "--keep out to go on with it, or use another run folder"
        )


def _name_columns(names: Iterable[str]) -> str:
    return " ".join(f"--keep {name}" for name in dict.fromkeys(names)) or "no --keep"


def describe_source(source: Source) -> PlanSource:
    """What a plan keeps of its source."""
    urls = sorted({normalise_url(url) for url in _as_list(source)})
    digest = hashlib.sha256("\n".join(urls).encode("utf-8", "surrogateescape")).hexdigest()
    file = _stat_file(urls[0]) if len(urls) == 1 else ""
    return PlanSource(tuple(urls[:SOURCES_SHOWN]), len(urls), digest, file)


def _stat_file(url: str) -> str:
    """Size and etag of a list, tar or table; empty for a folder, a glob, or what cannot be looked at."""
    with contextlib.suppress(OSError, InputError, TransientStoreError):
        found = None if is_glob(url) else stat_input(url)
        if found is not None and not found.is_folder:
            return f"{found.size_bytes} {found.etag}"
    return ""


@dataclass(frozen=True)
class Listing:
    """Images in the order of their URIs, and what was seen of their kept columns, whose values JSON holds."""

    refs: Iterator[ImageRef]
    kept: KeptColumns


def list_sorted(source: Source, keep: Sequence[str] = (), *, may_be_empty: bool = False) -> Listing:
    """All images of a source; InputError when there are none, unless it `may_be_empty`."""
    kept = KeptColumns(keep)
    refs = sort_refs(kept.watch(list_images(source, keep=kept.names, may_be_empty=may_be_empty)))
    first = next(refs, None)  # sorted, so that by now all were seen
    if first is None:
        if may_be_empty:
            return Listing(refs, kept)
        raise InputError(f"no image in {source}")
    return Listing(chain([first], refs), kept)


def _require_enough(listing: Listing, at_least: int, settings: Settings) -> Listing:
    """InputError when the sample of so few images would not be enough for the reduction."""
    first = list(islice(listing.refs, at_least))
    if min(len(first), settings.sample.num_images) < at_least:
        short = len(first) < at_least
        raise InputError(
            f"reduction.method=pca to {settings.reduction.dim} dimensions is learned on at least {at_least} "
            + (f"images, there are {len(first)}" if short else "sampled images, sample.num_images is less")
            + ": use --set reduction.method=flatten, a smaller reduction.dim, or a --background of so many"
        )
    return replace(listing, refs=chain(first, listing.refs))


def _compare_with_deleted(
    run: RunFolder, segments: Sequence[Segment], synced: Source | None, *, undelete: bool
) -> SourceComparison:
    """A comparison that knows what was deleted and, of a source that is synced, what it was to have."""
    records = read_deletions(run)
    by_user, by_sync = (
        set(list_deleted(run, [one for one in records if one.why == why]).tolist())
        for why in (BY_USER, BY_SYNC)
    )
    if undelete:
        by_user, by_sync = set(), by_user | by_sync
    own = [] if synced is None else _segments_of(segments, describe_source(synced))
    return SourceComparison(by_user, by_sync - by_user, own)


def _as_recorded(run_url: str, settings: Settings) -> dict[str, Any]:
    """The settings as the run has them, where they mean the same: an older release knew fewer of them."""
    if is_run(run_url):
        recorded = RunFolder.open(run_url).settings
        if parse_settings(recorded) == settings:
            return recorded
    return settings.model_dump(mode="json")


def _segments_of(segments: Sequence[Segment], source: PlanSource) -> list[Segment]:
    return [segment for segment in segments if segment.source.sha256 == source.sha256]


def _add_segment(
    run: RunFolder,
    settings: Settings,
    segments: Sequence[Segment],
    listing: Listing,
    source: Source,
    compared: SourceComparison,
    *,
    accept: bool,
) -> bool:
    """A segment of the images that are new or changed; a changed one replaces the old at the next build.

    What is gone is deleted before that. False when another process was first with the next segment.
    """
    columns = listing.kept.resolve_types(segments[-1].columns if segments else None)
    if empty := [name for name in columns if name not in listing.kept.names]:
        log.warning("%s: %s stay empty for what is added: --keep fills them", run.url, ", ".join(empty))
    fresh = compared.select_new(listing.refs, iter_planned(run, segments))
    first = next(fresh, None)
    if first is None:
        log.info("%s: nothing new in %s", run.url, source)
        _delete_gone(run, settings, source, compared, accept=accept)
        return True
    return write_segment(
        *(run, settings, segments, chain([first], fresh), columns, source, compared.replaced),
        before_record=lambda: _delete_gone(run, settings, source, compared, accept=accept),
    )


def _delete_gone(
    run: RunFolder, settings: Settings, source: Source, compared: SourceComparison, *, accept: bool
) -> None:
    """Record what is gone from a source as deleted; RunFailed when it is too much to be true."""
    gone, limit = len(compared.gone), settings.publish.max_gone_share
    if gone > limit * compared.own_living and not accept:
        raise RunFailed(
            f"nothing was changed: {gone} of the {compared.own_living} images that {run.url} has of "
            f"{describe_source(source)} are gone from there, more than publish.max_gone_share = {limit:g}; "
            "if they are to be deleted, `--accept` does so"
        )
    if gone:
        record_deletion(run, np.array(compared.gone, np.int64), BY_SYNC)


def write_segment(
    run: RunFolder,
    settings: Settings,
    before: Sequence[Segment],
    refs: Iterable[ImageRef],
    columns: Mapping[str, str],
    source: Source,
    replaced: Sequence[int],
    before_record: Callable[[], None] = lambda: None,
) -> bool:
    """Freeze a list of images as the next segment; False when another process was first.

    `before_record` is called when all of `refs` were seen.
    """
    number, attempt = len(before) + 1, new_attempt()
    first_id = before[-1].next_id if before else 0
    queries = SampleDraw(QUERY_SEED, QUERY_SPARE * settings.publish.num_queries)
    draw = SampleDraw(settings.sample.seed, settings.sample.num_images, queries)
    files: list[StoredFile] = []
    next_id, images_per_shard = first_id, settings.plan.images_per_shard
    for chunk in _chunks(refs, settings.plan.images_per_shard * SHARDS_PER_FILE):
        if not files:  # of a collection so small that its shards are, this is all
            images_per_shard = shard_size(len(chunk), settings.plan.images_per_shard)
        table = tabulate_refs(chunk, next_id, columns)
        draw.add(table)
        files.append(run.write_table(segment_stage(number, attempt), len(files), attempt, table))
        next_id += len(chunk)
    segment = Segment(
        number=number,
        first_id=first_id,
        num_images=next_id - first_id,
        first_shard=before[-1].next_shard if before else 0,
        images_per_shard=images_per_shard,
        files=tuple(files),
        sample=run.write_table(SAMPLE_STAGE, number, attempt, draw.table()),
        queries=run.write_table(QUERY_STAGE, number, attempt, queries.table()),
        source=describe_source(source),
        replaced=tuple(replaced),
        columns=dict(columns),
    )
    before_record()
    hit_failpoint("data_written", "plan", number)
    won = run.plan.create(segment, attempt=attempt).won
    log.info("plan %s: %d images (%s)", number, segment.num_images, "won" if won else "lost")
    return won


def tabulate_refs(refs: Sequence[ImageRef], first_id: int, kept: Mapping[str, str] | None = None) -> pa.Table:
    """Planned images, with ids from `first_id` on and the `kept` columns in their types."""
    columns = {
        "image_id": range(first_id, first_id + len(refs)),
        "uri": [ref.uri for ref in refs],
        "size_bytes": [ref.size_bytes for ref in refs],
        "etag": [ref.etag for ref in refs],
    }
    table = pa.table({k: pa.array(v, PLANNED_IMAGES.field(k).type) for k, v in columns.items()})
    for name, kind in (kept or {}).items():
        values = to_arrow([(ref.columns or {}).get(name) for ref in refs], kind)
        table = table.append_column(name, values)
    return table


def _chunks(refs: Iterable[ImageRef], size: int) -> Iterator[list[ImageRef]]:
    rest = iter(refs)
    while chunk := list(islice(rest, size)):
        yield chunk


class SampleDraw:
    """Keeps the k images of smallest hash while the plan streams by; the others go on to `rest`."""

    def __init__(self, seed: int, count: int, rest: SampleDraw | None = None) -> None:
        self.seed, self.count, self.rest = seed, count, rest
        self._heap: list[tuple[int, int, tuple[Any, ...]]] = []  # negated, so the largest hash is on top

    def add(self, table: pa.Table) -> None:
        for row in zip(*(table.column(name).to_pylist() for name in PLANNED_IMAGES.names), strict=True):
            self._add_row(row)

    def _add_row(self, row: tuple[Any, ...]) -> None:
        entry = (-hash_uri(self.seed, row[1]), -row[0], row)
        if len(self._heap) < self.count:
            heapq.heappush(self._heap, entry)
            return
        dropped = heapq.heappushpop(self._heap, entry)
        if self.rest is not None:
            self.rest._add_row(dropped[2])

    def table(self) -> pa.Table:
        rows = sorted(row for _, _, row in self._heap)
        return pa.Table.from_pylist(
            [dict(zip(PLANNED_IMAGES.names, row, strict=True)) for row in rows], schema=PLANNED_IMAGES
        )


def record_background(
    run: RunFolder, settings: Settings, source: Source, drawn: tuple[pa.Table, int] | None = None
) -> None:
    """Freeze the background of a run; RunMismatch when it has another one or learned without one."""
    recorded = run.background.latest()
    if recorded is None and (run.models.latest() is not None or run.commits(SAMPLE_VLADS).committed()):
        raise RunMismatch(
            f"the models of {run.url} are learned already, without a background: "
            "give --background when a run is first indexed, or use another run folder"
        )
    given = describe_source(source)
    if recorded is None:
        table, num_images = drawn or draw_background(settings, source)
        images = run.write_table(BACKGROUND_STAGE, 1, new_attempt(), table)
        recorded = run.background.create(Background(1, given, num_images, images)).record
    if recorded.source.sha256 != given.sha256:
        raise RunMismatch(
            f"the background of {run.url} is {recorded.source}, not {given}: "
            "leave --background out to go on with it, or use another run folder"
        )


def draw_background(settings: Settings, source: Source) -> tuple[pa.Table, int]:
    """The images of smallest hash, and how many there are; InputError when they are too few."""
    draw, count = SampleDraw(settings.sample.seed, settings.reduction.num_images), 0
    for chunk in _chunks(_list_photographs(source), _REFS_AT_ONCE):
        draw.add(tabulate_refs(chunk, count))
        count += len(chunk)
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
    for url in _as_list(source):
        if not is_glob(url) and is_run(url):
            run = RunFolder.open(url)
            for image in iter_planned(run, require_segments(run)):
                yield ImageRef(image.uri, image.size_bytes, image.etag)
        else:
            for ref in list_sorted(url).refs:
                yield ImageRef(ref.uri, ref.size_bytes, ref.etag)
