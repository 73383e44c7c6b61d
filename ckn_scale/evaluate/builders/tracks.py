"""Which regions of a scene's images show the same point: matches, filtered by geometry, joined greedily."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ckn_scale.core.selective_matching import match_mutually
from ckn_scale.evaluate.builders.cameras import View, make_fundamental, measure_epipolar, triangulate
from ckn_scale.evaluate.matching import measure_distances

TOLERANCE_PX = 3.0  # of epipolar lines and of reprojections, the paper's


@dataclass(frozen=True)
class Regions:
    """The regions of one image: where they are in pixels of the pinhole, and their descriptors."""

    centres_px: np.ndarray  # (N, 2)
    rows: np.ndarray  # (N, D)


@dataclass(frozen=True)
class Matches:
    """Pairs of regions by their number among all of the scene, nearest first."""

    first: np.ndarray  # (M,)
    second: np.ndarray
    proposed: int  # before geometry was asked


def match_scene(
    views: Sequence[View],
    regions: Sequence[Regions],
    on_pair: Callable[[int, int], None],
    *,
    tolerance_px: float = TOLERANCE_PX,
) -> Matches:
    """For each pair of images the regions that are mutually nearest and near each other's epipolar line."""
    starts = np.cumsum([0, *(len(one.rows) for one in regions)])
    pairs = list(combinations(range(len(views)), 2))
    found, proposed = [], 0
    for done, (a, b) in enumerate(pairs, 1):
        distances = measure_distances(regions[a].rows, regions[b].rows)
        i, j = match_mutually(distances)
        fundamental = make_fundamental(views[a], views[b])
        errors = measure_epipolar(fundamental, regions[a].centres_px[i], regions[b].centres_px[j])
        kept = errors <= tolerance_px
        proposed += len(i)
        found.append((starts[a] + i[kept], starts[b] + j[kept], distances[i[kept], j[kept]]))
        on_pair(done, len(pairs))
    if not found:
        return Matches(np.empty(0, np.int64), np.empty(0, np.int64), 0)
    first, second, distance = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.lexsort((second, first, distance))
    return Matches(first[order], second[order], proposed)


def join_matches(
    views: Sequence[View],
    regions: Sequence[Regions],
    matches: Matches,
    *,
    tolerance_px: float = TOLERANCE_PX,
) -> list[list[int]]:
    """Groups of regions of one point, at most one of an image, largest first.

    Nearest matches come first; two groups are joined when one point explains all of their regions.
    """
    image_of = np.repeat(np.arange(len(views)), [len(one.rows) for one in regions])
    centres = np.concatenate([one.centres_px for one in regions])
    projections = np.stack([view.projection for view in views])
    group_of = np.arange(len(centres))
    members: dict[int, list[int]] = {}
    for first, second in zip(matches.first.tolist(), matches.second.tolist(), strict=True):
        a, b = int(group_of[first]), int(group_of[second])
        joined = [*members.get(a, [a]), *members.get(b, [b])]
        images = image_of[joined]
        if a == b or len(set(images.tolist())) < len(joined):
            continue
        if triangulate(projections[images], centres[joined])[1] > tolerance_px:
            continue
        group_of[joined] = a
        members[a] = joined
        members.pop(b, None)
    groups = [sorted(one) for one in members.values()]
    return sorted(groups, key=lambda one: (-len(one), one))
