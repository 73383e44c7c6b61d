"""Purge: a build without what is dead, after which nothing of it is left in the run but its rows of the plan.

A numbered record says which images go and how index shards are cut from then on: small ones are joined up to
the size of a full one. The encoded shards that hold dead images get their next generation without them
(`steps/purge_images.py`), what changed is built, certified and published, and then the files of before go.
Whoever publishes after the record goes by it, too, so a purge that was killed is finished by the next call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckn_scale.config import parse_settings
from ckn_scale.errors import CorruptData, RunFailed
from ckn_scale.failpoints import hit_failpoint
from ckn_scale.pipeline import encode, publish
from ckn_scale.runners.driver import Driver
from ckn_scale.runs.collect_garbage import find_purged_files
from ckn_scale.steps.publish import remove_files, remove_samples
from ckn_scale.steps.purge_images import PurgeImages, find_unpurged
from ckn_scale.storage.builds import cut_index_shards
from ckn_scale.storage.deletions import adjust_states, find_dead, find_purged, read_deletions
from ckn_scale.storage.plans import count_shards, find_segment, require_segments
from ckn_scale.storage.run_folder import ENCODE_IMAGES, RunFolder
from ckn_scale.storage.run_records import Purge, Segment
from ckn_scale.storage.shards import Commit

log = logging.getLogger(__name__)

MAX_STARTS = 20  # while others change the run


@dataclass(frozen=True)
class PurgeReport:
    """What a purge came to."""

    version: int | None  # that is current now
    purged: int  # images that the run has nothing of any more
    index_shards: int
    files_removed: int
    files_left: int  # that are younger than the grace time


def purge_run(driver: Driver, *, accept: bool = False, grace_s: float = 0.0) -> PurgeReport:
    """Leave nothing of deleted and replaced images; what only older versions need goes after `grace_s`."""
    run = driver.run
    for _ in range(MAX_STARTS):
        encode(driver)  # what was planned meanwhile
        purge = request_purge(run)
        if purge is None or _clear_shards(driver, purge):
            break
    else:
        raise RunFailed(f"{run.url}: others changed it {MAX_STARTS} times before it was purged; try again")
    version = run.versions.read(publish(driver, accept=accept, encode=True))
    hit_failpoint("published", "purge", version.number)
    removed, left = _remove_files(run, grace_s) if purge else (0, 0)
    segments = require_segments(run)
    return PurgeReport(
        version=version.number,
        purged=len(find_purged(run, segments, purge).ids),
        index_shards=len(cut_index_shards(run, segments[: version.segments], purge)),
        files_removed=removed,
        files_left=left,
    )


def request_purge(run: RunFolder) -> Purge | None:
    """The record to go by: the latest if it covers all that is dead, else the next; None: nothing to do."""
    while True:
        number, latest = run.purges.next_number(), run.purges.latest()
        segments, deletions = require_segments(run), read_deletions(run)
        dead, purged = find_dead(run, segments, deletions), find_purged(run, segments, latest)
        cut = join_index_shards(run, segments, latest)
        if np.array_equal(dead.ids, purged.ids) and cut == cut_index_shards(run, segments, latest):
            return latest
        offered = Purge(
            number=number,
            deletions=len(deletions),
            segments=len(segments),
            first_shards=tuple(shards.start for shards in cut),
            next_shard=count_shards(segments),
        )
        hit_failpoint("data_written", "purge", number)
        try:
            run.purges.create(offered)  # whoever won: it is looked at again
        except CorruptData:
            log.warning("%s is damaged: the next number is taken", run.purges.path(number))
        hit_failpoint("recorded", "purge", number)


def join_index_shards(run: RunFolder, segments: Sequence[Segment], purge: Purge | None) -> list[range]:
    """The cut of index shards with neighbours joined while their living images fit into a full one."""
    settings = parse_settings(run.settings)
    full = settings.index.shards_per_index_shard * settings.plan.images_per_shard
    counts = _count_living(run, segments)
    joined: list[range] = []
    size = 0
    for shards in cut_index_shards(run, segments, purge):
        more = sum(counts[one] for one in shards)
        if joined and size + more <= full:
            joined[-1], size = range(joined[-1].start, shards.stop), size + more
        else:
            joined.append(shards)
            size = more
    return joined


def _count_living(run: RunFolder, segments: Sequence[Segment]) -> Mapping[int, int]:
    """Usable images by encoded shard; those that are planned where it is not encoded yet."""
    encoded = run.commits(ENCODE_IMAGES).committed()
    dead = find_dead(run, segments, read_deletions(run))
    adjusted = adjust_states(run, segments, encoded, dead)
    return dict(_iter_living(segments, encoded, adjusted))


def _iter_living(
    segments: Sequence[Segment], encoded: Mapping[int, Commit], adjusted: Mapping[int, Mapping[str, int]]
) -> Iterator[tuple[int, int]]:
    for shard_id in range(count_shards(segments)):
        if shard_id in encoded:
            yield shard_id, adjusted.get(shard_id, encoded[shard_id].states).get("ok", 0)
        else:
            first, end = find_segment(segments, shard_id).ids_of_shard(shard_id)
            yield shard_id, end - first


def _clear_shards(driver: Driver, purge: Purge) -> bool:
    """The next generation of encoded shards that hold purged images; whether none is left."""
    run = driver.run
    segments = require_segments(run)
    purged = find_purged(run, segments, purge)
    unpurged = find_unpurged(run, segments, run.commits(ENCODE_IMAGES).committed(), purged)
    if unpurged:
        driver.rerun_shards(PurgeImages(run), unpurged, f"purge {purge.number}")
    return not find_unpurged(run, segments, run.commits(ENCODE_IMAGES).committed(), purged)


def _remove_files(run: RunFolder, grace_s: float) -> tuple[int, int]:
    """How many files were removed, and how many are left until the grace time is over."""
    current = run.versions.latest()
    files = find_purged_files(run)
    if current is None or time.time() - run.store.modified_at(run.versions.path(current.number)) < grace_s:
        return 0, len(files)
    remove_samples(run)
    remove_files(run, files)
    return len(files), 0
