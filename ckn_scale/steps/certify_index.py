"""Certify: planted queries through the index, one of its shards at a time. The gate of a version.

A query counts when its original comes back first. Collections hold copies, and of two copies the one
that was blurred like the query is the better answer: images that are far more similar to the original
than the collection at large may come before it. What comes before an original adds up over the index
shards. Where the run has points, a query goes the whole way of a search: shortlist, words, geometry. On that
way random pairs are looked at, too: from how many inliers on two images are a match is fitted to those of one
half of the queries and certified with the other half.

The first version's queries go through all shards. After an append all queries go through what is
new, and the new ones through a few older shards; the certificate says how many rows that leaves unasked.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np
import pyarrow as pa

from ckn_scale.core.augmentations import VIEWS
from ckn_scale.core.calibration import fit_calibration, fit_tail, name_rate
from ckn_scale.core.copies import COPY_DEVIATIONS
from ckn_scale.core.evidence import HEAD, SHORTLIST, QueryPoints, join_evidence
from ckn_scale.core.ranking import Ranking
from ckn_scale.core.topk import NO_ID
from ckn_scale.search.evidence import gather_evidence
from ckn_scale.search.random_pairs import PairCounts, draw_others, expand_strengths
from ckn_scale.search.shard import ShardGroup
from ckn_scale.step import ShardResult, Step, WorkerSettings
from ckn_scale.steps.augment_index import number_searched
from ckn_scale.steps.build_index import BuildIndex
from ckn_scale.steps.draw_queries import QueryOutcome, name_encoder, write_outcomes
from ckn_scale.steps.plant_queries import HITS_LOOKED_AT, PlantQueries, unpack_points
from ckn_scale.storage.builds import position_of
from ckn_scale.storage.index_files import read_ids
from ckn_scale.storage.models import load_model
from ckn_scale.storage.run_folder import CERTIFY_INDEX
from ckn_scale.storage.run_records import Certificate, MeasuredEvidence
from ckn_scale.storage.store import Store
from ckn_scale.storage.stored_files import StoredFile, read_table

OUTCOMES = ("first", "behind copies", "missed")  # best first


@dataclass(frozen=True)
class PlantedQuery:
    """A planted query as it is asked; `vector` is None when it is missed without asking."""

    image_id: int
    view: int
    original: np.ndarray
    file: StoredFile  # where it lies
    vector: np.ndarray | None = None
    points: QueryPoints | None = None
    score: float = 0.0  # of its original: the similarity of vectors
    selective: float = 0.0
    inliers: int = 0

    @property
    def half(self) -> int:
        """0: what it says is fitted to. 1: what it says is compared with the fit."""
        return self.image_id % 2

    @property
    def strength(self) -> float:
        """Of its original."""
        return self._join(self.inliers)

    def count_nearer(self, candidates: Ranking) -> tuple[int, int]:
        """How many come before its original in the shortlist, and how many in the choice of the head."""
        unverified = replace(candidates, evidence={}).strength
        return (
            len(self._list_before(candidates.image_ids, candidates.similarity, self.score)),
            len(self._list_before(candidates.image_ids, unverified, self._join(0))),
        )

    def list_before(self, candidates: Ranking) -> np.ndarray:
        """The ids that come before its original in the answer, strongest first."""
        return self._list_before(candidates.image_ids, candidates.strength, self.strength)

    def _list_before(self, ids: np.ndarray, values: np.ndarray, value: float) -> np.ndarray:
        order = np.lexsort((ids, -values))
        ids, values = ids[order], values[order]
        before = (values > value) | ((values == value) & (ids < self.image_id))
        found: np.ndarray = ids[before & (ids != self.image_id)]
        return found

    def _join(self, inliers: int) -> float:
        one = np.array([self.score], np.float32), np.array([self.selective]), np.array([inliers])
        return float(join_evidence(*one)[0])


@dataclass(frozen=True, eq=False)
class CertifyIndex(Step):
    """One shard per index shard that is asked."""

    manifest_file: StoredFile
    draw_name: str

    name = CERTIFY_INDEX
    sections = PlantQueries.sections
    version = 6
    label_fields = ("draw_name",)

    @cached_property
    def planted(self) -> PlantQueries:
        return PlantQueries(self.run, self.manifest_file, self.draw_name)

    @cached_property
    def tombstones(self) -> np.ndarray:
        return read_ids(self.run.store, self.planted.manifest.tombstones)

    @cached_property
    def asked(self) -> list[PlantedQuery]:
        """The new queries: asked of the draw's new index shards and of its older ones."""
        commits = self.planted.log.committed()
        files = [commits[shard_id].files[self.planted.stage] for shard_id in self.planted.shard_ids()]
        return [query for file in files for query in _read_queries(self.run.store, file)]

    @cached_property
    def taken_over(self) -> list[PlantedQuery]:
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
        queries = [one for one in asked if one.vector is not None]
        if not queries:
            return ShardResult(report={"before": [], "pairs": []})
        group = ShardGroup(self.run.store, self.planted.manifest, [position_of(shard_id)])
        vectors = np.array([query.vector for query in queries])
        similarity, ids = group.find(vectors, SHORTLIST)
        before, pairs = [], (PairCounts(), PairCounts())
        for query, one_ids, values in zip(queries, ids, similarity, strict=True):
            candidates = _weigh(group, query, one_ids, values)
            counts = *query.count_nearer(candidates), *self._count_before(query, candidates, group)
            before.append([query.image_id, *counts])
            self._add_pairs(pairs[query.half], query, group)
        return ShardResult(
            report={
                "before": [row for row in before if any(row[1:])],
                "pairs": [one.to_report() for one in pairs],
            }
        )

    def _count_before(self, query: PlantedQuery, candidates: Ranking, group: ShardGroup) -> tuple[int, int]:
        """How many copies of the original, and how many other images, come before it in this shard."""
        copies, others = 0, 0
        for image_id in query.list_before(candidates)[:HITS_LOOKED_AT].tolist():
            vector = group.vector(image_id)
            is_copy = vector is not None and self._is_copy(query, vector)
            copies, others = copies + is_copy, others + (not is_copy)
        return copies, others

    def _add_pairs(self, counts: PairCounts, query: PlantedQuery, group: ShardGroup) -> None:
        """Random pairs of this query; what is as similar to its original as copies are is none."""
        if query.points is None or query.vector is None or not group.has_points:
            return
        drawn = draw_others(group, query.image_id)
        vectors = ((one, group.vector(one)) for one in drawn.tolist())
        others = [one for one, vector in vectors if vector is not None and not self._is_copy(query, vector)]
        if others:
            ids = np.array(others)
            counts.add(group, query.points, ids, group.compare(query.vector, ids))

    def _is_copy(self, query: PlantedQuery, vector: np.ndarray) -> bool:
        return float(query.original @ vector) > self.copy_levels[query.image_id]


