"""Selective matching of points by words and binary codes, ASMK*-style (Tolias, Avrithis, Jégou 2013).

The points of an image that share a word become one code; two images are compared word by word, and a
similarity counts by a power of itself, so that a few good words outweigh many poor ones. Points of many
images lie in flat arrays with offsets; the loops over them are in `point_loops.py`. Tentative matches, which
`geometry.py` verifies, are found here too.

    aggregate_points     words and codes of points  →  one code per image and word
    score_points         a query's, candidates', sorted by word  →  a score of each candidate
    match_points         a query's points, candidates'  →  tentative matches, mutual nearest within words
    match_mutually       distances  →  rows and columns that are each other's nearest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckn_scale.core.packed_points import pack_codes
from ckn_scale.core.specs import MAX_WORDS

SELECTIVITY = 3.0  # the power of a similarity
MIN_SIMILARITY = 0.1  # of two codes, from −1 to 1: below it a word counts nothing
NUM_ASSIGNMENTS = 3  # words of a query's point
MAX_DIFFERENCE = 0.4  # share of bits in which tentative matches differ


@dataclass(frozen=True)
class PointSets:
    """Points of C images one after the other: those of image c are offsets[c] … offsets[c + 1]."""

    words: np.ndarray  # (P,) uint16
    codes: np.ndarray  # (P, B) uint8, 16 bytes for each channel of the points
    offsets: np.ndarray  # (C + 1,) int64

    def __post_init__(self) -> None:
        if self.words.ndim != 1 or self.words.dtype != np.uint16:
            raise ValueError(f"words must be (P,) uint16, got {self.words.shape} {self.words.dtype}")
        if self.codes.shape[:-1] != self.words.shape or self.codes.dtype != np.uint8:
            expected = f"({len(self.words)}, B) uint8"
            raise ValueError(f"codes must be {expected}, got {self.codes.shape} {self.codes.dtype}")
        offsets = self.offsets
        if offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(self.words):
            raise ValueError(f"offsets must go from 0 to the {len(self.words)} points, got {offsets}")
        if (np.diff(offsets) < 0).any():
            raise ValueError(f"offsets must not decrease, got {offsets}")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def image_of(self) -> np.ndarray:
        """(P,) int64: the image of each point."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))


def join_points(sets: Sequence[PointSets]) -> PointSets:
    """The images of some sets, at least one, as those of one."""
    starts = np.cumsum([0, *(len(one.words) for one in sets)])
    offsets = [one.offsets[1:] + start for one, start in zip(sets, starts[:-1], strict=True)]
    return PointSets(
        np.concatenate([one.words for one in sets]),
        np.concatenate([one.codes for one in sets]),
        np.concatenate([[0], *offsets]),
    )


@dataclass(frozen=True)
class TentativeMatches:
    """T pairs of a query's point and a candidate's, by candidate, then by the query's point."""

    query: np.ndarray  # (T,) int64, which of the query's points
    candidate: np.ndarray  # (T,) int64, which of all candidates' points
    distances: np.ndarray  # (T,) int64, bits in which their codes differ
    offsets: np.ndarray  # (C + 1,) int64: those of candidate c are offsets[c] … offsets[c + 1]


def encode_query(
    descriptors: np.ndarray, centroids: np.ndarray, *, num_assignments: int = NUM_ASSIGNMENTS
) -> tuple[np.ndarray, np.ndarray]:
    """The nearest words (N, m) uint16 of descriptors (N, D), nearest first, and a code (N, m, B) for each.

    A candidate's point has one word; a query's may lie near a border, where the other one chose another.
    """
    if descriptors.ndim != 2 or descriptors.shape[1:] != centroids.shape[1:]:
        raise ValueError(f"descriptors must be (N, {centroids.shape[1]}), got {descriptors.shape}")
    if not 1 <= num_assignments <= len(centroids) <= MAX_WORDS:
        raise ValueError(
            f"num_assignments must lie between 1 and the {len(centroids)} words "
            f"(at most {MAX_WORDS}), got {num_assignments}"
        )
    import torch  # of those who match, only who encodes has it

    centres = torch.from_numpy(np.ascontiguousarray(centroids, np.float32))
    rows = torch.from_numpy(np.ascontiguousarray(descriptors, np.float32))
    nearness = rows @ centres.T - centres.square().sum(dim=1) / 2
    words = torch.topk(nearness, num_assignments, dim=1).indices.numpy()
    repeated = np.repeat(descriptors, num_assignments, axis=0)
    codes = pack_codes(repeated, words.ravel(), centroids)
    return words.astype(np.uint16), codes.reshape(*words.shape, codes.shape[1])


def make_query(words: np.ndarray, codes: np.ndarray) -> PointSets:
    """All assignments of one image, words (N, m) and codes (N, m, B), aggregated by word."""
    flat = PointSets(words.ravel(), codes.reshape(words.size, codes.shape[-1]), np.array([0, words.size]))
    return aggregate_points(flat)


