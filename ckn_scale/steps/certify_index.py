"""Certify: planted queries through the index, one of its shards at a time. The gate of a version.

A query counts when its original comes back first. Collections hold copies, and of two copies the one
that was blurred like the query is the better answer: images that are far more similar to the original
than the collection at large may come before it. What comes before an original adds up over the index
shards. The first version's queries go through all of them. After an append all queries go through what is
new, and the new ones through a few older shards; the certificate says how many rows that leaves unasked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np
import pyarrow as pa

from ckn_scale.core.augmentations import VIEWS
from ckn_scale.search.shard import Hit, ShardGroup
from ckn_scale.step import ShardResult, Step, WorkerSettings
from ckn_scale.steps.build_index import BuildIndex
from ckn_scale.steps.draw_queries import QueryOutcome, name_encoder, write_outcomes
from ckn_scale.steps.plant_queries import HITS_LOOKED_AT, PlantQueries
from ckn_scale.storage.builds import position_of
from ckn_scale.storage.index_files import read_ids
from ckn_scale.storage.run_folder import CERTIFY_INDEX
from ckn_scale.storage.run_records import Certificate
from ckn_scale.storage.store import Store
from ckn_scale.storage.stored_files import StoredFile, read_table

COPY_DEVIATIONS = 6.0  # in the demo all copies but one are above 7, unrelated photographs below 5
OUTCOMES = ("first", "behind copies", "missed")  # best first


@dataclass(frozen=True)
class Query:
    """A planted query as it is asked; `vector` is None when it is missed without asking."""

    image_id: int
    view: int
    score: float | None  # of its original
    vector: np.ndarray | None
    original: np.ndarray
    file: StoredFile  # where it lies

    def comes_after(self, hit: Hit) -> bool:
        if self.score is None or hit.image_id == self.image_id:
            return False
        return (-hit.score, hit.image_id) < (-self.score, self.image_id)


@dataclass(frozen=True, eq=False)
class CertifyIndex(Step):
    """One shard per index shard that is asked."""

    manifest_file: StoredFile
    draw_name: str

    name = CERTIFY_INDEX
    sections = PlantQueries.sections
    version = 4
    label_fields = ("draw_name",)

    @cached_property
    def planted(self) -> PlantQueries:
        return PlantQueries(self.run, self.manifest_file, self.draw_name)

    @cached_property
    def tombstones(self) -> np.ndarray:
        return read_ids(self.run.store, self.planted.manifest.tombstones)

    @cached_property
    def asked(self) -> list[Query]:
        """The new queries: asked of the draw's new index shards and of its older ones."""
        commits = self.planted.log.committed()
        files = [commits[shard_id].files[self.planted.stage] for shard_id in self.planted.shard_ids()]
        return [query for file in files for query in _read_queries(self.run.store, file)]

    @cached_property
    def taken_over(self) -> list[Query]:
        """Those asked before: asked of the new index shards only."""
        outcomes = {one.image_id: one.file for one in self.planted.draw.taken_over}
        files = {file.path: file for file in outcomes.values()}
        queries = [query for file in files.values() for query in _read_queries(self.run.store, file)]
        return [query for query in queries if outcomes.get(query.image_id) == query.file]

    @cached_property
    def copy_levels(self) -> dict[int, float]:
        """By image: drawn by hash, the originals are a picture of the collection at large."""
        queries = [*self.asked, *self.taken_over]
        originals = np.array([query.original for query in queries])
        levels = {}
        for position, query in enumerate(queries):
            others = np.delete(originals @ query.original, position)
            levels[query.image_id] = copy_level(others.tolist())
        return levels

    def shard_ids(self) -> Sequence[int]:
        draw = self.planted.draw
        return sorted([*draw.new_shards, *draw.older_shards])

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        asked = [*self.asked, *self.taken_over] if shard_id in self.planted.draw.new_shards else self.asked
        queries = [(one, one.vector) for one in asked if one.vector is not None]
        if not queries:
            return ShardResult(report={"before": []})
        group = ShardGroup(self.run.store, self.planted.manifest, [position_of(shard_id)])
        found = group.search(np.array([vector for _, vector in queries]), HITS_LOOKED_AT)
        before = [
            [query.image_id, *self._count_before(query, hits, group)]
            for (query, _), hits in zip(queries, found, strict=True)
        ]
        return ShardResult(report={"before": [row for row in before if any(row[1:])]})

    def _count_before(self, query: Query, hits: Sequence[Hit], group: ShardGroup) -> tuple[int, int]:
        """How many copies of the original, and how many other images, come before it in this shard."""
        level, copies, others = self.copy_levels[query.image_id], 0, 0
        for hit in filter(query.comes_after, hits):
            vector = group.vector(hit.image_id)
            is_copy = vector is not None and float(query.original @ vector) > level
            copies, others = copies + is_copy, others + (not is_copy)
        return copies, others


