"""Certify: planted queries through the whole path. The gate of a version.

A planted query is a rendered view of an indexed image, itself not indexed; it counts when its
original comes back first. Collections hold copies: an image that is more like the original than the
query is may stand before it. Queries are drawn by hash, sharded like any other work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np

from ckn_scale.core.images import decode_image
from ckn_scale.core.views import VIEWS, encode_jpeg, render_view
from ckn_scale.errors import ImageRejected
from ckn_scale.search.engine import Index, load_encoder
from ckn_scale.search.shard import Hit, ShardGroup
from ckn_scale.steps.base import ShardResult, Step, WorkerSettings
from ckn_scale.steps.build_index import BuildIndex
from ckn_scale.steps.plan import PlannedImage, hash_uri, read_sample, require_segments
from ckn_scale.steps.prepare_image import read_planned
from ckn_scale.storage.index_files import read_manifest

QUERY_SEED = 1  # apart from the sample's, so that the queries are a draw of their own
HITS_LOOKED_AT = 10


class CertifyIndex(Step):
    """`params`: build, manifest (path), manifest_sha256."""

    name = "certify_index"
    sections = (*BuildIndex.sections, "publish")
    label_params = ("build",)

    @cached_property
    def queries(self) -> list[PlannedImage]:
        sample = read_sample(self.run, require_segments(self.run))
        drawn = sorted(sample, key=lambda image: (hash_uri(QUERY_SEED, image.uri), image.image_id))
        return drawn[: self.settings.publish.num_queries]

    @cached_property
    def index(self) -> Index:
        manifest = read_manifest(self.run.store, self.params["manifest"], self.params["manifest_sha256"])
        return Index(0, load_encoder(self.run.store, manifest), ShardGroup(self.run.store, manifest))

    def shard_ids(self) -> Sequence[int]:
        return range(-(-len(self.queries) // self.settings.publish.queries_per_shard))

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        size = self.settings.publish.queries_per_shard
        asked = self.queries[shard_id * size : (shard_id + 1) * size]
        names = list(VIEWS)
        rows = []
        for position, image in enumerate(asked, start=shard_id * size):
            view = names[position % len(names)]
            found = self._ask(image, view)
            if found is not None:
                rows.append([image.image_id, view, found])
        return ShardResult(report={"queries": rows})

    def _ask(self, image: PlannedImage, view: str) -> bool | None:
        """Whether the planted image comes first; None when it is not in the index at all."""
        try:
            pixels = decode_image(read_planned(image), self.settings.images)
        except ImageRejected:
            return None
        planted = self.index.vector(image.image_id)
        if planted is None:
            return None
        rendered = render_view(pixels, view, seed=image.image_id)
        try:
            hits = self.index.search(encode_jpeg(rendered, 85), k=HITS_LOOKED_AT)
        except ImageRejected:
            return False
        return self._comes_first(image.image_id, planted, hits)

    def _comes_first(self, image_id: int, planted: np.ndarray, hits: Sequence[Hit]) -> bool:
        """Whether nothing stands before the planted image but what is more like it than the query is."""
        score = next((hit.score for hit in hits if hit.image_id == image_id), None)
        if score is None:
            return False
        before = [hit.image_id for hit in hits if hit.score > score]
        return all(self._similarity(planted, other) >= score for other in before)

    def _similarity(self, planted: np.ndarray, image_id: int) -> float:
        other = self.index.vector(image_id)
        return -1.0 if other is None else float(planted @ other)


def make_certificate(step: CertifyIndex) -> dict[str, Any]:
    """Counts over all planted queries and the lower end of the interval the gate looks at."""
    rows = [row for _, commit in sorted(step.log.committed().items()) for row in commit.report["queries"]]
    publish = step.settings.publish
    first = sum(found for _, _, found in rows)
    lower = wilson_lower(first, len(rows), publish.confidence)
    by_view = {name: [found for _, view, found in rows if view == name] for name in VIEWS}
    return {
        "queries": len(rows),
        "first": first,
        "first_share": first / len(rows) if rows else 0.0,
        "lower": lower,
        "confidence": publish.confidence,
        "target": publish.target,
        "passed": lower >= publish.target,
        "by_view": {name: sum(found) / len(found) for name, found in by_view.items() if found},
    }


def wilson_lower(successes: int, trials: int, confidence: float) -> float:
    """The one-sided lower end of Wilson's interval for a share; 0 without trials."""
    if trials == 0:
        return 0.0
    z = NormalDist().inv_cdf(confidence)
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, (centre - spread) / (1 + z * z / trials))
