"""Which points of two images match: what evidence counts, for whoever draws or exports it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ckn_scale.core.calibration import Calibration
from ckn_scale.core.evidence import QueryPoints, count_apart, join_evidence, match_head
from ckn_scale.core.geometry import Verification
from ckn_scale.core.topk import NO_ID
from ckn_scale.search.evidence import (
    points_of,
    read_points,
    score_points_of,
    stored_query,
    verify_points_of,
)
from ckn_scale.search.shard import ShardGroup


@dataclass(frozen=True)
class ImageMatches:
    """Tentative matches of a query and an indexed image, T of them; pixels are of the sizes described at."""

    query: np.ndarray  # (T,) int64, which of the query's points
    points: np.ndarray  # (T,) int64, which of the image's, as its file orders them
    first: np.ndarray  # (T, 2, 3) frames in the query
    second: np.ndarray  # (T, 2, 3) frames in the image
    verified: Verification  # which of them one transform explains
    inliers: int  # of these, that lie apart
    num_points: int  # of the image
    size_px: tuple[int, int]  # of the image, width and height
    original_px: tuple[int, int]  # the same before it was brought to working size; (0, 0): not known


def match_images(group: ShardGroup, query: QueryPoints, image_ids: Sequence[int]) -> list[ImageMatches]:
    """The matches of a query with images of this group, in the order of their ids."""
    found: dict[int, ImageMatches] = {}
    for shard, places, rows in group.locate(np.asarray(image_ids, np.int64)):
        file, points = points_of(shard), read_points(shard, rows)
        sizes = file.sizes_px(rows)
        head = match_head(query, points, file.read_frames(rows), sizes[:, :2])
        apart = count_apart(head, query.size_px, sizes[:, :2]).tolist()
        for place, one in enumerate(places.tolist()):
            chosen = slice(*head.tentative.offsets[place : place + 2])
            width, height, original_width, original_height = sizes[place].tolist()
            found[one] = ImageMatches(
                head.tentative.query[chosen],
                head.tentative.candidate[chosen] - points.offsets[place],
                head.first[chosen],
                head.second[chosen],
                head.verified[place],
                apart[place],
                int(points.offsets[place + 1] - points.offsets[place]),
                (width, height),
                (original_width, original_height),
            )
    return [found[place] for place in range(len(image_ids))]


@dataclass(frozen=True)
class MatchedPair:
    """Two indexed images that show the same; `first`, which has the smaller id, is the matches' query."""

    first: int
    second: int
    matches: ImageMatches


def find_matched_pairs(
    group: ShardGroup, image_ids: Sequence[int], calibration: Calibration, *, k: int, depth: int
) -> Iterator[tuple[int, list[MatchedPair]]]:
    """For each image its pairs with the `k` best of its `depth` nearest that match it, each pair once.

    Images are asked with their stored vectors and points. A pair that both find is verified from the smaller
    id on, so that it is the same whoever finds it.
    """
    seen: set[tuple[int, int]] = set()
    for image_id in image_ids:
        pairs = []
        for other in _find_neighbours(group, image_id, calibration, k, depth):
            one, two = sorted((image_id, other))
            if (one, two) not in seen:
                seen.add((one, two))
                pairs.append(MatchedPair(one, two, match_images(group, _as_query(group, one), [two])[0]))
        yield image_id, pairs


def _find_neighbours(
    group: ShardGroup, image_id: int, calibration: Calibration, k: int, depth: int
) -> list[int]:
    """The images that match best, without the image itself."""
    vector = group.vector(image_id)
    if vector is None:
        return []
    scores, found = group.find(vector[None] / np.linalg.norm(vector), depth + 1)
    others = (found[0] != image_id) & (found[0] != NO_ID)
    ids, similarity = found[0][others][:depth], scores[0][others][:depth]
    query = _as_query(group, image_id)
    selective = score_points_of(group, query, ids)
    inliers = np.array([one.inliers for one in verify_points_of(group, query, ids)], np.int64)
    strength = join_evidence(similarity, selective, inliers)
    order = np.lexsort((ids, -strength))
    chosen: list[int] = ids[order[calibration.is_match(inliers[order])]][:k].tolist()
    return chosen


def _as_query(group: ShardGroup, image_id: int) -> QueryPoints:
    ((shard, _, rows),) = group.locate(np.array([image_id]))
    return stored_query(shard, int(rows[0]))