def _read_queries(store: Store, file: StoredFile) -> Iterator[Query]:
    table: pa.Table = read_table(store, file)
    for row in table.to_pylist():
        vector = None if row["vector"] is None else np.frombuffer(row["vector"], "<f4")
        original = np.frombuffer(row["original"], "<f4")
        yield Query(row["image_id"], row["view"], row["score"], vector, original, file)


def judge(copies: int, others: int) -> str:
    """By what comes before a query's original, in all index shards that were asked together."""
    if others or copies >= HITS_LOOKED_AT:
        return "missed"
    return "behind copies" if copies else "first"


def copy_level(similarities: Sequence[float]) -> float:
    """The similarity above which an image is a copy, by the similarities to the collection at large."""
    if not similarities:
        return math.inf
    centre = float(np.median(similarities))
    deviation = 1.4826 * float(np.median(np.abs(np.asarray(similarities) - centre)))
    return centre + COPY_DEVIATIONS * deviation


def make_certificate(step: CertifyIndex) -> Certificate:
    """Counts over all planted queries, and the lower end of the interval that the gate looks at.

    `fewest_rows` and `everywhere` say how much of the index was asked: elsewhere a better answer would not
    be noticed.
    """
    manifest, draw, publish = step.planted.manifest, step.planted.draw, step.settings.publish
    outcomes = _list_outcomes(step)
    first = sum(one.outcome != "missed" for one in outcomes)
    lower = wilson_lower(first, len(outcomes), publish.confidence)
    everywhere = [one for one in outcomes if one.unasked_rows == 0]
    new = {image.image_id for image in draw.asked[: draw.new]}
    numbers = BuildIndex(step.run, manifest.build).shard_ids()
    return Certificate(
        queries=len(outcomes),
        asked=len(step.asked),
        new_asked=sum(query.image_id in new for query in step.asked),
        taken_over=len(outcomes) - len(step.asked),
        in_sample=draw.in_sample,
        first=first,
        behind_copies=sum(one.outcome == "behind copies" for one in outcomes),
        first_share=first / len(outcomes) if outcomes else 0.0,
        index_shards=len(manifest.shards),
        asked_shards=len(step.shard_ids()),
        rows=manifest.rows,
        asked_rows=_count_rows(step, step.shard_ids()),
        fewest_rows=manifest.rows - max((one.unasked_rows for one in outcomes), default=0),
        everywhere=len(everywhere),
        everywhere_first=sum(one.outcome != "missed" for one in everywhere),
        lower=lower,
        confidence=publish.confidence,
        target=publish.target,
        passed=lower >= publish.target,
        by_view=_share_by_view(outcomes),
        draw=draw.name,
        encoder=name_encoder(step.run),
        outcomes=write_outcomes(step.run, draw.name, outcomes, numbers),
    )


def _count_rows(step: CertifyIndex, numbers: Iterable[int]) -> int:
    """Of these index shards, without those that are dead."""
    positions = {position_of(number) for number in numbers}
    shards = [shard for shard in step.planted.manifest.shards if shard.shard in positions]
    return sum(shard.rows - len(shard.ids_within(step.tombstones)) for shard in shards)


def _list_outcomes(step: CertifyIndex) -> list[QueryOutcome]:
    """Of all queries; one that was asked before keeps its outcome unless an index shard made it worse."""
    commits, draw, rows = step.log.committed(), step.planted.draw, step.planted.manifest.rows
    copies: Counter[int] = Counter()
    others: Counter[int] = Counter()
    for number in step.shard_ids():
        for image_id, more_copies, more_others in commits[number].report["before"]:
            copies[image_id] += more_copies
            others[image_id] += more_others
    asked = [
        QueryOutcome(
            query.image_id,
            query.view,
            "missed" if query.vector is None else judge(copies[query.image_id], others[query.image_id]),
            query.file,
            rows - _count_rows(step, step.shard_ids()),
        )
        for query in step.asked
    ]
    taken_over, unchanged_rows = [], rows - _count_rows(step, draw.new_shards)
    for one in draw.taken_over:
        now = judge(copies[one.image_id], others[one.image_id])
        worse = max(one.outcome, now, key=OUTCOMES.index)
        # What is left unasked are shards that did not change since: what was built anew is asked by all.
        taken_over.append(replace(one, outcome=worse, unasked_rows=min(one.unasked_rows, unchanged_rows)))
    return [*asked, *taken_over]


def _share_by_view(outcomes: Sequence[QueryOutcome]) -> dict[str, float]:
    found: dict[str, list[bool]] = {name: [] for name in VIEWS}
    for one in outcomes:
        found[list(VIEWS)[one.view]].append(one.outcome != "missed")
    return {name: sum(each) / len(each) for name, each in found.items() if each}


def wilson_lower(successes: int, trials: int, confidence: float) -> float:
    """The one-sided lower end of Wilson's interval for a share; 0 without trials."""
    if trials == 0:
        return 0.0
    z = NormalDist().inv_cdf(confidence)
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, (centre - spread) / (1 + z * z / trials))
