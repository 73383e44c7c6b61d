"""What speaks for a candidate: a score of shared words, then matches that one transform explains.

A search finds a shortlist by vectors. Selective matching scores all of it, geometry verifies its head, and
`join_evidence` makes one order of vector, words and geometry. What a candidate gets depends on it and the
query alone, not on the company it is scored in.

    make_query_points    an encoded image      →  what matching needs of it
    score_shortlist      query, points         →  a score of each candidate
    choose_head          ids, both scores      →  the few that geometry verifies
    match_head           query, points, frames →  matches, and which of them one transform explains
    verify_head          the same              →  inliers, transform and box of each candidate
    join_evidence        all three             →  the strength that hits are ordered by
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from ckn_scale.core.geometry import Verification, verify_candidates
from ckn_scale.core.packed_points import unpack_frames
from ckn_scale.core.selective_matching import (
    NUM_ASSIGNMENTS,
    PointSets,
    TentativeMatches,
    aggregate_points,
    encode_query,
    match_points,
    score_points,
)

if TYPE_CHECKING:
    from ckn_scale.core.encoder import EncodedImage

SHORTLIST = 1000  # candidates by vectors that selective matching scores
HEAD = 200  # of them that geometry verifies
MATCHED_ASSIGNMENTS = 8  # words of a query's point that its matches may have
MAX_MATCHES = 512  # tentative matches of a candidate that geometry looks at, the nearest
CELL_SHARE = 0.01  # of the longer side: inliers in one such cell count once
SIMILARITY_FLOOR, SELECTIVE_FLOOR = 0.02, 1e-3  # what a vector's similarity and a selective score have anyway


@dataclass(frozen=True)
class QueryPoints:
    """The points of a query as matching compares them: m words each, nearest first, and a code for each."""

    words: np.ndarray  # (N, m) uint16
    codes: np.ndarray  # (N, m, B) uint8
    frames: np.ndarray  # (N, 2, 3) float32, in pixels of `size_px`
    size_px: tuple[int, int]  # width, height
    original: np.ndarray = field(default_factory=lambda: np.eye(3))  # (3, 3): its pixels → the user's
    num_scored: int = NUM_ASSIGNMENTS  # words of a point that scores look at; matches look at all of them

    def __len__(self) -> int:
        return len(self.words)

    @property
    def scored(self) -> PointSets:
        """The assignments that scores look at, point by point."""
        words, codes = self.words[:, : self.num_scored], self.codes[:, : self.num_scored]
        return PointSets(words.ravel(), codes.reshape(words.size, codes.shape[-1]), np.array([0, words.size]))

    @cached_property
    def aggregated(self) -> PointSets:
        """One code a word."""
        return aggregate_points(self.scored)


@dataclass(frozen=True)
class Evidence:
    """What geometry says of one candidate; pixels are those of the sizes it was verified with."""

    inliers: int = 0  # that lie apart in both images
    matches: int = 0  # tentative ones
    transform: np.ndarray | None = None  # (3, 3) float64: a pixel of the query → the candidate
    kind: Literal["none", "affine", "homography"] = "none"
    box: tuple[float, float, float, float] | None = None  # x1, y1, x2, y2 around the inliers there

    def move(self, query: np.ndarray, candidate: np.ndarray) -> Evidence:
        """The same in other pixels of both images: (3, 3) maps of the old ones, the second one a scaling."""
        if self.transform is None or self.box is None:
            return self
        transform = candidate @ self.transform @ np.linalg.inv(query)
        corners = candidate[:2, :2] @ np.reshape(self.box, (2, 2)).T + candidate[:2, 2:]
        x1, y1, x2, y2 = corners.T.ravel().tolist()
        return replace(self, transform=transform / transform[2, 2], box=(x1, y1, x2, y2))


def scale_pixels(size_px: Sequence[int] | np.ndarray, other_px: Sequence[int] | np.ndarray) -> np.ndarray:
    """(3, 3): where the pixels of an image of one size lie in the same image of another size."""
    x, y = (float(new) / float(old) for old, new in zip(size_px, other_px, strict=True))
    return np.array([[x, 0, (x - 1) / 2], [0, y, (y - 1) / 2], [0, 0, 1]])


def make_query_points(
    encoded: EncodedImage, centroids: np.ndarray, box: Sequence[float] | None = None
) -> QueryPoints:
    """Of an image that was encoded as a query; `centroids` (K, D) are the words of points.

    `box` is the part of the upright image that was encoded, as `Preprocessor.prepare` takes it.
    """
    frames = unpack_frames(encoded.frames, encoded.width_px, encoded.height_px).frames
    number = min(MATCHED_ASSIGNMENTS, len(centroids))
    descriptors = encoded.descriptors.reshape(len(frames), -1 if len(frames) else centroids.shape[1])
    words, codes = encode_query(descriptors, centroids, num_assignments=number)
    size_px = encoded.width_px, encoded.height_px
    original = scale_pixels(size_px, encoded.original_size_px)
    if box is not None:
        original[:2, 2] += [max(0, math.floor(corner)) for corner in box[:2]]
    return QueryPoints(words, codes, frames, size_px, original)


def warm_up() -> None:
    """For whoever serves, before the first query: loops are compiled, or loaded where they were before."""
    points = PointSets(np.zeros(1, np.uint16), np.zeros((1, 16), np.uint8), np.array([0, 1]))
    frames = np.zeros((1, 9), np.uint8)
    unpacked = unpack_frames(frames, 2, 2).frames
    query = QueryPoints(points.words[:, None], points.codes[:, None], unpacked, (2, 2), num_scored=1)
    score_shortlist(query, points)
    verify_head(query, points, frames, np.array([[2, 2]]))


def score_shortlist(query: QueryPoints, points: PointSets) -> np.ndarray:
    """(C,) float64 from 0 to 1, larger is better; `points` are the candidates', sorted by word."""
    if len(query) == 0:
        return np.zeros(len(points))
    return score_points(query.aggregated, points)


