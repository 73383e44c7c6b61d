"""Which hits of an answer are near-copies of each other, by the notion of `core/copies.py`.

Pairs of hits whose stored vectors are far more alike than the collection at large are verified by their
points, like those of `ckn-scale copies`. `serving/hit_copies.py` asks the same of groups in other processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np

from ckn_scale.core.copies import (
    COPY_DEVIATIONS,
    MIN_INLIERS,
    MIN_SHARE,
    NEIGHBOURS,
    SAME_SCORE,
    VERIFIED_DEVIATIONS,
    ScoredPairs,
    SignRows,
    StoredRows,
    VectorRows,
    find_components,
    find_levels,
    find_pairs,
    restore_rows,
    take_rows,
)
from ckn_scale.core.evidence import QueryPoints
from ckn_scale.search.evidence import RankedCandidate, load_query, verify_points_of
from ckn_scale.search.hits import Hit
from ckn_scale.search.shard import ShardGroup

Ranked = TypeVar("Ranked", Hit, RankedCandidate)

COPIES_DEPTH = 100  # hits among which copies are looked for, at least
MOST_COMPARED = 300  # at most
NUM_REFERENCES = 256  # images that the collection at large is judged by


class CopyFinder:
    """Finds copies among hits of one group, which is all of the index; threads may share it."""

    def __init__(self, group: ShardGroup) -> None:
        self._group = group

    def leave_out(self, ranked: Sequence[Ranked]) -> tuple[list[Ranked], dict[int, list[int]]]:
        """Of a ranking the best of each group of copies, and the others of its group by its id."""
        ids = [one.image_id for one in ranked[:MOST_COMPARED]]
        copies = list_copies(ids, find_copies(self._group, ids, self._references) if len(ids) > 1 else {})
        left_out = {one for others in copies.values() for one in others}
        return [one for one in ranked if one.image_id not in left_out], copies

    @cached_property
    def _references(self) -> StoredRows:
        return draw_references(self._group)


def keep_all(ranked: Sequence[Ranked]) -> tuple[list[Ranked], dict[int, list[int]]]:
    """Like `CopyFinder.leave_out`, where copies are not looked for."""
    return list(ranked), {}


def find_copies(group: ShardGroup, image_ids: Sequence[int], references: StoredRows) -> dict[int, int]:
    """The group of each of these images that has a copy among them."""
    ids = np.sort(np.asarray(image_ids, np.int64))
    pairs = find_alike(restore_rows(ids, read_rows(group, ids)), references, verified=group.has_points)
    if group.has_points:
        pairs = pairs.take(np.flatnonzero(verify_pairs(group, pairs)))
    return name_groups(pairs)


def draw_references(group: ShardGroup) -> SignRows | VectorRows:
    """The collection at large: some of its images."""
    ids = np.sort(group.draw(NUM_REFERENCES)[1])
    return restore_rows(ids, read_rows(group, ids))


def read_rows(group: ShardGroup, image_ids: np.ndarray) -> np.ndarray:
    """What the index keeps of ascending ids, as `core/copies.py` compares it."""
    return np.concatenate([take_rows(shard.index, rows).data for shard, _, rows in group.locate(image_ids)])


def find_alike(rows: StoredRows, references: StoredRows, *, verified: bool) -> ScoredPairs:
    """Pairs that stand out by their vectors; less will do where points `verified` them afterwards."""
    levels = find_levels(rows, references, VERIFIED_DEVIATIONS if verified else COPY_DEVIATIONS)
    return find_pairs(rows, levels, rows, levels, NEIGHBOURS)


def name_groups(pairs: ScoredPairs) -> dict[int, int]:
    return dict(zip(*(part.tolist() for part in find_components(pairs.first, pairs.second)), strict=True))


def is_copy(inliers: int, one: QueryPoints, other: QueryPoints) -> bool:
    """Whether one transform explains enough of both images."""
    return inliers >= max(MIN_INLIERS, MIN_SHARE * min(len(one), len(other)))


def list_copies(image_ids: Sequence[int], groups: Mapping[int, int]) -> dict[int, list[int]]:
    """Ids, best first, and the groups of some → for the best of each group, the others of it."""
    best: dict[int, int] = {}
    copies: dict[int, list[int]] = {}
    for image_id in image_ids:
        first = best.setdefault(groups.get(image_id, image_id), image_id)
        if first != image_id:
            copies.setdefault(first, []).append(image_id)
    return copies


def verify_pairs(group: ShardGroup, pairs: ScoredPairs) -> np.ndarray:
    """(P,) bool: whether one transform explains enough of both; same vectors are enough."""
    agree = pairs.scores >= SAME_SCORE
    unsure = np.flatnonzero(~agree)
    points = {
        one: _load_points(group, one)
        for one in np.union1d(pairs.first[unsure], pairs.second[unsure]).tolist()
    }
    for one in np.unique(pairs.first[unsure]).tolist():
        rows = unsure[pairs.first[unsure] == one]
        evidence = verify_points_of(group, points[one], pairs.second[rows])
        others = [points[other] for other in pairs.second[rows].tolist()]
        agree[rows] = [
            is_copy(found.inliers, points[one], other) for found, other in zip(evidence, others, strict=True)
        ]
    return agree


def _load_points(group: ShardGroup, image_id: int) -> QueryPoints:
    query = load_query(group, image_id)
    assert query is not None  # a hit of this group, which has points
    assert query.points is not None
    return query.points
