"""Which points of two images match: what evidence counts, for whoever draws or exports it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ckn_scale.core.calibration import Calibration
from ckn_scale.core.evidence import (
    Evidence,
    QueryPoints,
    count_apart,
    join_evidence,
    match_head,
    scale_pixels,
    score_shortlist,
)
from ckn_scale.core.geometry import Verification
from ckn_scale.core.selective_matching import PointSets
from ckn_scale.core.topk import NO_ID
from ckn_scale.errors import InputError
from ckn_scale.search.evidence import (
    Query,
    points_of,
    read_points,
    score_points_of,
    stored_query,
    verify_points_of,
)
from ckn_scale.search.shard import ShardGroup

if TYPE_CHECKING:
    from ckn_scale.core.encoder import EncodedImage


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
        matches = _match_sets(query, points, file.read_frames(rows), file.sizes_px(rows))
        found.update(zip(places.tolist(), matches, strict=True))
    return [found[place] for place in range(len(image_ids))]


def _match_sets(
    query: QueryPoints, points: PointSets, frames: np.ndarray, sizes: np.ndarray
) -> list[ImageMatches]:
    """`frames` as packed, of all points; `sizes` (C, 4) as `PointFile.sizes_px` has them."""
    head = match_head(query, points, frames, sizes[:, :2])
    apart = count_apart(head, query.size_px, sizes[:, :2]).tolist()
    found = []
    for place, (width, height, original_width, original_height) in enumerate(sizes.tolist()):
        chosen = slice(*head.tentative.offsets[place : place + 2])
        matches = ImageMatches(
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
        found.append(matches)
    return found


@dataclass(frozen=True)
class PairMatch:
    """What vector, words and geometry say of two images; pixels are those of the upright originals."""

    similarity: float
    selective: float
    inliers: int
    transform: np.ndarray | None  # (3, 3): a pixel of the first → the second
    box: tuple[float, float, float, float] | None  # around the inliers in the second
    pairs: np.ndarray  # (M, 4) float64: x, y in the first, x, y in the second, of all verified matches
    sizes_px: tuple[tuple[int, int], tuple[int, int]]  # width, height of both, or of what a box cuts out

    def judge(self, calibration: Calibration) -> tuple[bool, float]:
        """Whether they show the same, and the score that a search gives it."""
        inliers = np.array([self.inliers])
        strength = join_evidence(np.array([self.similarity]), np.array([self.selective]), inliers)
        return bool(calibration.is_match(inliers)[0]), float(calibration.score(strength)[0])


def match_stored(group: ShardGroup, query: Query, image_id: int) -> PairMatch | None:
    """A query beside one image of this group; None when it is not there. InputError without points."""
    if group.look_up(image_id) is None:
        return None
    ids, points = np.array([image_id]), require_points(query)
    similarity = float(group.compare(query.vector, ids)[0])
    selective = float(score_points_of(group, points, ids)[0])
    return _describe_pair(points, match_images(group, points, [image_id])[0], similarity, selective)


def match_encoded(query: Query, other: EncodedImage) -> PairMatch:
    """A query beside another image that was encoded: as if that were indexed, with its vector as it is."""
    points = require_points(query)
    order = np.argsort(other.words, kind="stable")
    stored = PointSets(other.words[order], other.codes[order], np.array([0, len(order)]))
    sizes = np.array([[other.width_px, other.height_px, *other.original_size_px]])
    (found,) = _match_sets(points, stored, other.frames[order], sizes)
    selective = float(score_shortlist(points, stored)[0])
    return _describe_pair(points, found, float(query.vector @ other.vector), selective)


def require_points(query: Query) -> QueryPoints:
    if query.points is None:
        raise InputError("images cannot be matched: the index was built without points")
    return query.points


def _describe_pair(query: QueryPoints, found: ImageMatches, similarity: float, selective: float) -> PairMatch:
    second_px = found.original_px if all(found.original_px) else found.size_px
    to_second = scale_pixels(found.size_px, second_px)
    verified = found.verified
    moved = Evidence(found.inliers, len(found.query), verified.transform, verified.kind, verified.box).move(
        query.original, to_second
    )
    places = [
        frames[verified.inliers, :, 2].astype(np.float64) @ pixels[:2, :2].T + pixels[:2, 2]
        for frames, pixels in ((found.first, query.original), (found.second, to_second))
    ]
    width, height = (round(side * query.original[axis, axis]) for axis, side in enumerate(query.size_px))
    return PairMatch(
        similarity,
        selective,
        found.inliers,
        moved.transform,
        moved.box,
        np.concatenate(places, axis=1),
        ((width, height), second_px),
    )


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