def aggregate_points(points: PointSets) -> PointSets:
    """One code for each image and word, by the majority of each bit; words ascend within an image.

    Where two signs are as frequent, the first point's decides: points come strongest first.
    """
    if len(points.words) == 0:
        return points
    from ckn_scale.core.point_loops import vote_codes

    keys = points.image_of * MAX_WORDS + points.words
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    first = order[starts]
    codes = vote_codes(_as_words(points.codes[order]), starts).view(np.uint8)
    offsets = np.searchsorted(keys[first], np.arange(len(points) + 1) * MAX_WORDS)
    return PointSets(points.words[first], codes, offsets)


def score_points(
    query: PointSets,
    candidates: PointSets,
    *,
    selectivity: float = SELECTIVITY,
    min_similarity: float = MIN_SIMILARITY,
) -> np.ndarray:
    """(C,) float64 from 0 to 1, larger is better: Σ σ(u) over shared words / √(words of both).

    u = 1 − 2 · distance / bits is the similarity of two codes, σ(u) = u^selectivity above `min_similarity`
    and else 0. The query is one image, aggregated. The candidates' points are sorted by word within each
    image; of theirs only the words that the query has are aggregated, which is much faster than all of them.
    An image without points has score 0.
    """
    _check_is_query(query)
    from ckn_scale.core.point_loops import score_images

    position = np.full(MAX_WORDS, -1, np.int32)
    position[query.words] = np.arange(len(query.words))
    weights = _weigh_distances(8 * query.codes.shape[1], selectivity, min_similarity)
    totals, num_words = score_images(
        _as_words(query.codes),
        position,
        _freeze(candidates.words),
        _as_words(candidates.codes),
        _freeze(candidates.offsets.astype(np.int64)),
        weights,
    )
    if (num_words < 0).any():
        raise ValueError("the candidates' points must be sorted by word")
    scores: np.ndarray = totals / np.sqrt(np.maximum(num_words * len(query.words), 1))
    return scores


def _check_is_query(query: PointSets) -> None:
    if len(query) != 1:
        raise ValueError(f"a query is one image, got {len(query)}")
    if (query.words[1:] <= query.words[:-1]).any():
        raise ValueError("the query must be aggregated: each word once, ascending")


def _weigh_distances(num_bits: int, selectivity: float, min_similarity: float) -> np.ndarray:
    """(num_bits + 1,) what a pair of codes counts, by the bits in which they differ."""
    similarities = 1 - np.arange(num_bits + 1) * (2 / num_bits)
    counted: np.ndarray = np.where(
        similarities > min_similarity, np.maximum(similarities, 0) ** selectivity, 0.0
    )
    return counted


def match_points(
    words: np.ndarray, codes: np.ndarray, candidates: PointSets, *, max_difference: float = MAX_DIFFERENCE
) -> TentativeMatches:
    """Pairs of a query's and a candidate's point that are each other's nearest among those sharing a word.

    `words` (N, m) and `codes` (N, m, B) as of `encode_query`; the candidates' points are not aggregated.
    Codes differ in at most this share of their bits; of equal distances the first point's counts.
    """
    if words.ndim != 2 or codes.shape[:-1] != words.shape:
        raise ValueError(f"words must be (N, m) and codes (N, m, B), got {words.shape} and {codes.shape}")
    from ckn_scale.core.point_loops import match_images

    num_query, num_assignments = words.shape
    by_word = np.argsort(words.ravel(), kind="stable")
    counts = np.bincount(words.ravel(), minlength=MAX_WORDS)
    query, point, distances, offsets = match_images(
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        by_word // num_assignments,
        _as_words(codes.reshape(words.size, codes.shape[-1])[by_word]),
        num_query,
        _freeze(candidates.words),
        _as_words(candidates.codes),
        _freeze(candidates.offsets.astype(np.int64)),
        int(max_difference * 8 * codes.shape[-1] + 1e-9),
    )
    return TentativeMatches(query, point, distances, offsets)


def match_mutually(distances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of (N, M) distances that are each other's nearest, by row; the first of equals."""
    if distances.ndim != 2:
        raise ValueError(f"distances must be (N, M), got {distances.shape}")
    if distances.size == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    nearest = distances.argmin(axis=1)
    rows = np.flatnonzero(distances.argmin(axis=0)[nearest] == np.arange(len(distances)))
    return rows, nearest[rows]


def _as_words(codes: np.ndarray) -> np.ndarray:
    """(N, B) uint8, B a multiple of 8, as (N, B / 8) uint64."""
    return _freeze(np.ascontiguousarray(codes).view(np.uint64))


def _freeze(array: np.ndarray) -> np.ndarray:
    """A view that cannot be written, as arrays of mapped files cannot: loops are compiled for one kind."""
    frozen: np.ndarray = np.ascontiguousarray(array).view()
    frozen.flags.writeable = False
    return frozen
