"""Certify: planted queries through the whole path. The gate of a version.

A planted query is a rendered view of an indexed image, itself not indexed; it counts when its
original comes back first. Collections hold copies, and of two copies the one that was blurred like
the query is the better answer: images that are far more like the original than the collection at
large is may stand before it. Queries are drawn by hash, sharded like any other work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from statistics import NormalDist
from typing import Any

import numpy as np

from ckn_scale.core.images import decode_image
from ckn_scale.core.views import VIEWS, encode_jpeg, render_view
from ckn_scale.errors import ImageRejected
from ckn_scale.search.engine import Index, load_encoder
from ckn_scale.search.shard import ShardGroup
from ckn_scale.steps.base import ShardResult, Step, WorkerSettings
from ckn_scale.steps.build_index import BuildIndex
from ckn_scale.steps.name_build import CERTIFIED
from ckn_scale.steps.plan import PlannedImage, hash_uri, read_sample, require_segments
from ckn_scale.steps.prepare_images import prepare_images
from ckn_scale.storage.index_files import read_manifest

QUERY_SEED = 1  # apart from the sample's, so that the queries are a draw of their own
HITS_LOOKED_AT = 100
COPY_DEVIATIONS = 6.0  # in the demo all copies but one are above 7, unrelated photographs below 5


class CertifyIndex(Step):
    """`params`: build, manifest (path), manifest_sha256."""

    name = CERTIFIED
    sections = (*BuildIndex.sections, "publish")
    version = 2
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

    @cached_property
    def planted(self) -> dict[int, np.ndarray]:
        """The indexed vectors of all queries' originals: by hash, so a picture of the collection at large."""
        found = ((image.image_id, self.index.vector(image.image_id)) for image in self.queries)
        return {image_id: vector for image_id, vector in found if vector is not None}

    def shard_ids(self) -> Sequence[int]:
        return range(-(-len(self.queries) // self.settings.publish.queries_per_shard))

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        size = self.settings.publish.queries_per_shard
        asked = self.queries[shard_id * size : (shard_id + 1) * size]
        decode = partial(decode_image, spec=self.settings.images)
        decoded = prepare_images(asked, decode, worker, self.settings.encode.image_deadline_s)
        names = list(VIEWS)
        rows = []
        for position, (image, pixels) in enumerate(decoded, start=shard_id * size):
            view = names[position % len(names)]
            outcome = None if isinstance(pixels, ImageRejected) else self._ask(image, pixels, view)
            if outcome is not None:
                rows.append([image.image_id, view, outcome])
        return ShardResult(report={"queries": rows})

    def _ask(self, image: PlannedImage, pixels: np.ndarray, view: str) -> str | None:
        """What became of one planted query (see `judge_hits`); None when its original is not in the index."""
        if image.image_id not in self.planted:
            return None
        rendered = render_view(pixels, view, seed=image.image_id)
        try:
            hits = self.index.search(encode_jpeg(rendered, 85), k=HITS_LOOKED_AT)
        except ImageRejected:
            return "missed"
        original, level = self.planted[image.image_id], self._copy_level_of(image.image_id)

        def is_copy(other: int) -> bool:
            vector = self.index.vector(other)
            return vector is not None and float(original @ vector) > level

        return judge_hits(image.image_id, [hit.image_id for hit in hits], is_copy)

    def _copy_level_of(self, image_id: int) -> float:
        original = self.planted[image_id]
        return copy_level([float(original @ one) for other, one in self.planted.items() if other != image_id])


def judge_hits(image_id: int, hits: Sequence[int], is_copy: Callable[[int], bool]) -> str:
    """`first`, `behind copies` (nothing else stands before the planted image), or `missed`."""
    if image_id not in hits:
        return "missed"
    before = hits[: hits.index(image_id)]
    if not before:
        return "first"
    return "behind copies" if all(map(is_copy, before)) else "missed"


def copy_level(similarities: Sequence[float]) -> float:
    """What an image must be more alike than to be a copy, by its similarities to the collection at large."""
    if not similarities:
        return math.inf
    centre = float(np.median(similarities))
    deviation = 1.4826 * float(np.median(np.abs(np.asarray(similarities) - centre)))
    return centre + COPY_DEVIATIONS * deviation


def make_certificate(step: CertifyIndex) -> dict[str, Any]:
    """Counts over all planted queries and the lower end of the interval the gate looks at."""
    rows = [row for _, commit in sorted(step.log.committed().items()) for row in commit.report["queries"]]
    publish = step.settings.publish
    first = sum(_counts(outcome) for _, _, outcome in rows)
    lower = wilson_lower(first, len(rows), publish.confidence)
    by_view = {name: [_counts(outcome) for _, view, outcome in rows if view == name] for name in VIEWS}
    return {
        "queries": len(rows),
        "first": first,
        "behind_copies": sum(outcome == "behind copies" for _, _, outcome in rows),
        "first_share": first / len(rows) if rows else 0.0,
        "lower": lower,
        "confidence": publish.confidence,
        "target": publish.target,
        "passed": lower >= publish.target,
        "by_view": {name: sum(found) / len(found) for name, found in by_view.items() if found},
    }


def _counts(outcome: str) -> bool:
    return outcome != "missed"


def wilson_lower(successes: int, trials: int, confidence: float) -> float:
    """The one-sided lower end of Wilson's interval for a share; 0 without trials."""
    if trials == 0:
        return 0.0
    z = NormalDist().inv_cdf(confidence)
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, (centre - spread) / (1 + z * z / trials))
