"""The published versions of a run: which there are, and how an earlier one becomes current again.

A rollback is the next version with what an earlier one has: numbers only grow, nothing is deleted, and
whoever follows the highest number answers from it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from ckn_scale.errors import CorruptData, InputError, RunFailed
from ckn_scale.failpoints import hit_failpoint
from ckn_scale.search.versions import require_not_purged
from ckn_scale.storage.index_files import read_manifest
from ckn_scale.storage.models import load_models
from ckn_scale.storage.records import map_in_threads
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.run_records import Version
from ckn_scale.storage.stored_files import StoredFile

log = logging.getLogger(__name__)

MAX_STARTS = 5  # while others publish


def list_versions(run: RunFolder) -> dict[str, Any]:
    """The form that `ckn-scale versions --json` prints, lowest number first.

    `written_at` is the time of the record's file: a copy of a run may have others.
    """
    records, damage = run.versions.read_all()
    times = map_in_threads(lambda record: run.store.modified_at(run.versions.path(record.number)), records)
    return {
        "run": run.url,
        "current": records[-1].number if records else None,
        "versions": [
            {
                "version": record.number,
                "rows": record.rows,
                "build": record.build,
                "restores": record.restores,
                "states": dict(record.states),
                "segments": record.segments,
                "generation": record.generation,
                "deletions": record.deletions,
                "purge": record.purge,
                "written_at": written_at,
                "certificate": record.certificate.to_body(),
            }
            for record, written_at in zip(records, times, strict=True)
        ],
        "damaged": [damage[number] for number in sorted(damage)],
    }


def roll_back(run: RunFolder, number: int | None = None) -> Version:
    """Publish again what version `number` has, by default the one before the current; what is current then.

    Nothing is written when the current version has the same already. InputError when there is no such
    version or it is from before a purge, CorruptData when its files are not all there, RunFailed when
    another process published meanwhile and it is not plain what should be restored now.
    """
    for _ in range(MAX_STARTS):
        after = max(run.versions.numbers(), default=0)  # first, so that what is read next is not older
        current = run.versions.latest()
        if current is None:
            raise InputError(f"{run.url} has no published index yet: there is nothing to go back to")
        target = _find_previous(run, current) if number is None else _read_version(run, number)
        require_not_purged(run, target, current)
        if target.manifest.sha256 == current.manifest.sha256:
            return current
        require_whole(run, target)
        offered = replace(target, number=after + 1, restores=target.number)
        hit_failpoint("data_written", "rollback", offered.number)
        try:
            recorded = run.versions.create(offered).record
        except CorruptData:
            continue  # a damaged record keeps its number
        if recorded.manifest.sha256 == offered.manifest.sha256:
            log.info("version %d restores version %d", recorded.number, target.number)
            return recorded
        if number is None:
            raise RunFailed(
                f"{run.url}: another process published version {recorded.number} meanwhile, so nothing was "
                f"rolled back; `ckn-scale rollback {run.url} {target.number}` restores version "
                f"{target.number} all the same"
            )
        log.warning("%s: version %d was published meanwhile; looking again", run.url, recorded.number)
    raise RunFailed(f"{run.url}: others published {MAX_STARTS} times before it was rolled back; try again")


def require_whole(run: RunFolder, version: Version) -> None:
    """CorruptData unless all that a version names is there: manifest and models by sha256, shards by size."""
    try:
        manifest = read_manifest(run.store, version.manifest)
        files = [file for shard in manifest.shards for file in shard.files]
        map_in_threads(lambda file: _require_size(run, file), files)
        load_models(run.store, manifest.models)
    except (CorruptData, ValueError, KeyError, TypeError) as error:
        raise CorruptData(
            f"version {version.number} is not restored: {error}; `ckn-scale verify {run.url}` lists all that "
            "is damaged"
        ) from error


def _require_size(run: RunFolder, file: StoredFile) -> None:
    try:
        size = run.store.size(file.path)
    except FileNotFoundError:
        raise CorruptData(f"{run.store.address(file.path)} is gone") from None
    if size != file.size_bytes:
        where = run.store.address(file.path)
        raise CorruptData(f"{where} is damaged: it has {size} bytes, {file.size_bytes} were recorded")


def _find_previous(run: RunFolder, current: Version) -> Version:
    """The highest version below the current one that has something else."""
    for one in reversed(run.versions.all()):
        if one.number < current.number and one.manifest.sha256 != current.manifest.sha256:
            return one  # perhaps from before a purge: then that is said
    raise InputError(f"{run.url} has no version before {current.number} that differs from it")


def _read_version(run: RunFolder, number: int) -> Version:
    try:
        return run.versions.read(number)
    except FileNotFoundError:
        known = ", ".join(str(one.number) for one in run.versions.all())
        raise InputError(f"{run.url} has no version {number}; published are: {known}") from None
