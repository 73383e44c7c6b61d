"""Garbage: files of attempts that lost or were cut off, and of generations that were superseded.

A file goes only when its shard has a valid record that names another, and after a grace time: what
has no record yet may be in flight.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Iterator

from ckn_scale.errors import CorruptData, InputError
from ckn_scale.steps.publish import is_of_sample
from ckn_scale.storage.builds import BUILT
from ckn_scale.storage.index_files import read_manifest
from ckn_scale.storage.records import map_in_threads
from ckn_scale.storage.run_folder import IMAGES_STAGE, QUERY_STAGE, SAMPLE_STAGE, RunFolder
from ckn_scale.storage.shards import Commit

_SHARD_FILE = re.compile(r"(?P<stage>.+)/(?P<shard>\d{5,})-[0-9a-f]+\.parquet")
_INDEX_FILE = re.compile(r"index/(?P<shard>\d{5,})-[0-9a-f]+/shard-\d{5,}\..+")

_PLAN_FILE = re.compile(IMAGES_STAGE + r"/(?P<segment>\d{6,})-[0-9a-f]+/.+")


def find_garbage(run: RunFolder, *, grace_s: float, samples: bool = False) -> list[str]:
    """Paths that may be removed, sorted. `samples` adds what was drawn from the sampled images.

    The list of those images stays: the queries that certify a version are drawn from it.
    """
    if samples and run.models.latest() is None:
        raise InputError(f"{run.url} has no models yet: its training sample is still needed")
    named, settled = _read_records(run)
    candidates = [
        path
        for path in run.store.list("")
        if (path not in named and _is_settled(path, settled)) or (samples and is_of_sample(path))
    ]
    candidates += run.store.list_temps()
    oldest = time.time() - grace_s
    ages = map_in_threads(run.store.modified_at, candidates)
    return sorted(path for path, at in zip(candidates, ages, strict=True) if at <= oldest)


def _read_records(run: RunFolder) -> tuple[set[str], dict[str, set[int]]]:
    """Files that standing records name, and the shards that have such a record, by stage."""
    named: set[str] = set()
    settled: dict[str, set[int]] = defaultdict(set)
    for commit in _standing_commits(run):
        settled[commit.step].add(commit.shard_id)
        for stage, file in commit.files.items():
            named.add(file.path)
            settled[stage].add(commit.shard_id)
    for segment in run.plan.all():
        for stage in (IMAGES_STAGE, SAMPLE_STAGE, QUERY_STAGE):
            settled[stage].add(segment.number)
        named.update(file.path for file in (*segment.files, segment.sample, segment.queries))
    named.update(_published_files(run))
    return named, settled


def _published_files(run: RunFolder) -> Iterator[str]:
    """What any version serves, so that a rollback finds it."""
    for version in run.versions.all():
        with contextlib.suppress(CorruptData):
            manifest = read_manifest(run.store, version.manifest)
            for shard in manifest.shards:
                yield shard.index.path
                yield shard.table.path


def _standing_commits(run: RunFolder) -> Iterator[Commit]:
    for log in run.logs():
        yield from run.commits(log).committed().values()


def _is_settled(path: str, settled: dict[str, set[int]]) -> bool:
    if (match := _PLAN_FILE.fullmatch(path)) is not None:
        return int(match["segment"]) in settled[IMAGES_STAGE]
    if (match := _SHARD_FILE.fullmatch(path)) is not None:
        return int(match["shard"]) in settled.get(match["stage"], set())
    if (match := _INDEX_FILE.fullmatch(path)) is not None:
        return int(match["shard"]) in settled.get(BUILT, set())
    return False
