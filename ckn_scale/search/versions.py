"""Published versions of a run: which index is current, and what it is made of."""

from __future__ import annotations

from dataclasses import dataclass

from ckn_scale.core.calibration import Calibration
from ckn_scale.errors import InputError
from ckn_scale.storage.index_files import IndexManifest, read_manifest
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.run_records import Version


@dataclass(frozen=True)
class PublishedVersion:
    number: int
    manifest: IndexManifest
    record: Version  # as published: build, certificate, …

    @property
    def calibration(self) -> Calibration:
        """How its evidence is judged: as its certificate measured, or by the defaults."""
        measured = self.record.certificate.evidence
        if measured is None:
            return Calibration()
        return Calibration(measured.thresholds, measured.slope, measured.middle)


def latest_version_number(run: RunFolder) -> int:
    """The current version; InputError when nothing was published yet."""
    latest = run.versions.latest()
    if latest is None:
        raise InputError(f"{run.url} has no published index yet: run `ckn-scale index` to the end first")
    return latest.number


def open_version(run: RunFolder, version: int | None = None) -> PublishedVersion:
    """A published version and its manifest, checked; the current one unless a number is given."""
    number = latest_version_number(run) if version is None else version
    try:
        record = run.versions.read(number)
    except FileNotFoundError:
        known = ", ".join(str(found.number) for found in run.versions.all()) or "none"
        raise InputError(f"{run.url} has no version {number}; published are: {known}") from None
    if version is not None:
        require_not_purged(run, record, run.versions.latest())
    manifest = read_manifest(run.store, record.manifest)
    return PublishedVersion(number, manifest, record)


def require_not_purged(run: RunFolder, version: Version, current: Version | None) -> None:
    """InputError when a version is from before a purge that the current one comes after."""
    if current is not None and version.purge < current.purge:
        raise InputError(
            f"{run.url}: version {version.number} is from before a purge, which removed what it holds; "
            f"those since then can be opened and restored (`ckn-scale versions {run.url}`)"
        )


def assign_shards(manifest: IndexManifest, num_groups: int) -> list[list[int]]:
    """Shard numbers per group, balanced by rows; the same for everyone who asks.

    With fewer shards than groups the last groups stay empty.
    """
    if num_groups < 1:
        raise ValueError(f"num_groups must be ≥ 1, got {num_groups}")
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    loads = [0] * num_groups
    for shard in sorted(manifest.shards, key=lambda shard: (-shard.rows, shard.shard)):
        lightest = loads.index(min(loads))
        groups[lightest].append(shard.shard)
        loads[lightest] += max(shard.rows, 1)
    return [sorted(group) for group in groups]
