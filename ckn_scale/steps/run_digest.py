"""One digest per stage over what is committed: equal for equal content, whoever made it and how.

File names, attempts, generations, the order of work and the number of workers do not enter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import pyarrow as pa

from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.steps.plan import read_segments
from ckn_scale.storage.digests import digest_rows
from ckn_scale.storage.index_files import read_manifest
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.shards import read_table


def digest_run(run: RunFolder) -> dict[str, str]:
    return {
        "plan": digest_rows(_read_plan(run)),
        "models": _digest_models(run),
        "vectors": digest_rows(_read_stage(run, "vectors")),
        "descriptors": digest_rows(_read_stage(run, "descriptors")),
        "thumbnails": digest_rows(_read_stage(run, "thumbnails")),
        "index": _digest_index(run),
    }


def _read_plan(run: RunFolder) -> Iterator[pa.Table]:
    for segment in read_segments(run):
        for file in segment.files:
            yield read_table(run.store, file)


def _read_stage(run: RunFolder, stage: str) -> Iterator[pa.Table]:
    for _, commit in sorted(run.commits(EncodeImages.name).committed().items()):
        yield read_table(run.store, commit.files[stage])


def _digest_models(run: RunFolder) -> str:
    latest = run.models.latest()
    models = {} if latest is None else latest[1]["models"]
    return _digest_lines(f"{name} {file['sha256']}" for name, file in sorted(models.items()))


def _digest_index(run: RunFolder) -> str:
    latest = run.versions.latest()
    if latest is None:
        return _digest_lines([])
    manifest = read_manifest(run.store, latest[1]["manifest"], latest[1]["manifest_sha256"])
    shards = (f"{s.shard} {s.rows} {s.index.sha256} {s.table.sha256}" for s in manifest.shards)
    return _digest_lines([f"{manifest.kind} {manifest.dim} {manifest.metric}", *shards])


def _digest_lines(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
