"""The versions a replica holds: the one in use and the next, which loads in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from ckn_scale.errors import CknScaleError

logger = logging.getLogger(__name__)
Loaded = TypeVar("Loaded")
VERSIONS_HELD = 2  # the current one, and the next or the previous
RETRY_AFTER_S = 5.0


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
