"""The order of an answer over made-up candidates whose evidence is written down by hand."""

from __future__ import annotations

import numpy as np

from ckn_scale.core.evidence import Evidence, QueryPoints
from ckn_scale.core.ranking import expand_ranking, rank_candidates

QUERY = QueryPoints(
    np.zeros((1, 1), np.uint16), np.zeros((1, 1, 16), np.uint8), np.zeros((1, 2, 3), np.float32), (10, 10)
)
BOX = (0.0, 0.0, 1.0, 1.0)


class Shelf:
    """Images 10, 11, …: vectors, selective scores, and inliers by who asks."""

    def __init__(self, vectors: np.ndarray, selective: list[float], inliers: dict[int, list[int]]) -> None:
        self.vectors, self.selective, self.inliers = vectors, np.array(selective), inliers
        self.verified: list[tuple[int, list[int]]] = []

    def find(self, vector, k):
        similarity = self.vectors @ vector
        order = np.argsort(-similarity, kind="stable")[:k]
        return order + 10, similarity[order]

    def compare(self, vector, image_ids):
        return self.vectors[image_ids - 10] @ vector

    def score(self, query, image_ids):
        return self.selective[image_ids - 10]

    def verify(self, query, image_ids):
        self.verified.append((query.size_px[0], image_ids.tolist()))
        found = self.inliers[query.size_px[0]]
        return [Evidence(inliers=found[one - 10], box=BOX) for one in image_ids.tolist()]

    def load_vectors(self, image_ids):
        self.loaded = image_ids.tolist()
        return self.vectors[image_ids - 10]

    def load_hits(self, image_ids, evidence):
        assert [one.box for one in evidence] == [BOX] * len(image_ids)
        hits = [QueryPoints(QUERY.words, QUERY.codes, QUERY.frames, (one, one)) for one in image_ids.tolist()]
        return self.vectors[image_ids - 10], hits


def test_only_the_head_of_vector_and_words_together_is_verified():
    shelf = Shelf(np.diag([0.5, 0.4, 0.3, 0.2]), [0.0, 0.0, 0.02, 0.0], {10: [0, 0, 20, 99]})
    found = rank_candidates(shelf, np.ones(4), QUERY, shortlist=3, head=2)
    assert shelf.verified == [(10, [12, 10])]  # 12 by its words, 10 by its vector; 13 is not on the list
    assert found.image_ids[found.order()].tolist() == [12, 10, 11]
    assert found.inliers.tolist() == [0, 0, 20]


def test_equal_strengths_go_by_id():
    shelf = Shelf(np.full((3, 1), 0.5), [0.1] * 3, {10: [0] * 3})
    found = rank_candidates(shelf, np.ones(1), QUERY)
    assert found.image_ids[found.order()].tolist() == [10, 11, 12]


def test_a_hit_brings_in_what_the_query_did_not_see():
    vectors = np.array([[0.9, 0.1], [0.0, 1.0], [0.3, 0.0]])
    shelf = Shelf(vectors, [0.01, 0.0, 0.0], {10: [30, 0, 0]})
    vector = np.array([1.0, 0.0])
    first = rank_candidates(shelf, vector, QUERY, shortlist=2, head=1)
    assert first.image_ids.tolist() == [10, 12]
    shelf.inliers[10] = [99, 15, 0]  # now 10 is also who asks: the hit and the query share a number
    found = expand_ranking(shelf, vector, QUERY, first, shortlist=3, head=3)
    assert sorted(found.image_ids.tolist()) == [10, 11, 12]
    assert found.image_ids[found.order()].tolist()[:2] == [10, 11]
    asked_again = [one for _, ids in shelf.verified[1:] for one in ids]
    assert asked_again.count(10) == 0  # neither verified twice nor by itself


def test_a_chain_counts_as_its_weaker_link():
    shelf = Shelf(np.eye(3), [0.01, 0.01, 0.01], {10: [0, 25, 0], 11: [0, 0, 40]})
    first = rank_candidates(shelf, np.ones(3), QUERY)
    found = expand_ranking(shelf, np.ones(3), QUERY, first)
    assert dict(zip(found.image_ids.tolist(), found.inliers.tolist(), strict=True)) == {10: 0, 11: 25, 12: 25}


def test_a_discriminative_expansion_is_told_from_the_weakest():
    vectors = np.array([[0.8, 0.6, 0.0], [0.0, 1.0, 0.0], [0.0, 0.9, 0.1], [0.7, 0.0, 0.7]])
    vector = np.array([1.0, 0.0, 0.0])
    mean, told = (
        expand_ranking(shelf, vector, QUERY, rank_candidates(shelf, vector, QUERY), discriminative=choice)
        for choice, shelf in (
            (choice, Shelf(vectors, [0.01, 0.0, 0.0, 0.0], {10: [30, 0, 0, 0]})) for choice in (False, True)
        )
    )
    by_id = [dict(zip(one.image_ids.tolist(), one.similarity.tolist(), strict=True)) for one in (mean, told)]
    assert by_id[1][11] < by_id[0][11]  # what the hit shares with the others counts less
    assert by_id[1][10] > by_id[1][11]


def test_without_a_verified_hit_nothing_is_expanded():
    shelf = Shelf(np.eye(2), [0.0, 0.0], {10: [3, 4]})
    first = rank_candidates(shelf, np.ones(2), QUERY)
    assert expand_ranking(shelf, np.ones(2), QUERY, first) is first


def test_nothing_found_is_an_empty_ranking():
    shelf = Shelf(np.zeros((0, 2)), [], {10: []})
    found = rank_candidates(shelf, np.ones(2), QUERY)
    assert len(found.order()) == len(found.inliers) == 0
    assert shelf.verified == []