def _weigh(group: ShardGroup, query: PlantedQuery, ids: np.ndarray, similarity: np.ndarray) -> Ranking:
    """What speaks for the images of a shard; only vectors do where there are no points."""
    if query.points is not None and group.has_points:
        return gather_evidence(group, query.points, ids, similarity)
    present = ids != NO_ID
    return Ranking(ids[present], similarity[present], np.zeros(np.count_nonzero(present)), {}, {})


def _read_queries(store: Store, file: StoredFile) -> Iterator[PlantedQuery]:
    table: pa.Table = read_table(store, file)
    for row in table.to_pylist():
        query = PlantedQuery(row["image_id"], row["view"], np.frombuffer(row["original"], "<f4"), file)
        if row["vector"] is not None:
            query = replace(
                query,
                vector=np.frombuffer(row["vector"], "<f4").copy(),
                points=unpack_points(row),
                score=row["score"],
                selective=row["selective"] or 0.0,
                inliers=row["inliers"] or 0,
            )
        yield query


@dataclass
class Before:
    """What comes before a query's original, in all index shards that were asked together."""

    nearer: int = 0  # in the shortlist
    ahead: int = 0  # in the choice of the head
    copies: int = 0  # in the answer
    others: int = 0

    def add(self, nearer: int, ahead: int, copies: int, others: int) -> None:
        self.nearer, self.ahead = self.nearer + nearer, self.ahead + ahead
        self.copies, self.others = self.copies + copies, self.others + others


