"""Answers with evidence: a shortlist by vectors, scored by words, its head verified by geometry.

Three rounds over the groups of shards that own the candidates, so that no one else holds points:

    ShardGroup.find     vectors              →  shortlist, merged over groups
    score_points_of     query, shortlist     →  selective scores, whose best are the head
    verify_points_of    query, head          →  inliers, transform, box

What a candidate gets depends on it and the query alone: however the images are cut into shards and groups,
`Candidates.rank` makes the same answer of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ckn_scale.core.calibration import Calibration
from ckn_scale.core.encoder import EncodedImage, ImageEncoder
from ckn_scale.core.evidence import (
    Evidence,
    QueryPoints,
    choose_head,
    join_evidence,
    make_query_points,
    scale_pixels,
    score_shortlist,
    verify_head,
)
from ckn_scale.core.selective_matching import PointSets
from ckn_scale.core.vector_index import NO_ID
from ckn_scale.errors import InputError
from ckn_scale.search.shard import Hit, OpenShard, ShardGroup, Verified
from ckn_scale.storage.point_files import PointFile


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


def score_points_of(group: ShardGroup, query: QueryPoints, image_ids: np.ndarray) -> np.ndarray:
    """(N,) float64: selective scores of images of this group, in the order of their ids."""
    scores = np.zeros(len(image_ids))
    for shard, places, rows in group.locate(image_ids):
        scores[places] = score_shortlist(query, _read_points(shard, rows))
    return scores


def verify_points_of(group: ShardGroup, query: QueryPoints, image_ids: np.ndarray) -> list[Evidence]:
    """What geometry says of images of this group, in the order of their ids.

    Boxes and transforms are in pixels of the original images, where their size is known, else in those of
    the size they were described at.
    """
    found = [Evidence()] * len(image_ids)
    for shard, places, rows in group.locate(image_ids):
        points, file = _read_points(shard, rows), _points_of(shard)
        sizes = file.sizes_px(rows)
        evidence = verify_head(query, points, file.read_frames(rows), sizes[:, :2])
        for place, one, size in zip(places.tolist(), evidence, sizes, strict=True):
            known = size[2:] if size[2:].all() else size[:2]
            found[place] = one.move(query.original, scale_pixels(size[:2], known))
    return found


@dataclass(frozen=True)
class Candidates:
    """A shortlist and what speaks for each of it; the arrays are parallel."""

    image_ids: np.ndarray  # (C,) int64
    similarity: np.ndarray  # (C,) float32, of the vectors
    selective: np.ndarray  # (C,) float64
    evidence: Mapping[int, Evidence]  # of the head, by id

    @cached_property
    def inliers(self) -> np.ndarray:
        """(C,) int64, 0 outside the head."""
        nothing = Evidence()
        ids = self.image_ids.tolist()
        return np.array([self.evidence.get(one, nothing).inliers for one in ids], np.int64)

    @cached_property
    def strength(self) -> np.ndarray:
        """(C,) float64, by which they are ordered."""
        return join_evidence(self.similarity, self.selective, self.inliers)

    def rank(self, calibration: Calibration, k: int) -> list[RankedCandidate]:
        """The best k, strongest first, ties by id."""
        scores, matches = calibration.score(self.strength), calibration.is_match(self.inliers)
        ranked = []
        for place in np.lexsort((self.image_ids, -self.strength))[:k].tolist():
            image_id, match = int(self.image_ids[place]), bool(matches[place])
            one = self.evidence.get(image_id, Evidence())
            verified = Verified(
                match=match,
                inliers=one.inliers,
                box=one.box if match else None,
                transform=one.transform.tolist() if match and one.transform is not None else None,
                similarity=float(self.similarity[place]),
                selective=float(self.selective[place]),
            )
            ranked.append(RankedCandidate(image_id, float(scores[place]), verified))
        return ranked


def gather_evidence(
    group: ShardGroup, query: QueryPoints, image_ids: np.ndarray, similarity: np.ndarray
) -> Candidates:
    """The rounds after `ShardGroup.find`, for one query in this process."""
    present = image_ids != NO_ID
    image_ids, similarity = image_ids[present], similarity[present]
    selective = score_points_of(group, query, image_ids)
    head = image_ids[choose_head(image_ids, similarity, selective)]
    evidence = dict(zip(head.tolist(), verify_points_of(group, query, head), strict=True))
    return Candidates(image_ids, similarity, selective, evidence)


def add_evidence(group: ShardGroup, ranked: Sequence[RankedCandidate]) -> list[Hit]:
    """The rows of candidates of this group, with what verification said of them."""
    ids, scores = (
        np.array([one.image_id for one in ranked], np.int64),
        np.array([one.score for one in ranked]),
    )
    hits = group.describe(ids, scores)
    return [replace(hit, verified=one.verified) for hit, one in zip(hits, ranked, strict=True)]


def _read_points(shard: OpenShard, rows: np.ndarray | Sequence[int]) -> PointSets:
    stored = _points_of(shard).read_points(rows)
    return PointSets(stored.words, stored.codes, stored.offsets)


def _points_of(shard: OpenShard) -> PointFile:
    if shard.points is None:
        raise InputError("this index has no points: search it without verification")
    return shard.points
