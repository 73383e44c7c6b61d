"""Draw: which images a version is asked for before it is published, and which of its index shards is asked.

The first version is asked for images of all segments, outside the training sample where there are
enough, through the whole index. A later one for what is new, at a cost that follows the append: in the
index shards that are new, and in a few older ones drawn by hash. Outcomes of images that were asked
before are taken over from the current version's certificate, as long as image and encoder are the same.
The draw is a file named by its content, so that all workers ask the same and a rerun finds what is done.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ckn_scale.config import parse_settings
from ckn_scale.errors import CorruptData
from ckn_scale.steps.plan_images import QUERY_SEED
from ckn_scale.storage.builds import name_shards
from ckn_scale.storage.deletions import NO_IDS, find_purged
from ckn_scale.storage.plans import PlannedImage, hash_uri, iter_images, read_sample
from ckn_scale.storage.records import new_attempt
from ckn_scale.storage.run_folder import ENCODE_IMAGES, RunFolder
from ckn_scale.storage.run_records import Certificate, Segment, Version
from ckn_scale.storage.stored_files import StoredFile, find_damage, read_file, read_table, write_file

OLDER_SHARDS = 8  # index shards that were there before an append and are asked for what it added, at most


@dataclass(frozen=True)
class QueryOutcome:
    """What became of one planted query, and the file that its vectors lie in."""

    image_id: int
    view: int
    outcome: str
    file: StoredFile
    unasked_rows: int = 0  # at most so many rows of the index may hold what comes before its original


@dataclass(frozen=True)
class Draw:
    """What a version is asked."""

    asked: tuple[PlannedImage, ...]
    new: int  # of those asked, how many the current version does not hold
    in_sample: int  # of those asked, how many the models were trained on
    taken_over: tuple[QueryOutcome, ...]
    new_shards: tuple[int, ...]  # index shards that nothing was asked of before: all queries are
    older_shards: tuple[int, ...]  # of the others those that the images of `asked` are asked of too

    @property
    def data(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @property
    def name(self) -> str:
        return hashlib.sha256(self.data).hexdigest()[:16]

    def view(self, position: int, num_views: int) -> int:
        """The view that the query at a position of `asked` shows: all views equally often.

        Appends of one image each begin with another view each, by its id.
        """
        first = self.asked[0].image_id if self.taken_over else 0
        return (first + position) % num_views


def draw_queries(
    run: RunFolder,
    segments: Sequence[Segment],
    numbers: Sequence[int],
    current: Version | None,
    dead: np.ndarray = NO_IDS,
) -> Draw:
    """What a version of these segments and index shards is asked, after `current`, the published one.

    Images that are `dead` are not asked for; others are asked in their place. When half of what was asked
    before is lost, all is asked anew.
    """
    count, gone = parse_settings(run.settings).publish.num_queries, set(dead.tolist())
    outcomes, known = _take_over(run, current.certificate if current is not None else Certificate())
    purged = _find_purged_files(run, segments, {one.file for one in outcomes})
    held = [one for one in outcomes if one.image_id not in gone and one.file not in purged]
    if current is None or 2 * len(held) <= len(outcomes):
        apart, trained = _list_candidates(run, segments, gone)
        asked = (apart + trained)[:count]
        in_sample = max(0, len(asked) - len(apart))
        return Draw(tuple(asked), len(asked), in_sample, (), tuple(numbers), ())
    new = [segment for segment in segments if segment.number > current.segments]
    apart, _ = _list_candidates(run, new, gone)
    added = apart[: max(count // 2, count - len(held))]
    asked = added + _list_spare(run, segments[: current.segments], gone, held, len(outcomes) - len(held))
    taken_over = _choose_held(held, count - len(asked), count - count // 2)
    new_shards = [number for number in numbers if number not in known]
    older_shards = _draw_older(numbers, known) if asked else []
    return Draw(tuple(asked), len(added), 0, tuple(taken_over), tuple(new_shards), tuple(older_shards))


def _find_purged_files(
    run: RunFolder, segments: Sequence[Segment], files: Iterable[StoredFile]
) -> set[StoredFile]:
    """Tables of queries that hold one of a purged image: they go, and others are asked instead."""
    purged = find_purged(run, segments, run.purges.latest()).ids
    if not len(purged):
        return set()
    tables = {file: read_table(run.store, file, columns=["image_id"]) for file in files}
    return {file for file, table in tables.items() if np.isin(table.column("image_id"), purged).any()}


def _list_spare(
    run: RunFolder, segments: Sequence[Segment], dead: set[int], held: Sequence[QueryOutcome], count: int
) -> list[PlannedImage]:
    """As many images as queries were lost, of those that nothing was asked for."""
    if count == 0:
        return []
    return _list_candidates(run, segments, dead | {one.image_id for one in held})[0][:count]


def _choose_held(held: Sequence[QueryOutcome], count: int, anchors: int) -> list[QueryOutcome]:
    """Of outcomes, newest first, `count`: the `anchors` that saw most of the index, else the newest.

    So half of the queries are of the whole index however many appends there were, and the others follow
    what is new.
    """
    by_coverage = sorted(held, key=lambda one: -one.unasked_rows)
    kept = {one.image_id for one in by_coverage[-anchors:]}
    newest = [one for one in held if one.image_id not in kept][: max(0, count - len(kept))]
    return [*newest, *(one for one in held if one.image_id in kept)][:count]


def _draw_older(numbers: Sequence[int], known: Collection[int]) -> list[int]:
    """By a hash that is another one for each build, so that appends do not all ask the same few."""
    build = name_shards(numbers)
    older = (number for number in numbers if number in known)
    by_hash = sorted(older, key=lambda number: hashlib.sha256(f"{build} {number}".encode()).digest())
    return sorted(by_hash[:OLDER_SHARDS])


def write_draw(run: RunFolder, draw: Draw) -> str:
    """The name that `read_draw` takes."""
    run.store.create(run.draw_path(draw.name), draw.data)
    return draw.name


def read_draw(run: RunFolder, name: str) -> Draw:
    """The draw of this name; CorruptData when its file has another content."""
    path = run.draw_path(name)
    data = run.store.read(path)
    if hashlib.sha256(data).hexdigest()[:16] != name:
        where = run.store.address(path)
        raise CorruptData(f"{where} is damaged: it does not have the content it is named by")
    body = json.loads(data)
    asked = tuple(PlannedImage(**one) for one in body.pop("asked"))
    taken_over = tuple(_as_outcome(one) for one in body.pop("taken_over"))
    body["new_shards"], body["older_shards"] = tuple(body["new_shards"]), tuple(body["older_shards"])
    return Draw(asked=asked, taken_over=taken_over, **body)


def write_outcomes(
    run: RunFolder, name: str, outcomes: Iterable[QueryOutcome], shards: Sequence[int]
) -> StoredFile:
    """What the next version takes over: every query's outcome, and the index shards of this one."""
    rows = [asdict(one) for one in outcomes]
    data = json.dumps({"outcomes": rows, "index_shards": list(shards)}, sort_keys=True).encode()
    return write_file(run.store, run.outcomes_path(name, new_attempt()), data, len(rows))


