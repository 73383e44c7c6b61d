"""Garbage: files of attempts that lost or were cut off, and of generations that were superseded.

A file goes only when its shard has a valid record that names another, and after a grace time: what
has no record yet may be in flight.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ckn_scale.errors import CorruptData, InputError
from ckn_scale.steps.build_index import BuildIndex
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
        if (path not in named and _is_settled(path, settled)) or (samples and _is_of_sample(path))
    ]
    candidates += run.store.list_temps()
    oldest = time.time() - grace_s
    ages = map_in_threads(run.store.modified_at, candidates)
    return sorted(path for path, at in zip(candidates, ages, strict=True) if at <= oldest)


def remove_samples(run: RunFolder) -> None:
    """What the models were learned from: needed no more once a version with them is published.

    Whoever still learns (another driver, or to mend a damaged model) finds them gone and makes them again.
    """
    paths = [path for path in run.store.list("samples") if _is_of_sample(path)]
    if paths and run.models.latest() is not None:
        remove_files(run, paths)


def remove_files(run: RunFolder, paths: Sequence[str]) -> None:
    list(map_in_threads(run.store.delete, paths))
    run.events.write("garbage_removed", files=len(paths))
    run.events.flush()


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


def _is_of_sample(path: str) -> bool:
    return path.startswith("samples/") and not path.startswith(f"{SAMPLE_STAGE}/")


def _is_settled(path: str, settled: dict[str, set[int]]) -> bool:
    if (match := _PLAN_FILE.fullmatch(path)) is not None:
        return int(match["segment"]) in settled[IMAGES_STAGE]
    if (match := _SHARD_FILE.fullmatch(path)) is not None:
        return int(match["shard"]) in settled.get(match["stage"], set())
    if (match := _INDEX_FILE.fullmatch(path)) is not None:
        return int(match["shard"]) in settled.get(BuildIndex.name, set())
    return False
