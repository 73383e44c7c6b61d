"""Versions in a server: which a replica holds, and how a newly published one is taken up."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Hashable
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
NUMBERS_HELD = 8  # as many numbers may share them
DRAIN_S = 15.0  # after which no request is left that began with a version
LOADING_POLL_S = 0.2
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
    wait_s = router.settings.version_poll_s
    while True:
        await asyncio.sleep(wait_s)
        wait_s = router.settings.version_poll_s
        try:
            if not await _follow_once(run, router):
                wait_s = min(wait_s, LOADING_POLL_S)
        except Exception as error:
            logger.warning("looking for a new version failed: %r", error)


async def _follow_once(run: RunFolder, router: SearchRouter) -> bool:
    """Whether the router serves what is current."""
    newest = await asyncio.to_thread(latest_version_number, run)
    if newest == router.version.number:
        return True
    version = await asyncio.to_thread(describe_version, run, newest, router.settings.shard_groups)
    return await router.switch_when_ready(version)


@dataclass(frozen=True)
class Readiness:
    """Whether a replica holds a version; `replica` is its name among its siblings."""

    replica: str
    ready: bool


class NotLoaded(CknScaleError):
    """The replica does not hold this version yet; it is being loaded."""


@dataclass
class _Held(Generic[Loaded]):
    content: Hashable  # versions with the same content share what was loaded
    loaded: Loaded
    used_at_s: float


class ResidentVersions(Generic[Loaded]):
    """Loads versions one at a time in a thread; asking for an absent one starts its load.

    `identify` says what a version is made of: what was loaded for one serves every other that is made of the
    same, so a rollback to the version before loads nothing. No more than two contents are in memory: a third
    is loaded when the oldest has rested for `drain_s`, and takes its place.
    """

    def __init__(
        self,
        identify: Callable[[int], Hashable],
        load: Callable[[int], Loaded],
        *,
        drain_s: float = DRAIN_S,
    ) -> None:
        self._identify = identify
        self._load = load
        self._drain_s = drain_s
        self._lock = threading.Lock()
        self._held: dict[int, _Held[Loaded]] = {}  # least recently used first
        self._loading: int | None = None
        self._failed_at: dict[int, float] = {}

    def load_now(self, version: int) -> None:
        """Load in this thread: a replica's first version, whose failure is the replica's."""
        self._hold(version, self._identify(version), self._load(version))

    def numbers(self) -> list[int]:
        """Of the versions that are held."""
        with self._lock:
            return sorted(self._held)

    def get(self, version: int) -> Loaded:
        """The version; NotLoaded (and its load started) when the replica does not hold it."""
        with self._lock:
            if version in self._held:
                held = self._held[version] = self._held.pop(version)
                held.used_at_s = time.monotonic()
                return held.loaded
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
            content = self._identify(version)
            same = self._find(content)
            if same is not None:
                self._hold(version, content, same.loaded)
            elif self._make_room():
                self._hold(version, content, self._load(version))
        except Exception:
            logger.exception("version %d could not be loaded; trying again when it is asked for", version)
            self._failed_at[version] = time.monotonic()
        finally:
            self._loading = None

    def _find(self, content: Hashable) -> _Held[Loaded] | None:
        with self._lock:
            return next((held for held in self._held.values() if held.content == content), None)

    def _make_room(self) -> bool:
        """Drop the content that was used least recently, unless there is room or it was used just now."""
        with self._lock:
            last_used = {held.content: held.used_at_s for held in self._held.values()}  # the last one counts
            if len(last_used) < VERSIONS_HELD:
                return True
            oldest = min(last_used, key=last_used.__getitem__)
            if time.monotonic() - last_used[oldest] < self._drain_s:
                return False
            self._held = {number: held for number, held in self._held.items() if held.content != oldest}
            return True

    def _hold(self, version: int, content: Hashable, loaded: Loaded) -> None:
        with self._lock:
            self._held[version] = _Held(content, loaded, time.monotonic())
            while len(self._held) > NUMBERS_HELD:
                del self._held[next(iter(self._held))]