def judge(before: Before) -> str:
    """Missed: another image comes first, or the original would not even be verified.

    What a shard puts before it among its own may not come so far in the whole index: that is the strict side.
    """
    if before.others or before.copies >= HITS_LOOKED_AT:
        return "missed"
    if before.nearer >= SHORTLIST or before.ahead >= HEAD:
        return "missed"
    copies = before.copies
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
    numbers = number_searched(BuildIndex(step.run, manifest.build), manifest.shards)
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
        evidence=_measure_evidence(step),
    )


def _measure_evidence(step: CertifyIndex) -> MeasuredEvidence | None:
    """From how many inliers on it is a match, fitted to one half of the queries; None without points."""
    queries = [query for query in (*step.asked, *step.taken_over) if query.points is not None]
    if not queries:
        return None
    pairs, strengths = _sum_pairs(step)
    planted = np.array([query.strength for query in queries if query.half == 0])
    fitted = fit_calibration(pairs[0], planted, expand_strengths(strengths))
    others = [query for query in queries if query.half == 1]
    return MeasuredEvidence(
        pairs={str(one): count for one, count in sorted(pairs[0].items())},
        other_pairs={str(one): count for one, count in sorted(pairs[1].items())},
        strengths={str(one): count for one, count in sorted(strengths.items())},
        thresholds=fitted.thresholds,
        slope=fitted.slope,
        middle=fitted.middle,
        real=fit_tail(pairs[0]).outliers,
        false_alarms=sum(n for one, n in pairs[1].items() if one >= fitted.thresholds[name_rate(1e-3)]),
        planted=len(others),
        matched=sum(query.inliers >= fitted.min_inliers for query in others),
        words=_count_words(step),
    )


def _count_words(step: CertifyIndex) -> int:
    words = step.planted.manifest.models["points-words"]
    return int(load_model(step.run.store, "points-words", words).metadata["words"])


def _sum_pairs(step: CertifyIndex) -> tuple[tuple[Counter[int], Counter[int]], Counter[int]]:
    """Random pairs by inliers, of both halves, and the first half's by strength.

    Those of the version before count, too, where its queries are taken over.
    """
    pairs, strengths, commits = (Counter[int](), Counter[int]()), Counter[int](), step.log.committed()
    latest = step.run.versions.latest() if step.planted.draw.taken_over else None
    held = latest.certificate.evidence if latest is not None else None
    if held is not None:
        for counts, known in zip(
            (*pairs, strengths), (held.pairs, held.other_pairs, held.strengths), strict=True
        ):
            counts.update({int(one): count for one, count in known.items()})
    for number in step.shard_ids():
        for half, report in enumerate(commits[number].report["pairs"]):
            pairs[half].update(dict(report["inliers"]))
            if half == 0:
                strengths.update(dict(report["strengths"]))
    return pairs, strengths


def _count_rows(step: CertifyIndex, numbers: Iterable[int]) -> int:
    """Of these index shards, without those that are dead."""
    positions = {position_of(number) for number in numbers}
    shards = [shard for shard in step.planted.manifest.shards if shard.shard in positions]
    return sum(shard.rows - len(shard.ids_within(step.tombstones)) for shard in shards)


def _list_outcomes(step: CertifyIndex) -> list[QueryOutcome]:
    """Of all queries; one that was asked before keeps its outcome unless an index shard made it worse."""
    commits, draw, rows = step.log.committed(), step.planted.draw, step.planted.manifest.rows
    before: defaultdict[int, Before] = defaultdict(Before)
    for number in step.shard_ids():
        for image_id, *counts in commits[number].report["before"]:
            before[image_id].add(*counts)
    asked = [
        QueryOutcome(
            query.image_id,
            query.view,
            "missed" if query.vector is None else judge(before[query.image_id]),
            query.file,
            rows - _count_rows(step, step.shard_ids()),
        )
        for query in step.asked
    ]
    taken_over, unchanged_rows = [], rows - _count_rows(step, draw.new_shards)
    for one in draw.taken_over:
        now = judge(before[one.image_id])
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