def name_encoder(run: RunFolder) -> str:
    """What made the vectors: outcomes of another encoder say nothing."""
    commit = run.commits(ENCODE_IMAGES).get(0)
    return "" if commit is None else commit.fingerprint


def read_outcomes(run: RunFolder, file: StoredFile) -> tuple[list[QueryOutcome], set[int]]:
    """What became of each query of a certificate, and the index shards of its version."""
    body = json.loads(read_file(run.store, file))
    return [_as_outcome(one) for one in body["outcomes"]], set(body["index_shards"])


def _take_over(run: RunFolder, certificate: Certificate) -> tuple[list[QueryOutcome], set[int]]:
    """The outcomes that can be taken over, and the index shards of that version.

    Neither when they, or vectors of their queries, are damaged: then all is asked anew, of the whole index.
    """
    if certificate.outcomes is None or certificate.encoder != name_encoder(run):
        return [], set()
    try:
        outcomes, shards = read_outcomes(run, certificate.outcomes)
    except CorruptData:
        return [], set()
    damaged = find_damage(run.store, {one.file for one in outcomes})
    return ([], set()) if damaged else (outcomes, shards)


def _list_candidates(
    run: RunFolder, segments: Sequence[Segment], dead: set[int]
) -> tuple[list[PlannedImage], list[PlannedImage]]:
    """Images to ask for, by hash: those the models were not trained on, and those they were."""
    generation = run.models.latest()
    adopted = generation is not None and generation.taken_from is not None
    apart: list[PlannedImage] = []
    trained: list[PlannedImage] = []
    for segment in segments:
        apart += iter_images(read_table(run.store, segment.queries))
        (trained if segment.number == 1 and not adopted else apart).extend(read_sample(run, [segment]))
    return _by_hash(apart, dead), _by_hash(trained, dead)


def _by_hash(images: Iterable[PlannedImage], dead: set[int]) -> list[PlannedImage]:
    kept = (image for image in images if image.image_id not in dead)
    return sorted(kept, key=lambda image: (hash_uri(QUERY_SEED, image.uri), image.image_id))


def _as_outcome(body: Mapping[str, Any]) -> QueryOutcome:
    return QueryOutcome(**{**body, "file": StoredFile(**body["file"])})
