"""Answers with evidence: a shortlist by vectors, scored by words, its head verified by geometry.

Three rounds over the groups of shards that own the candidates, so that no one else holds points:

    ShardGroup.find     vectors              →  shortlist, merged over groups
    score_points_of     query, shortlist     →  selective scores, whose best are the head
    verify_points_of    query, head          →  inliers, transform, box

What a candidate gets depends on it and the query alone: however the images are cut into shards and groups,
`rank_best` makes the same answer of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ckn_scale.core.calibration import Calibration
from ckn_scale.core.evidence import (
    Evidence,
    QueryPoints,
    choose_head,
    make_query_points,
    scale_pixels,
    score_shortlist,
    verify_head,
)
from ckn_scale.core.expansion import NUM_VERIFIERS, make_hit_points
from ckn_scale.core.packed_points import unpack_frames
from ckn_scale.core.ranking import Ranking
from ckn_scale.core.selective_matching import PointSets, join_points
from ckn_scale.core.topk import NO_ID
from ckn_scale.errors import InputError
from ckn_scale.search.shard import Allowed, Hit, OpenShard, ShardGroup, Verified
from ckn_scale.storage.point_files import PointFile

if TYPE_CHECKING:
    from ckn_scale.core.encoder import EncodedImage, ImageEncoder


@dataclass(frozen=True)
class Query:
    """An encoded image that is searched for."""

    vector: np.ndarray  # (D,) float32
    points: QueryPoints | None  # None where the encoder has no model for them


def make_query(encoded: EncodedImage, encoder: ImageEncoder, box: Sequence[float] | None = None) -> Query:
    """What is asked for an image that the encoder encoded, or for the part of it in `box`."""
    if encoder.points is None:
        return Query(encoded.vector, None)
    return Query(encoded.vector, make_query_points(encoded, encoder.points.centroids, box))


@dataclass(frozen=True)
class RankedCandidate:
    """One candidate of an answer, best first, before its row is looked up."""

    image_id: int
    score: float
    verified: Verified


@dataclass(frozen=True)
class RankedHits:
    """The best candidates of a group, with their rows."""

    strength: np.ndarray  # (k,) float64, by which hits of several groups are merged
    hits: list[Hit]


def score_points_of(group: ShardGroup, query: QueryPoints, image_ids: np.ndarray) -> np.ndarray:
    """(N,) float64: selective scores of images of this group, in the order of their ids."""
    scores = np.zeros(len(image_ids))
    for shard, places, rows in group.locate(image_ids):
        scores[places] = score_shortlist(query, read_points(shard, rows))
    return scores


def verify_points_of(group: ShardGroup, query: QueryPoints, image_ids: np.ndarray) -> list[Evidence]:
    """What geometry says of images of this group, in the order of their ids.

    Boxes and transforms are in pixels of the original images, where their size is known, else in those of
    the size they were described at.
    """
    located = group.locate(image_ids)
    if not located:
        return []
    # All shards at once: a few candidates each would be calls too small to be worth it.
    files = [(points_of(shard), rows) for shard, _, rows in located]
    points = join_points([read_points(shard, rows) for shard, _, rows in located])
    frames = np.concatenate([file.read_frames(rows) for file, rows in files])
    sizes = np.concatenate([file.sizes_px(rows) for file, rows in files])
    evidence = verify_head(query, points, frames, sizes[:, :2])
    found = [Evidence()] * len(image_ids)
    places = np.concatenate([places for _, places, _ in located])
    for place, one, size in zip(places.tolist(), evidence, sizes, strict=True):
        found[place] = one.move(query.original, to_original(size))
    return found


def gather_evidence(
    group: ShardGroup, query: QueryPoints, image_ids: np.ndarray, similarity: np.ndarray
) -> Ranking:
    """The rounds after `ShardGroup.find`, for one query in this process."""
    present = image_ids != NO_ID
    image_ids, similarity = image_ids[present], similarity[present]
    selective = score_points_of(group, query, image_ids)
    head = image_ids[choose_head(image_ids, similarity, selective)]
    evidence = dict(zip(head.tolist(), verify_points_of(group, query, head), strict=True))
    return Ranking(image_ids, similarity, selective, evidence, {})


def rank_best(ranking: Ranking, calibration: Calibration, k: int) -> list[RankedCandidate]:
    """The best k of a shortlist, strongest first, ties by id."""
    strength, inliers = ranking.strength, ranking.inliers
    scores, matches = calibration.score(strength), calibration.is_match(inliers)
    ranked = []
    for place in ranking.order()[:k].tolist():
        image_id, match = int(ranking.image_ids[place]), bool(matches[place])
        one = ranking.evidence.get(image_id, Evidence())
        own = match and one.inliers == inliers[place]  # else it matches over another hit
        verified = Verified(
            match=match,
            inliers=int(inliers[place]),
            box=one.box if own else None,
            transform=one.transform.tolist() if own and one.transform is not None else None,
            similarity=float(ranking.similarity[place]),
            selective=float(ranking.selective[place]),
        )
        ranked.append(RankedCandidate(image_id, float(scores[place]), verified))
    return ranked


def describe_best(group: ShardGroup, ranking: Ranking, calibration: Calibration, k: int) -> RankedHits:
    """The best k of candidates of this group, as `rank_best` orders them."""
    hits = add_evidence(group, rank_best(ranking, calibration, k))
    return RankedHits(ranking.strength[ranking.order()[:k]], hits)


class GroupCandidates:
    """The images of a group as `core/ranking.py` asks for them.

    `allowed` admits some of them only, `without` leaves out one. Without `centroids` hits are not widened.
    """

    def __init__(
        self,
        group: ShardGroup,
        centroids: np.ndarray | None,
        allowed: Allowed | None = None,
        without: int | None = None,
    ) -> None:
        self._group, self._centroids = group, centroids
        self._allowed, self._without = allowed, without

    def find(self, vector: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        similarity, ids = self._group.find(
            vector[None], k + (self._without is not None), allowed=self._allowed
        )
        return leave_out(ids[0], similarity[0], self._without, k)

    def compare(self, vector: np.ndarray, image_ids: np.ndarray) -> np.ndarray:
        return self._group.compare(vector, image_ids)

    def score(self, query: QueryPoints, image_ids: np.ndarray) -> np.ndarray:
        return score_points_of(self._group, query, image_ids)

    def verify(self, query: QueryPoints, image_ids: np.ndarray) -> list[Evidence]:
        return verify_points_of(self._group, query, image_ids)

    def load_hits(
        self, image_ids: np.ndarray, evidence: Sequence[Evidence]
    ) -> tuple[np.ndarray, list[QueryPoints]]:
        points: list[QueryPoints] = []
        for place, one in enumerate(evidence):
            ((shard, _, rows),) = self._group.locate(image_ids[place : place + 1])
            file, size = points_of(shard), points_of(shard).sizes_px(rows)[0]
            to_working = np.linalg.inv(to_original(size))
            box = one.move(np.eye(3), to_working).box or (0.0, 0.0, 0.0, 0.0)
            working_px = int(size[0]), int(size[1])
            words = self._centroids if place < NUM_VERIFIERS else None
            points.append(
                make_hit_points(read_points(shard, rows), file.read_frames(rows), working_px, box, words)
            )
        return self.load_vectors(image_ids), points

    def load_vectors(self, image_ids: np.ndarray) -> np.ndarray:
        vectors = [self._group.vector(one) for one in image_ids.tolist()]
        return np.stack([one for one in vectors if one is not None])


def add_evidence(group: ShardGroup, ranked: Sequence[RankedCandidate]) -> list[Hit]:
    """The rows of candidates of this group, with what verification said of them."""
    ids, scores = (
        np.array([one.image_id for one in ranked], np.int64),
        np.array([one.score for one in ranked]),
    )
    hits = group.describe(ids, scores)
    return [replace(hit, verified=one.verified) for hit, one in zip(hits, ranked, strict=True)]


def leave_out(
    image_ids: np.ndarray, similarity: np.ndarray, image_id: int | None, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """The first k that are images, and not this one."""
    kept = image_ids != NO_ID
    if image_id is not None:
        kept &= image_ids != image_id
    return image_ids[kept][:k], similarity[kept][:k]


def to_original(size: np.ndarray) -> np.ndarray:
    """(3, 3): pixels of working size → of the original, for the four numbers of `PointFile.sizes_px`."""
    return scale_pixels(size[:2], size[2:] if size[2:].all() else size[:2])


def load_query(group: ShardGroup, image_id: int) -> Query | None:
    """An indexed image as a query, from what is stored of it; None when it is not in this group.

    Its points are in pixels of the upright original, like those of a file.
    """
    vector = group.vector(image_id)
    if vector is None:
        return None
    unit = vector / max(float(np.linalg.norm(vector)), 1e-20)
    ((shard, _, rows),) = group.locate(np.array([image_id]))
    if shard.points is None:
        return Query(unit, None)
    original = to_original(shard.points.sizes_px(rows)[0])
    return Query(unit, replace(stored_query(shard, int(rows[0])), original=original))


def stored_query(shard: OpenShard, row: int) -> QueryPoints:
    """The points of an indexed image as a query, in pixels of the size it was described at."""
    file, points = points_of(shard), read_points(shard, [row])
    width, height = (int(side) for side in file.sizes_px([row])[0, :2])
    frames = unpack_frames(file.read_frames([row]), width, height).frames
    return QueryPoints(points.words[:, None], points.codes[:, None], frames, (width, height))


def read_points(shard: OpenShard, rows: np.ndarray | Sequence[int]) -> PointSets:
    stored = points_of(shard).read_points(rows)
    return PointSets(stored.words, stored.codes, stored.offsets)


def points_of(shard: OpenShard) -> PointFile:
    """InputError when the index was built without points."""
    if shard.points is None:
        raise InputError("this index has no points: search it without verification")
    return shard.points
