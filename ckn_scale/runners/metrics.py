"""Batch metrics through Ray's own: they appear where the cluster's metrics are scraped.

ckn_scale_shards_total{step, outcome}    ckn_scale_images_total{step}    ckn_scale_shard_seconds{step}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Counter, Histogram

SECONDS = [0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600]


class ShardMetrics:
    """Counts what one actor does."""

    def __init__(self) -> None:
        self._shards = Counter("ckn_scale_shards_total", "Shards by outcome.", ("step", "outcome"))
        self._images = Counter("ckn_scale_images_total", "Images in finished shards.", ("step",))
        self._seconds = Histogram("ckn_scale_shard_seconds", "Time of a shard.", SECONDS, ("step",))

    def count_done(self, step: str, report: Mapping[str, Any]) -> None:
        outcome = "done" if report["worked"] else "found_done"
        self._shards.inc(1, {"step": step, "outcome": outcome})
        if report["worked"]:
            self._seconds.observe(max(float(report["seconds"]), 1e-3), {"step": step})
        if report["worked"] and report["images"]:
            self._images.inc(report["images"], {"step": step})

    def count_failed(self, step: str) -> None:
        self._shards.inc(1, {"step": step, "outcome": "failed"})
