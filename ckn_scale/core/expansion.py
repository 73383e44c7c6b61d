"""Expansion: images that geometry has verified help to ask.

A verified hit shows what the query shows, from another side or in another light. Its vector joins the
query's, its points inside the matched box join the query's points, and the best few verify the head as well:
what matches a hit that matches the query is found by a chain of two links.

    choose_hits        inliers of the head     →  the hits that help
    make_hit_points    a hit's points, its box →  what matching needs of them
    widen_points       points of one word each →  the same with more words, for matching
    merge_points       query and hits          →  one query for `score_shortlist`
    average_vectors    query and hits          →  one vector
    separate_vectors   the same and images of other things  →  a vector that tells them apart
    chain_inliers      query → hit → candidate →  inliers of the weaker link

What is expanded depends on the query and its hits alone, so the order of an answer does not depend on shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ckn_scale.core.evidence import MATCHED_ASSIGNMENTS, Evidence, QueryPoints
from ckn_scale.core.packed_points import unpack_frames
from ckn_scale.core.selective_matching import PointSets, aggregate_points, encode_query
from ckn_scale.core.specs import count_code_bytes

MAX_HITS = 10  # that join the query
MIN_INLIERS = 12  # of a hit, that lie apart: with 8 some are false, and they cost Holidays a point
OWN_INLIERS = 8  # from which on the query has verified a candidate itself
NUM_VERIFIERS = 3  # hits that verify, too
CHAINED_HEAD = 60  # candidates they verify: the strongest that the query itself has not
EXPANDED_HEAD = 200  # candidates that the query verifies, those that it has verified before included
NUM_OTHERS = 50  # images of other things that a vector is told apart from
BOX_MARGIN = 0.1  # of the box's sides, by which the points of a hit may lie outside
_MARGIN_PX = 8.0
_RIDGE = 0.1  # of the trace of an average image
_SIGN_SHARE = float(np.sqrt(2 / np.pi))  # of a residual's length along its signs, were it Gaussian


def choose_hits(image_ids: np.ndarray, inliers: np.ndarray, *, min_inliers: int = MIN_INLIERS) -> np.ndarray:
    """Positions of at most `MAX_HITS` images with enough inliers, most first, ties by id."""
    order = np.lexsort((image_ids, -inliers))[:MAX_HITS]
    return order[inliers[order] >= min_inliers]


def make_hit_points(
    points: PointSets,
    frames: np.ndarray,
    size_px: tuple[int, int],
    box: Sequence[float],
    centroids: np.ndarray | None,
) -> QueryPoints:
    """The points of one indexed image that lie in the box which matched the query.

    `frames` (P, 9) as packed; `box` in pixels of `size_px`. A point is scored by the one word it is stored
    under; with `centroids`, the words of points, it gets more for matching: the nearest of what its word and
    code say about its descriptor. That takes time and is for hits that verify.
    """
    unpacked = unpack_frames(frames, *size_px).frames
    low, high = np.array(box[:2], np.float64), np.array(box[2:], np.float64)
    margin = BOX_MARGIN * (high - low) + _MARGIN_PX
    at = unpacked[:, :, 2]
    inside = ((at >= low - margin) & (at <= high + margin)).all(axis=1)
    words, codes = points.words[inside], points.codes[inside]
    hit = QueryPoints(words[:, None], codes[:, None], unpacked[inside], size_px, num_scored=1)
    return hit if centroids is None else widen_points(hit, centroids)


def widen_points(hit: QueryPoints, centroids: np.ndarray) -> QueryPoints:
    """Points of one stored word each, with the words that matching takes besides."""
    own, own_codes = hit.words[:, 0], hit.codes[:, 0]
    restored = restore_descriptors(own, own_codes, centroids)
    number = min(MATCHED_ASSIGNMENTS, len(centroids))
    words, codes = encode_query(restored, centroids, num_assignments=number)
    order = _put_first(words, own)
    words = np.take_along_axis(words, order, axis=1)
    codes = np.take_along_axis(codes, order[..., None], axis=1)
    words[:, 0], codes[:, 0] = own, own_codes
    return replace(hit, words=words, codes=codes)


def restore_descriptors(words: np.ndarray, codes: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """(N, D) float32: the word plus the code's signs, as far out as a residual of that word is on average.

    The descriptors of a channel have unit length and a word is the mean of its own, so what a word's length
    misses is the length of its residuals.
    """
    dim = centroids.shape[1]
    signs = np.unpackbits(codes, axis=1, count=dim).astype(np.float32) * 2 - 1
    num_channels = max(1, codes.shape[1] // count_code_bytes(1))
    rest = np.maximum(num_channels - np.square(centroids).sum(axis=1), 0)
    lengths = (_SIGN_SHARE * np.sqrt(rest / dim)).astype(np.float32)
    restored: np.ndarray = centroids[words] + lengths[words][:, None] * signs
    return restored


def merge_points(query: QueryPoints, hits: Sequence[QueryPoints]) -> QueryPoints:
    """One query with the words of all, for scores only: it has no frames.

    Codes under one word become one by the majority of each bit, as within an image; the query's come first.
    """
    parts = [query.scored, *(hit.scored for hit in hits)]
    words = np.concatenate([part.words for part in parts])
    codes = np.concatenate([part.codes for part in parts])
    merged = aggregate_points(PointSets(words, codes, np.array([0, len(words)])))
    frames = np.zeros((len(merged.words), 2, 3), np.float32)
    return QueryPoints(merged.words[:, None], merged.codes[:, None], frames, query.size_px, num_scored=1)


def average_vectors(query: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """(D,) float32 of unit length: the mean of the query's vector (D,) and those of its hits (H, D)."""
    return _unit(np.concatenate([query[None], hits]).mean(axis=0, dtype=np.float64))


def separate_vectors(query: np.ndarray, hits: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(D,) float32 of unit length: the linear classifier of query and hits (H, D) against others (M, D).

    Ridge regression of 1 and 0, both sides with the same weight; in closed form, because a vector is much
    longer than there are images. Without others, the mean.
    """
    if len(others) == 0:
        return average_vectors(query, hits)
    rows = np.concatenate([query[None], hits, others]).astype(np.float64)
    num_positive = 1 + len(hits)
    sizes = np.repeat([num_positive, len(others)], [num_positive, len(others)])
    gram = rows @ rows.T
    targets = (np.arange(len(rows)) < num_positive).astype(np.float64)
    weights = np.linalg.solve(gram + _RIDGE * np.diag(sizes / len(rows)), targets)
    return _unit(weights @ rows)


def chain_inliers(link: int, evidence: Sequence[Evidence]) -> np.ndarray:
    """(C,) int64: inliers of a chain from the query over a hit, `link` of them, to candidates."""
    return np.minimum(link, np.array([one.inliers for one in evidence], np.int64))


def _put_first(words: np.ndarray, own: np.ndarray) -> np.ndarray:
    """An order (N, m) of each row's words, its own first; where that is missing, the last one's place."""
    is_own = words == own[:, None]
    is_own[:, -1] |= ~is_own.any(axis=1)
    return np.argsort(~is_own, axis=1, kind="stable")


def _unit(vector: np.ndarray) -> np.ndarray:
    unit: np.ndarray = (vector / max(float(np.linalg.norm(vector)), 1e-20)).astype(np.float32)
    return unit