def choose_head(
    image_ids: np.ndarray, similarity: np.ndarray, selective: np.ndarray, size: int = HEAD
) -> np.ndarray:
    """Positions of the best `size` by what is known without geometry; equals by ascending id."""
    strength = join_evidence(similarity, selective, np.zeros(len(image_ids), np.int64))
    return np.lexsort((image_ids, -strength))[:size]


@dataclass(frozen=True)
class HeadMatches:
    """Tentative matches of a query and C candidates, and which of them one transform explains."""

    tentative: TentativeMatches
    first: np.ndarray  # (T, 2, 3) frames in the query
    second: np.ndarray  # (T, 2, 3) in the candidates
    verified: list[Verification]  # of each candidate


def match_head(
    query: QueryPoints, points: PointSets, frames: np.ndarray, sizes_px: np.ndarray
) -> HeadMatches:
    """`frames` (P, 9) uint8 as packed, of all `points`; `sizes_px` (C, 2) of the candidates."""
    matches = _keep_nearest(match_points(query.words, query.codes, points), MAX_MATCHES)
    image = np.repeat(np.arange(len(points)), np.diff(matches.offsets))
    first, second = query.frames[matches.query], _unpack(frames[matches.candidate], sizes_px[image])
    verified = verify_candidates(first, second, matches.offsets, query.size_px, sizes_px)
    return HeadMatches(matches, first, second, verified)


def verify_head(
    query: QueryPoints, points: PointSets, frames: np.ndarray, sizes_px: np.ndarray
) -> list[Evidence]:
    """What `match_head` finds, as evidence for each candidate."""
    found = match_head(query, points, frames, sizes_px)
    apart = count_apart(found, query.size_px, sizes_px).tolist()
    numbers = np.diff(found.tentative.offsets).tolist()
    return [
        Evidence(inliers, matches, one.transform, one.kind, one.box)
        for one, inliers, matches in zip(found.verified, apart, numbers, strict=True)
    ]


def count_apart(
    found: HeadMatches, first_size_px: tuple[int, int], second_sizes_px: np.ndarray
) -> np.ndarray:
    """(C,) int64: cells that hold inliers, in the image that has fewer of them.

    Several points of one place agree with each other whatever they show: together they count once.
    """
    counts = np.array([len(one.inliers) for one in found.verified], np.int64)
    candidate = np.repeat(np.arange(len(counts)), counts)
    if len(candidate) == 0:
        return counts
    rows = np.concatenate([one.inliers for one in found.verified]) + found.tentative.offsets[candidate]
    cells = []
    for frames, sides in (
        (found.first, np.full(len(rows), max(first_size_px))),
        (found.second, second_sizes_px.max(axis=1)[candidate]),
    ):
        at = np.floor(frames[rows, :, 2] / (CELL_SHARE * sides)[:, None]).astype(np.int64)
        keys = np.unique(((candidate << 20) + at[:, 0] + 1024 << 20) + at[:, 1] + 1024)
        cells.append(np.bincount(keys >> 40, minlength=len(counts)))
    return np.minimum(*cells)


def join_evidence(similarity: np.ndarray, selective: np.ndarray, inliers: np.ndarray) -> np.ndarray:
    """(C,) float64, larger is better: how strongly vector, words and geometry together speak for each.

    The logarithm of their product, each with a floor that it has by chance: what only one of them sees does
    not win alone. Measured on three sets, it is ahead of each of them and of geometry first.
    """
    strength: np.ndarray = (
        np.log2(np.maximum(similarity.astype(np.float64), 0) + SIMILARITY_FLOOR)
        + np.log2(selective.astype(np.float64) + SELECTIVE_FLOOR)
        + np.log2(1 + inliers.astype(np.float64))
    )
    return strength


def _keep_nearest(matches: TentativeMatches, limit: int) -> TentativeMatches:
    """At most `limit` matches of each candidate: those of the smallest distances, in their order."""
    counts = np.diff(matches.offsets)
    if not (counts > limit).any():
        return matches
    image = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((np.arange(len(image)), matches.distances, image))
    rank = np.arange(len(image)) - np.repeat(matches.offsets[:-1], counts)
    kept = np.sort(order[rank < limit])
    offsets = np.concatenate([[0], np.cumsum(np.minimum(counts, limit))])
    return TentativeMatches(matches.query[kept], matches.candidate[kept], matches.distances[kept], offsets)


def _unpack(packed: np.ndarray, sizes_px: np.ndarray) -> np.ndarray:
    """(T, 9) uint8 frames of images of (T, 2) sizes → (T, 2, 3) float32 in pixels."""
    frames = unpack_frames(packed, 2, 2).frames  # positions from 0 to 1
    frames[:, :, 2] *= np.maximum(sizes_px - 1, 1).astype(np.float32)
    return frames
