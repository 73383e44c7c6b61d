"""Plan: list the images once, freeze the list, give ids, cut it into shards, draw the sample.

A plan segment is a numbered record; new images later are the next segment. Whoever loses the race for
a number looks again at what is new against the plan that now stands. Ids are dense and in sorted-URI
order within a segment. The sample is the k smallest hashes of URIs: the same images for
any sharding, order and worker count.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from ckn_scale.config import Settings
from ckn_scale.errors import CorruptData, InputError, RunFailed, RunMismatch, TransientStoreError
from ckn_scale.failpoints import hit_failpoint
from ckn_scale.schemas import PLANNED_IMAGES
from ckn_scale.storage.filesystems import normalise_url
from ckn_scale.storage.image_refs import sort_refs
from ckn_scale.storage.image_sources import ImageRef, list_images
from ckn_scale.storage.input_files import is_glob, stat_input
from ckn_scale.storage.kept_columns import ARROW_TYPES, KeptColumns, to_arrow
from ckn_scale.storage.records import new_attempt
from ckn_scale.storage.run_folder import RunFolder, is_run
from ckn_scale.storage.shards import DataFile, read_table, write_table

log = logging.getLogger(__name__)

IMAGES_STAGE, SAMPLE_STAGE, QUERY_STAGE = "images", "samples/images", "queries/images"
QUERY_SEED = 1  # apart from the sample's, so that the queries are a draw of their own
QUERY_SPARE = 2  # times as many as are asked, for those that are replaced later
SHARDS_PER_FILE = 256
MAX_RACES = 20  # lost one after the other: something else is wrong then
SOURCES_SHOWN = 3
_FRESH_START = "or if the first list was wrong, use another run folder or remove this one"
SHARDS_OF_A_SMALL_SET, IMAGES_OF_A_SMALL_SHARD = 64, 4

Source: TypeAlias = "str | Sequence[str]"


@dataclass(frozen=True)
class PlannedImage:
    image_id: int
    uri: str
    size_bytes: int
    etag: str


@dataclass(frozen=True)
class Segment:
    """One frozen list of images."""

    number: int
    first_id: int
    num_images: int
    first_shard: int
    images_per_shard: int
    files: tuple[DataFile, ...]
    sample: DataFile
    queries: DataFile  # images outside the sample to ask for when a version is certified
    source: dict[str, Any]
    replaced: tuple[int, ...]  # ids of earlier segments whose content changed
    columns: dict[str, str]  # kept columns of the run as of this segment, with their types

    @property
    def num_shards(self) -> int:
        return -(-self.num_images // self.images_per_shard)

    @staticmethod
    def from_record(number: int, body: dict[str, Any]) -> Segment:
        return Segment(
            number=number,
            first_id=body["first_id"],
            num_images=body["num_images"],
            first_shard=body["first_shard"],
            images_per_shard=body["images_per_shard"],
            files=tuple(DataFile(**file) for file in body["files"]),
            sample=DataFile(**body["sample"]),
            queries=DataFile(**body["queries"]),
            source=body["source"],
            replaced=tuple(body["replaced"]),
            columns=dict(body["columns"]),
        )


def plan_images(
    run_url: str,
    settings: Settings,
    source: Source,
    keep: Sequence[str] = (),
    *,
    append: bool = False,
    at_least: int = 0,
) -> RunFolder:
    """The run, with its plan. The first call lists `source`; later ones find the plan frozen.

    With `append` what `source` has beyond the plan becomes the next segment; without it another source
    than the run's own is refused. Bad input is refused before anything is written: a source is listed,
    and found to hold an image and enough of them to learn from (`at_least`), before the folder is made.
    """
    if normalise_url(run_url) in {normalise_url(one) for one in _as_list(source)}:
        raise InputError(
            f"{run_url} holds the images: give the run a folder of its own, such as {run_url.rstrip('/')}/run"
        )
    listing = None if is_run(run_url) else _require_enough(list_sorted(source, keep), at_least, settings)
    run = RunFolder.create(run_url, settings.model_dump(mode="json"), {})
    for _ in range(MAX_RACES):
        segments = read_segments(run)
        if segments and not append:
            _require_same_source(run, segments, source)
            return run
        if _add_segment(run, settings, segments, listing or list_sorted(source, keep), source):
            return run
        listing = None  # used up; what is new is looked at again, against the plan that now stands
        log.warning("%s: another process has just planned images; looking again at what is new", run.url)
    raise RunFailed(f"{run.url}: {MAX_RACES} times another process was first to add to the plan; try again")


def _as_list(source: Source) -> Sequence[str]:
    return [source] if isinstance(source, str) else source


def _require_same_source(run: RunFolder, segments: Sequence[Segment], source: Source) -> None:
    """RunMismatch unless some segment was planned from `source`; a list that was edited since is told."""
    now = describe_source(source)
    planned = [segment.source for segment in segments]
    same = [one for one in planned if one["sha256"] == now["sha256"]]
    other = name_source(now)
    if not same:
        known = "; ".join(dict.fromkeys(map(name_source, planned[:SOURCES_SHOWN])))
        raise RunMismatch(
            f"{run.url} was planned from {known}, not from {other}: `--append` adds what {other} has to it; "
            f"to index that alone, {_FRESH_START}"
        )
    if now["file"] and now["file"] not in {one["file"] for one in same}:
        log.warning(
            "%s changed after %s was planned from it, and the plan is frozen: `--append` adds what is new; "
            "to leave out what is gone, %s",
            *(other, run.url, _FRESH_START),
        )


def describe_source(source: Source) -> dict[str, Any]:
    """What a plan keeps of its source; `sha256` is equal for relative and absolute paths, in any order."""
    urls = sorted({normalise_url(url) for url in _as_list(source)})
    digest = hashlib.sha256("\n".join(urls).encode("utf-8", "surrogateescape")).hexdigest()
    file = _stat_file(urls[0]) if len(urls) == 1 else ""
    return {"urls": urls[:SOURCES_SHOWN], "count": len(urls), "sha256": digest, "file": file}


def _stat_file(url: str) -> str:
    """Size and etag of a list, tar or table; empty for a folder, a glob, or what cannot be looked at."""
    with contextlib.suppress(OSError, InputError, TransientStoreError):
        found = None if is_glob(url) else stat_input(url)
        if found is not None and not found.is_folder:
            return f"{found.size_bytes} {found.etag}"
    return ""


def name_source(source: dict[str, Any]) -> str:
    more = source["count"] - len(source["urls"])
    return ", ".join(source["urls"]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Listing:
    """Images in the order of their URIs, and what was seen of their kept columns, whose values JSON holds."""

    refs: Iterator[ImageRef]
    kept: KeptColumns


def list_sorted(source: Source, keep: Sequence[str] = ()) -> Listing:
    """All images of a source; InputError when there are none."""
    kept = KeptColumns(keep)
    refs = sort_refs(kept.watch(list_images(source, keep=kept.names)))
    first = next(refs, None)  # sorted, so that by now all were seen
    if first is None:
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


def _add_segment(
    run: RunFolder, settings: Settings, segments: Sequence[Segment], listing: Listing, source: Source
) -> bool:
    """A segment of the images that are new or changed; a changed one replaces the old at the next build.

    False when another process was first with the next segment.
    """
    columns = listing.kept.settle(segments[-1].columns if segments else None)
    if empty := [name for name in columns if name not in listing.kept.names]:
        log.warning("%s: %s stay empty for what is added: --keep fills them", run.url, ", ".join(empty))
    replaced: list[int] = []
    fresh = select_new(listing.refs, iter_planned(run, segments), replaced)
    first = next(fresh, None)
    if first is None:
        log.info("%s: nothing new in %s", run.url, source)
        return True
    return write_segment(run, settings, segments, chain([first], fresh), columns, source, replaced)


def select_new(
    refs: Iterator[ImageRef], planned: Iterator[PlannedImage], replaced: list[int]
) -> Iterator[ImageRef]:
    """Of refs and planned images, both sorted by URI, the refs the plan does not hold as they are now.

    Ids of planned images whose content changed are added to `replaced`.
    """
    known = next(planned, None)
    for ref in refs:
        same: PlannedImage | None = None
        while known is not None and known.uri <= ref.uri:
            same = known if known.uri == ref.uri else same  # of several, the newest
            known = next(planned, None)
        if same is not None and (same.size_bytes, same.etag) == (ref.size_bytes, ref.etag):
            continue
        if same is not None:
            replaced.append(same.image_id)
        yield ref


def iter_planned(run: RunFolder, segments: Sequence[Segment]) -> Iterator[PlannedImage]:
    """All planned images by URI, then id; one file per segment in memory."""
    streams = (
        (image for file in segment.files for image in iter_images(read_table(run.store, file)))
        for segment in segments
    )
    return heapq.merge(*streams, key=lambda image: (image.uri, image.image_id))


def read_segments(run: RunFolder) -> list[Segment]:
    """The plan, in order. CorruptData when a record is damaged or gone: its ids would be given twice."""
    records, damage = run.plan.read_all()
    numbers = [number for number, _ in records]
    broken = set(range(1, max([*numbers, *damage], default=0) + 1)) - set(numbers)
    if not broken:
        return [Segment.from_record(number, body) for number, body in records]
    what = damage.get(min(broken), f"{run.store.address(run.plan.path(min(broken)))} is gone")
    raise CorruptData(
        f"{what}; the images it planned and their ids are unknown without it, so nothing can be added or "
        f"built: put a copy of it back, or use another run folder (`--models {run.url}` spares learning)"
    )


def read_whole_segments(run: RunFolder) -> list[Segment]:
    """Of a plan with damaged records those that are whole: to look at, not to build on."""
    return [Segment.from_record(number, body) for number, body in run.plan.read_all()[0]]


def require_segments(run: RunFolder) -> list[Segment]:
    segments = read_segments(run)
    if not segments:
        raise InputError(f"{run.url} has no plan yet: run `ckn-scale plan IMAGES RUN` first")
    return segments


def shard_size(num_images: int, largest: int) -> int:
    """Images per shard: `largest`, or fewer, so that a small collection keeps many workers busy.

    A function of the images alone, never of the workers: shards and bytes do not depend on who works.
    """
    return min(largest, max(IMAGES_OF_A_SMALL_SHARD, -(-num_images // SHARDS_OF_A_SMALL_SET)))


def list_replaced(segments: Sequence[Segment]) -> np.ndarray:
    """Sorted ids of images that a later segment has with other content."""
    return np.unique(np.array([one for segment in segments for one in segment.replaced], np.int64))


def count_shards(segments: Sequence[Segment]) -> int:
    return sum(segment.num_shards for segment in segments)


class PlanReader:
    """Reads the images of a shard; keeps the last file, as shards of one worker lie close together."""

    def __init__(self, run: RunFolder, segments: Sequence[Segment]) -> None:
        self.run, self.segments = run, segments
        self._last: tuple[str, pa.Table] | None = None

    def read_shard(self, shard_id: int) -> list[PlannedImage]:
        return list(iter_images(self.read_table(shard_id)))

    def count_images(self, shard_id: int) -> int:
        segment = next(s for s in reversed(self.segments) if s.first_shard <= shard_id)
        return min(
            segment.images_per_shard,
            segment.num_images - (shard_id - segment.first_shard) * segment.images_per_shard,
        )

    def read_table(self, shard_id: int) -> pa.Table:
        """The same rows with the user's kept columns, in the types that they have in the run by now."""
        if shard_id >= count_shards(self.segments):
            self.segments = require_segments(self.run)  # another process has appended since
        segment = next(s for s in reversed(self.segments) if s.first_shard <= shard_id)
        position = shard_id - segment.first_shard
        table = self._read_file(segment.files[position // SHARDS_PER_FILE])
        table = table.slice((position % SHARDS_PER_FILE) * segment.images_per_shard, segment.images_per_shard)
        for name, kind in self.segments[-1].columns.items():
            place = table.schema.get_field_index(name)
            table = table.set_column(place, name, table.column(place).cast(ARROW_TYPES[kind]))
        return table

    def _read_file(self, file: DataFile) -> pa.Table:
        if self._last is None or self._last[0] != file.path:
            self._last = (file.path, read_table(self.run.store, file))
        return self._last[1]


def read_sample(run: RunFolder, segments: Sequence[Segment]) -> list[PlannedImage]:
    """The images everything is learned on: drawn from the first segment, in id order."""
    return list(iter_images(read_table(run.store, segments[0].sample)))


def iter_images(table: pa.Table) -> Iterator[PlannedImage]:
    columns = [table.column(name).to_pylist() for name in ("image_id", "uri", "size_bytes", "etag")]
    return (PlannedImage(*row) for row in zip(*columns, strict=True))


def write_segment(
    run: RunFolder,
    settings: Settings,
    before: Sequence[Segment],
    refs: Iterable[ImageRef],
    columns: Mapping[str, str],
    source: Source,
    replaced: Sequence[int],
) -> bool:
    """Freeze a list of images as the next segment; False when another process was first."""
    number, attempt = len(before) + 1, new_attempt()
    first_id = before[-1].first_id + before[-1].num_images if before else 0
    queries = SampleDraw(QUERY_SEED, QUERY_SPARE * settings.publish.num_queries)
    draw = SampleDraw(settings.sample.seed, settings.sample.num_images, queries)
    files: list[DataFile] = []
    next_id, images_per_shard = first_id, settings.plan.images_per_shard
    for chunk in _chunks(refs, settings.plan.images_per_shard * SHARDS_PER_FILE):
        if not files:  # of a collection so small that its shards are, this is all
            images_per_shard = shard_size(len(chunk), settings.plan.images_per_shard)
        table = tabulate_refs(chunk, next_id, columns)
        draw.add(table)
        files.append(write_table(run, f"{IMAGES_STAGE}/{number:06d}-{attempt}", len(files), attempt, table))
        next_id += len(chunk)
    sample = write_table(run, SAMPLE_STAGE, number, attempt, draw.table())
    body = {
        "attempt": attempt,
        "source": describe_source(source),
        "first_id": first_id,
        "num_images": next_id - first_id,
        "first_shard": before[-1].first_shard + before[-1].num_shards if before else 0,
        "images_per_shard": images_per_shard,
        "files": [asdict(file) for file in files],
        "sample": asdict(sample),
        "queries": asdict(write_table(run, QUERY_STAGE, number, attempt, queries.table())),
        "replaced": list(replaced),
        "columns": list(columns.items()),
    }
    hit_failpoint("data_written", "plan", number)
    won = run.plan.create(number, body).won
    log.info("plan %s: %d images (%s)", number, next_id - first_id, "won" if won else "lost")
    return won


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


def hash_uri(seed: int, uri: str) -> int:
    digest = hashlib.blake2b(
        uri.encode("utf-8", "surrogateescape"), digest_size=8, salt=seed.to_bytes(8, "little")
    )
    return int.from_bytes(digest.digest(), "little")


def tabulate_refs(refs: Sequence[ImageRef], first_id: int, kept: Mapping[str, str] | None = None) -> pa.Table:
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
    chunk: list[ImageRef] = []
    for ref in refs:
        chunk.append(ref)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


BACKGROUND_STAGE = "background"
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
        record_background(run, settings, background, drawn)
    return run


def record_background(
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
        images = write_table(run, BACKGROUND_STAGE, 1, attempt, table)
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
