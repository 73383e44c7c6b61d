"""Garbage: files of lost attempts, of generations that were superseded, and of what was purged.

A file goes only when its shard has a valid record that names another, and after a grace time: what
has no record yet may be in flight. `find_purged_files` needs no grace time: what it finds is older than the
record that stands in its place.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from ckn_scale.errors import CorruptData, InputError
from ckn_scale.storage.builds import cut_index_shards, number_index_shard
from ckn_scale.storage.deletions import find_purged
from ckn_scale.storage.index_files import read_manifest
from ckn_scale.storage.plans import read_segments
from ckn_scale.storage.records import map_in_threads
from ckn_scale.storage.run_folder import (
    AUGMENT_INDEX,
    BUILD_INDEX,
    ENCODE_IMAGES,
    IMAGES_STAGE,
    MAKE_CODES,
    PLANT_QUERIES,
    QUERY_STAGE,
    SAMPLE_STAGE,
    RunFolder,
    is_of_sample,
    parse_data_path,
    planted_stage,
)
from ckn_scale.storage.run_records import Purge, Segment, Version
from ckn_scale.storage.stored_files import read_table


def find_garbage(run: RunFolder, *, grace_s: float, samples: bool = False) -> list[str]:
    """Paths that may be removed, sorted; younger than `grace_s` are none of them.

    `samples` adds what was drawn from the sampled images; InputError while models are learned from it.
    """
    if samples and run.models.latest() is None:
        raise InputError(f"{run.url} has no models yet: its training sample is still needed")
    named, recorded = _read_records(run)
    candidates = [
        path
        for path in run.store.list("")
        if (path not in named and parse_data_path(path) in recorded) or (samples and is_of_sample(path))
    ]
    candidates += [*run.store.list_temps(), *find_purged_files(run)]
    oldest = time.time() - grace_s
    ages = map_in_threads(partial(_modified_at, run), candidates)
    return sorted({path for path, at in zip(candidates, ages, strict=True) if at <= oldest})


def _modified_at(run: RunFolder, path: str) -> float:
    """What is gone meanwhile, such as the temporary file of a record, is nobody's garbage."""
    try:
        return run.store.modified_at(path)
    except FileNotFoundError:
        return math.inf


def _read_records(run: RunFolder) -> tuple[set[str], set[tuple[str, int]]]:
    """Files that valid records name, and all (stage or step, number) that have such a record."""
    named: set[str] = set()
    recorded: set[tuple[str, int]] = set()
    for label in run.logs():
        for commit in run.commits(label).committed().values():
            named.update(file.path for file in commit.files.values())
            recorded.update((one, commit.shard_id) for one in (commit.step, *commit.files))
    for segment in run.plan.all():
        named.update(file.path for file in (*segment.files, segment.sample, segment.queries))
        recorded.update((stage, segment.number) for stage in (IMAGES_STAGE, SAMPLE_STAGE, QUERY_STAGE))
    for version in list_restorable(run):
        with contextlib.suppress(CorruptData):
            shards = read_manifest(run.store, version.manifest).shards
            named.update(file.path for shard in shards for file in shard.files)
    return named, recorded


def list_restorable(run: RunFolder) -> list[Version]:
    """The versions that a rollback may ask for: those since the last purge."""
    versions = run.versions.all()
    return [one for one in versions if one.purge >= versions[-1].purge]


def find_purged_files(run: RunFolder) -> list[str]:
    """Files that hold, or may hold, something of purged images: none that a record since the purge needs.

    Of encoded shards what an attempt wrote before the record that counts: it has lost, or was superseded.
    Index shards that no version since the purge has, and that are not made of what is encoded now; tables of
    planted queries that have one for a purged image.
    """
    current, segments, purge = run.versions.latest(), read_segments(run), run.purges.latest()
    if current is None or purge is None or current.purge < purge.number:
        return []  # not published yet
    written: dict[tuple[str, int], list[str]] = defaultdict(list)
    for path in run.store.list(""):
        if (named := parse_data_path(path)) is not None:
            written[named].append(path)
    unused = _list_unused_shards(run, segments, purge, written)
    return sorted(
        [
            *_find_superseded(run, written),
            *_find_older(run, unused, run.versions.path(current.number)),
            *_find_purged_queries(run, find_purged(run, segments, purge).ids, written),
        ]
    )


def _find_superseded(run: RunFolder, written: Mapping[tuple[str, int], Sequence[str]]) -> Iterator[str]:
    log = run.commits(ENCODE_IMAGES)
    for shard_id, commit in log.committed().items():
        paths = (path for stage in commit.files for path in written.get((stage, shard_id), ()))
        others = set(paths) - {file.path for file in commit.files.values()}
        yield from _find_older(run, sorted(others), log.path(shard_id, commit.generation))


def _list_unused_shards(
    run: RunFolder,
    segments: Sequence[Segment],
    purge: Purge,
    written: Mapping[tuple[str, int], Sequence[str]],
) -> list[str]:
    """Files of index shards that are neither made of what is encoded now nor in a version since the purge."""
    encoded, used = run.commits(ENCODE_IMAGES).committed(), set[tuple[str, int] | None]()
    for position, shards in enumerate(cut_index_shards(run, segments, purge)):
        if all(one in encoded for one in shards):
            used.add((BUILD_INDEX, number_index_shard(position, [encoded[one] for one in shards])))
    restorable = [read_manifest(run.store, version.manifest) for version in list_restorable(run)]
    named_files = {file.path for one in restorable for shard in one.shards for file in shard.files}
    used.update(map(parse_data_path, named_files))
    derived = _list_derived(run) - named_files
    return [
        path
        for named, paths in written.items()
        for path in paths
        if named[0] == BUILD_INDEX and (named not in used or path in derived)
    ]


def _list_derived(run: RunFolder) -> set[str]:
    """Files of index shards that have something of images of other shards in them."""
    if not run.settings["index"].get("augment"):
        return set()
    labels = [label for label in run.logs() if label.startswith((AUGMENT_INDEX, MAKE_CODES))]
    commits = [commit for label in labels for commit in run.commits(label).committed().values()]
    return {file.path for commit in commits for file in commit.files.values()}


def _find_purged_queries(
    run: RunFolder, purged: np.ndarray, written: Mapping[tuple[str, int], Sequence[str]]
) -> Iterator[str]:
    """Tables of planted queries with one for a purged image."""
    there = {
        path for (stage, _), paths in written.items() if stage.startswith(planted_stage("")) for path in paths
    }
    for label in (one for one in run.logs() if one.startswith(PLANT_QUERIES)):
        for commit in run.commits(label).committed().values():
            for file in (file for file in commit.files.values() if file.path in there):
                table = read_table(run.store, file, columns=["image_id"])
                if np.isin(table.column("image_id"), purged).any():
                    yield file.path


def _find_older(run: RunFolder, paths: Sequence[str], record: str) -> list[str]:
    """Those that were written before a record."""
    if not paths:
        return []
    recorded_at, times = run.store.modified_at(record), map_in_threads(run.store.modified_at, paths)
    return [path for path, at in zip(paths, times, strict=True) if at < recorded_at]
