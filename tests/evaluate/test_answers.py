"""Recall by depth and examples, on rankings worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckn_scale.evaluate.answers import measure_recall, rank_images, summarise_answers
from ckn_scale.evaluate.image_sets import ImageSet, Query
from ckn_scale.evaluate.regions import ImageFile

DATABASE = tuple(ImageFile(Path(f"/set/{name}.jpg")) for name in "abcdef")
QUERIES = (
    Query(DATABASE[0], frozenset([1, 2]), frozenset([0])),
    Query(DATABASE[3], frozenset([4]), frozenset([3])),
)
SIMILARITIES = np.array([[1.0, 0.9, 0.1, 0.5, 0.5, 0.2], [0.0, 0.1, 0.2, 1.0, 0.9, 0.3]])


def test_rank_images_leaves_out_what_does_not_count_and_breaks_ties_by_position():
    assert rank_images(QUERIES[0], SIMILARITIES[0]).tolist() == [1, 3, 4, 5, 2]


def test_recall_grows_with_depth():
    rankings = [rank_images(*pair) for pair in zip(QUERIES, SIMILARITIES, strict=True)]
    shares = [measure_recall(QUERIES, rankings, depth) for depth in (1, 4, 5)]
    assert shares == [pytest.approx(0.75), pytest.approx(0.75), 1.0]


def test_examples_are_worst_first_with_what_they_found():
    said = summarise_answers(ImageSet("groups", DATABASE, QUERIES), SIMILARITIES, [0.6, 1.0])
    assert list(said["recall_at"]) == ["1", "2", "5"]
    assert [one["score"] for one in said["examples"]] == [0.6, 1.0]
    first = said["examples"][0]
    assert (first["query"], first["relevant"]) == ("/set/a.jpg", 2)
    assert [(Path(one["image"]).stem, one["right"]) for one in first["answer"]] == [
        ("b", True),
        ("d", False),
        ("e", False),
        ("f", False),
        ("c", True),
    ]
