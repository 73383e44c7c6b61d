"""Versions in a server: which a replica holds, and how a newly published one is taken up."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ckn_scale.core.specs import ImageSpec
from ckn_scale.errors import CknScaleError
from ckn_scale.search.versions import (
    PublishedVersion,
    assign_shards,
    latest_version_number,
    open_version,
)
from ckn_scale.serving.messages import IndexSummary, ServedVersion, VersionSummary
from ckn_scale.serving.router import SearchRouter
from ckn_scale.storage.index_files import read_ids
from ckn_scale.storage.run_folder import RunFolder

logger = logging.getLogger(__name__)
Loaded = TypeVar("Loaded")
VERSIONS_HELD = 2  # the current one, and the next or the previous
RETRY_AFTER_S = 5.0
VERSIONS_LISTED = 100  # the newest ones


def describe_version(run: RunFolder, version: int, num_groups: int) -> ServedVersion:
    """What the router needs to know of a version: living rows and id ranges of each group."""
    published = open_version(run, version)
    manifest = published.manifest
    groups = assign_shards(manifest, num_groups)
    owner = {shard: group for group, shards in enumerate(groups) for shard in shards}
    rows, dead = [0] * num_groups, read_ids(run.store, manifest.tombstones)
    for shard in manifest.shards:
        rows[owner[shard.shard]] += shard.rows - len(shard.ids_within(dead))
    ranges = [(shard.first_id, shard.last_id, owner[shard.shard]) for shard in manifest.shards if shard.rows]
    has_points = all(shard.points is not None for shard in manifest.shards if shard.rows)
    calibration = published.calibration if has_points else None
    summary = _summarise(run, published)
    return ServedVersion(version, tuple(rows), tuple(sorted(ranges)), calibration, summary)


def _summarise(run: RunFolder, published: PublishedVersion) -> IndexSummary:
    manifest, certificate = published.manifest, published.record.certificate
    known = [VersionSummary(one.number, one.rows, one.build) for one in run.versions.all()]
    return IndexSummary(
        dim=manifest.dim,
        kind=manifest.kind,
        shards=len(manifest.shards),
        pixel_cap=ImageSpec(**run.settings.get("images", {})).pixel_cap,
        certificate=certificate.to_body() if certificate.queries else None,
        published=tuple(known[-VERSIONS_LISTED:]),
    )


async def follow_versions(run: RunFolder, router: SearchRouter) -> None:
    """Have the router take up what is published, for as long as the server lives."""
    while True:
        await asyncio.sleep(router.settings.version_poll_s)
        try:
            await _follow_once(run, router)
        except Exception as error:
            logger.warning("looking for a new version failed: %r", error)


async def _follow_once(run: RunFolder, router: SearchRouter) -> None:
    newest = await asyncio.to_thread(latest_version_number, run)
    if newest == router.version.number:
        return
    version = await asyncio.to_thread(describe_version, run, newest, router.settings.shard_groups)
    await router.switch_when_ready(version)


@dataclass(frozen=True)
class Readiness:
    """Whether a replica holds a version; `replica` is its name among its siblings."""

    replica: str
    ready: bool


class NotLoaded(CknScaleError):
    """The replica does not hold this version yet; it is being loaded."""


class ResidentVersions(Generic[Loaded]):
    """Loads versions one at a time in a thread; asking for an absent one starts its load."""

    def __init__(self, load: Callable[[int], Loaded]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._held: dict[int, Loaded] = {}  # least recently used first
        self._loading: int | None = None
        self._failed_at: dict[int, float] = {}

    def load_now(self, version: int) -> None:
        """Load in this thread: a replica's first version, whose failure is the replica's."""
        self._hold(version, self._load(version))

    def values(self) -> list[Loaded]:
        with self._lock:
            return list(self._held.values())

    def get(self, version: int) -> Loaded:
        """The version; NotLoaded (and its load started) when the replica does not hold it."""
        with self._lock:
            if version in self._held:
                self._held[version] = self._held.pop(version)
                return self._held[version]
        self.prepare(version)
        raise NotLoaded(f"version {version} is being loaded")

    def prepare(self, version: int) -> bool:
        """Whether the version is held; otherwise starts loading it, unless a load is under way."""
        with self._lock:
            if version in self._held:
                return True
            resting = time.monotonic() - self._failed_at.get(version, -RETRY_AFTER_S) < RETRY_AFTER_S
            if self._loading is None and not resting:
                self._loading = version
                threading.Thread(target=self._load_in_background, args=(version,), daemon=True).start()
            return False

    def _load_in_background(self, version: int) -> None:
        try:
            self._hold(version, self._load(version))
        except Exception:
            logger.exception("version %d could not be loaded; trying again when it is asked for", version)
            self._failed_at[version] = time.monotonic()
        finally:
            self._loading = None

    def _hold(self, version: int, loaded: Loaded) -> None:
        with self._lock:
            self._held[version] = loaded
            while len(self._held) > VERSIONS_HELD:
                del self._held[next(iter(self._held))]
