"""One way to answer a query: shortlist by vectors, scores by words, geometry on the head, expansion.

`Candidates` is whatever holds the images: arrays in memory, or the shards of a published index. What is asked
of it depends on the query alone, and ties go by id, so the same images give the same answer however they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ckn_scale.core.evidence import HEAD, SHORTLIST, Evidence, QueryPoints, choose_head, join_evidence
from ckn_scale.core.expansion import (
    CHAINED_HEAD,
    EXPANDED_HEAD,
    NUM_OTHERS,
    NUM_VERIFIERS,
    OWN_INLIERS,
    chain_inliers,
    choose_hits,
    merge_points,
    separate_vectors,
)


class Candidates(Protocol):
    """Indexed images by id, and what a query can ask of them."""

    def find(self, vector: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids (K,) of at most k images and their similarities (K,) to a vector (D,)."""

    def compare(self, vector: np.ndarray, image_ids: np.ndarray) -> np.ndarray:
        """Similarities (N,) of these images to a vector (D,)."""

    def score(self, query: QueryPoints, image_ids: np.ndarray) -> np.ndarray:
        """Selective scores (N,)."""

    def verify(self, query: QueryPoints, image_ids: np.ndarray) -> list[Evidence]:
        """Boxes and transforms in pixels of working size."""

    def load_hits(
        self, image_ids: np.ndarray, evidence: Sequence[Evidence]
    ) -> tuple[np.ndarray, list[QueryPoints]]:
        """Vectors (H, D) of these images, and their points in the box of the evidence (`make_hit_points`).

        The first `NUM_VERIFIERS` have the words that matching takes.
        """

    def load_vectors(self, image_ids: np.ndarray) -> np.ndarray:
        """Vectors (N, D) of these images, as decoded from what is stored."""


@dataclass(frozen=True)
class Ranking:
    """What speaks for each image of a shortlist, by position; `evidence` is that of its head, by id."""

    image_ids: np.ndarray  # (K,)
    similarity: np.ndarray  # (K,)
    selective: np.ndarray  # (K,)
    evidence: dict[int, Evidence]
    chained: dict[int, int]  # inliers over a hit, by id

    @property
    def inliers(self) -> np.ndarray:
        """(K,) int64, of the query itself or over a hit, whichever are more."""
        return np.array(
            [
                max(self.evidence[one].inliers if one in self.evidence else 0, self.chained.get(one, 0))
                for one in self.image_ids.tolist()
            ],
            np.int64,
        )

    @property
    def strength(self) -> np.ndarray:
        return join_evidence(self.similarity, self.selective, self.inliers)

    def order(self) -> np.ndarray:
        """Positions, strongest first, ties by id."""
        return np.lexsort((self.image_ids, -self.strength))


def rank_candidates(
    candidates: Candidates,
    vector: np.ndarray,
    query: QueryPoints,
    *,
    shortlist: int = SHORTLIST,
    head: int = HEAD,
) -> Ranking:
    """Shortlist by the vector, scored by words; the head of both joined is verified."""
    image_ids, similarity = candidates.find(vector, shortlist)
    found = Ranking(image_ids, similarity, candidates.score(query, image_ids), {}, {})
    return _verify_head(candidates, query, found, head)


def expand_ranking(
    candidates: Candidates,
    vector: np.ndarray,
    query: QueryPoints,
    first: Ranking,
    *,
    shortlist: int = SHORTLIST,
    head: int = EXPANDED_HEAD,
    discriminative: bool = False,
) -> Ranking:
    """The answer once more, asked by the query and its verified hits together; without a hit, `first`.

    `discriminative`: by a vector that tells them from the weakest of the shortlist, not by their mean.
    """
    own = np.array(
        [first.evidence[one].inliers if one in first.evidence else 0 for one in first.image_ids.tolist()]
    )
    chosen = first.image_ids[choose_hits(first.image_ids, own)]
    if len(chosen) == 0:
        return first
    links = [first.evidence[one] for one in chosen.tolist()]
    vectors, hits = candidates.load_hits(chosen, links)
    weakest = first.image_ids[first.order()[::-1][:NUM_OTHERS]]
    others = candidates.load_vectors(weakest[~np.isin(weakest, chosen)]) if discriminative else vectors[:0]
    wider = separate_vectors(vector, vectors, others)
    found_ids, _ = candidates.find(wider, shortlist)
    image_ids = np.union1d(first.image_ids, found_ids)  # what the query found itself is not lost
    similarity = candidates.compare(wider, image_ids)
    selective = candidates.score(merge_points(query, hits), image_ids)
    found = _verify_head(
        candidates, query, Ranking(image_ids, similarity, selective, first.evidence, {}), head
    )
    chained = _chain(candidates, found, list(zip(chosen.tolist(), links, hits, strict=True))[:NUM_VERIFIERS])
    return replace(found, chained=chained)


def _verify_head(candidates: Candidates, query: QueryPoints, found: Ranking, head: int) -> Ranking:
    """The same with evidence for the first `head` by vector and words; none is verified twice."""
    chosen = found.image_ids[choose_head(found.image_ids, found.similarity, found.selective, head)]
    new = chosen[[one not in found.evidence for one in chosen.tolist()]] if len(chosen) else chosen
    evidence = dict(zip(new.tolist(), candidates.verify(query, new), strict=True)) if len(new) else {}
    return replace(found, evidence={**found.evidence, **evidence})


def _chain(
    candidates: Candidates, found: Ranking, hits: Sequence[tuple[int, Evidence, QueryPoints]]
) -> dict[int, int]:
    """Inliers over hits of the strongest candidates that the query has not verified itself, by id."""
    order = found.order()
    head = found.image_ids[order[found.inliers[order] < OWN_INLIERS][:CHAINED_HEAD]]
    chained: dict[int, int] = {}
    for image_id, link, points in hits:
        others = head[head != image_id]
        inliers = chain_inliers(link.inliers, candidates.verify(points, others))
        for one, count in zip(others.tolist(), inliers.tolist(), strict=True):
            chained[one] = max(count, chained.get(one, 0))
    return chained
