"""What chance looks like to a search: the evidence for images that have nothing to do with a query.

Pairs are drawn by hash within one index shard, the same whoever draws them. Some images do show the same as a
query: those whose vectors say so are left out, the others the fit of the tail takes for what they are
(`core/calibration.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ckn_scale.core.calibration import STRENGTH_STEPS
from ckn_scale.core.evidence import QueryPoints, join_evidence
from ckn_scale.core.sampling import hash_priorities, smallest
from ckn_scale.search.evidence import score_points_of, verify_points_of
from ckn_scale.search.shard import ShardGroup

PAIRS_PER_QUERY = 16  # in each index shard
PAIR_SEED = 15


@dataclass
class PairCounts:
    """Random pairs by their inliers, and by their strength in steps."""

    inliers: Counter[int] = field(default_factory=Counter)
    strengths: Counter[int] = field(default_factory=Counter)

    def add(
        self, group: ShardGroup, points: QueryPoints, image_ids: np.ndarray, similarity: np.ndarray
    ) -> None:
        """The pairs of a query and images of the group; `similarity` is that of their vectors."""
        selective = score_points_of(group, points, image_ids)
        inliers = np.array([one.inliers for one in verify_points_of(group, points, image_ids)], np.int64)
        strength = join_evidence(similarity, selective, inliers)
        self.inliers.update(inliers.tolist())
        self.strengths.update(np.floor(strength * STRENGTH_STEPS).astype(np.int64).tolist())

    def to_report(self) -> dict[str, list[tuple[int, int]]]:
        """As pairs of a value and its count: JSON has no integer keys."""
        return {"inliers": sorted(self.inliers.items()), "strengths": sorted(self.strengths.items())}


def draw_others(group: ShardGroup, image_id: int, count: int = PAIRS_PER_QUERY) -> np.ndarray:
    """Ids of at most `count` images of the group, by hash, ascending; never `image_id` itself."""
    ids = np.concatenate([shard.living_ids for shard in group.shards] or [np.empty(0, np.int64)])
    ids = ids[ids != image_id]
    chosen: np.ndarray = ids[smallest(hash_priorities(PAIR_SEED, np.array(image_id), ids), count)]
    return np.sort(chosen)


def expand_strengths(counts: Mapping[int, int]) -> np.ndarray:
    """(N,) the strengths that were counted, each in the middle of its step."""
    steps = sorted(counts)
    middles = (np.array(steps, np.float64) + 0.5) / STRENGTH_STEPS
    return np.repeat(middles, [counts[one] for one in steps])
