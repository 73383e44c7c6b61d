"""Garbage: files of lost attempts, of generations that were superseded, and of what was purged.

A file goes only when its shard has a valid record that names another, and after a grace time: what
has no record yet may be in flight. `find_purged_files` needs no grace time: what it finds is older than the
record that stands in its place.
"""

from __future__ import annotations

import contextlib
import time

from ckn_scale.errors import CorruptData, InputError
from ckn_scale.storage.index_files import read_manifest
from ckn_scale.storage.records import map_in_threads
from ckn_scale.storage.run_folder import (
    IMAGES_STAGE,
    QUERY_STAGE,
    SAMPLE_STAGE,
    RunFolder,
    is_of_sample,
    parse_data_path,
)
from ckn_scale.storage.run_records import Version


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
    candidates += run.store.list_temps()
    oldest = time.time() - grace_s
    ages = map_in_threads(run.store.modified_at, candidates)
    return sorted(path for path, at in zip(candidates, ages, strict=True) if at <= oldest)


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
