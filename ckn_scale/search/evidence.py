"""Answers with evidence: a shortlist by vectors, scored by words, its head verified by geometry.

Three rounds over the groups of shards that own the candidates, so that no one else holds points:

    ShardGroup.find     vectors              →  shortlist, merged over groups
    score_points_of     query, shortlist     →  selective scores, whose best are the head
    verify_points_of    query, head          →  inliers, transform, box

What a candidate gets depends on it and the query alone: however the images are cut into shards and groups,
`rank_candidates` makes the same answer of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckn_scale.core.calibration import Calibration
from ckn_scale.core.evidence import (
    Evidence,
    QueryPoints,
    choose_head,
    join_evidence,
    scale_pixels,
    score_shortlist,
    verify_head,
)
from ckn_scale.core.selective_matching import PointSets
from ckn_scale.core.vector_index import NO_ID
from ckn_scale.errors import InputError
from ckn_scale.search.shard import OpenShard, ShardGroup, Verified
from ckn_scale.storage.point_files import PointFile


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


def rank_candidates(
    image_ids: np.ndarray,
    similarity: np.ndarray,
    selective: np.ndarray,
    evidence: Mapping[int, Evidence],
    calibration: Calibration,
    k: int,
) -> list[RankedCandidate]:
    """The best k of a shortlist: matches, then others, strongest first, ties by id.

    `evidence` is that of its head, by id.
    """
    known = [evidence.get(one, Evidence()) for one in image_ids.tolist()]
    inliers = np.array([one.inliers for one in known], np.int64)
    strength, matches = join_evidence(similarity, selective, inliers), calibration.is_match(inliers)
    scores, ranked = calibration.score(strength), []
    for place in np.lexsort((image_ids, -strength, ~matches))[:k].tolist():
        one, match = known[place], bool(matches[place])
        verified = Verified(
            match=match,
            inliers=one.inliers,
            box=one.box if match else None,
            transform=one.transform.tolist() if match and one.transform is not None else None,
            similarity=float(similarity[place]),
            selective=float(selective[place]),
        )
        ranked.append(RankedCandidate(int(image_ids[place]), float(scores[place]), verified))
    return ranked


def search_with_evidence(
    group: ShardGroup,
    query: QueryPoints,
    image_ids: np.ndarray,
    similarity: np.ndarray,
    calibration: Calibration,
    k: int,
) -> list[RankedCandidate]:
    """The rounds after `ShardGroup.find`, for one query in this process."""
    present = image_ids != NO_ID
    image_ids, similarity = image_ids[present], similarity[present]
    selective = score_points_of(group, query, image_ids)
    head = image_ids[choose_head(image_ids, selective)]
    evidence = dict(zip(head.tolist(), verify_points_of(group, query, head), strict=True))
    return rank_candidates(image_ids, similarity, selective, evidence, calibration, k)


def _read_points(shard: OpenShard, rows: np.ndarray | Sequence[int]) -> PointSets:
    stored = _points_of(shard).read_points(rows)
    return PointSets(stored.words, stored.codes, stored.offsets)


def _points_of(shard: OpenShard) -> PointFile:
    if shard.points is None:
        raise InputError("this index has no points: search it without verification")
    return shard.points
