"""`ckn-scale evaluate images --verify --expand`: a row for each stage and kind of codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from small_sets import TINY, photo, save

from ckn_scale.config import load_settings
from ckn_scale.core.evidence import QueryPoints
from ckn_scale.core.selective_matching import PointSets
from ckn_scale.errors import InputError
from ckn_scale.evaluate.answers import rank_images
from ckn_scale.evaluate.evidence_table import ArrayCandidates, ImagePoints, parse_points, rank_stages
from ckn_scale.evaluate.image_sets import Query
from ckn_scale.evaluate.image_table import score_query
from ckn_scale.evaluate.regions import ImageFile
from ckn_scale.evaluate.through_index import place_scores

OPTIONS = ["--protocol", "groups", "--words", "4", "--regions", "8", "--intra", "yes", "--seeds", "2"]


def test_every_stage_has_a_row_for_each_kind_of_codes(groups, run, cache, tmp_path):
    out = tmp_path / "out.json"
    more = ["--expand", "--points", "ckn,rootsift@6.5", "--json", out]
    result = run("evaluate", "images", groups, *TINY, *cache, *OPTIONS, *more)
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    rows = {(one["points"], one["stage"]): one for one in content["results"]}
    stages = ("vlad", "selective", "verified", "expanded")
    assert set(rows) == {(codes, stage) for codes in ("ckn", "rootsift@6.5") for stage in stages}
    for (_, stage), one in rows.items():
        assert one["descriptor"] == "ckn"
        assert len(one["seeds"]) == 2
        assert one["map"] == pytest.approx(np.mean(one["seeds"]))
        assert 0.5 < one["map"] <= 1
        assert (one["bytes"] > rows["ckn", "vlad"]["bytes"]) == (stage != "vlad")
    assert rows["ckn", "vlad"]["map"] == rows["rootsift@6.5", "vlad"]["map"]  # the vectors are the same
    assert rows["ckn", "verified"]["bytes"] == rows["rootsift@6.5", "verified"]["bytes"]
    assert rows["ckn", "verified"]["map"] == 1  # turned copies are easy for geometry
    assert "expanded" in result.output
    again = run("evaluate", "images", groups, *TINY, *cache, *OPTIONS, "--verify", "--points", "ckn")
    assert again.exit_code == 0, again.output
    assert "expanded" not in again.output
    told = run("evaluate", "images", groups, *TINY, *cache, *OPTIONS, "--discriminative", "--points", "ckn")
    assert told.exit_code == 0, told.output
    assert "expanded" in told.output


def test_a_set_is_asked_of_a_published_index_with_distractors(groups, run, cache, tmp_path):
    out, others = tmp_path / "out.json", tmp_path / "others"
    save(others / "camera.png", photo("camera", 200))
    more = ["--through-index", "--workers", "1", "--json", out, "--distractors", others]
    more += ["--descriptors", "rootsift"]
    result = run("evaluate", "images", groups, *TINY, *cache, "--protocol", "groups", *more)
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    assert content["through_index"]
    assert content["images"] == 7
    assert {one["descriptor"] for one in content["results"]} == {"rootsift"}
    rows = {one["stage"]: one for one in content["results"]}
    assert list(rows) == ["vlad", "selective", "verified", "expanded"]
    assert rows["selective"]["map"] >= rows["vlad"]["map"]
    assert rows["verified"]["map"] == 1
    assert 0 < rows["vlad"]["map"] <= 1  # so few images teach RootSIFT no words worth the name


def test_what_an_index_holds_beside_the_set_comes_before_what_is_found_later():
    query = Query(ImageFile(Path("q.jpg")), relevant=frozenset([1]), ignored=frozenset([0]))
    placed = place_scores(["q.jpg", "other.jpg", "a.jpg"], {"q.jpg": 0, "a.jpg": 1, "b.jpg": 2})
    assert score_query(query, placed, "holidays") == 0.25  # second, by the trapezoid
    assert rank_images(query, placed).tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--verify", "--points", "orb"], "unknown descriptor 'orb'"),
        (["--verify", "--points", "rootsift@0"], "the region must be a number from 0.5 to 100"),
        (["--verify", "--points", ","], "--points names no descriptor"),
        (["--verify", "--regions", "6,8"], "--verify takes one region"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(groups, run, cache, options, message):
    result = run("evaluate", "images", groups, *TINY, *cache, "--protocol", "groups", *options)
    assert result.exit_code == 2
    assert message in str(result.exception)


def test_points_are_requested_by_descriptor_and_region():
    settings = load_settings("compact")
    own, sift = parse_points("ckn, rootsift@6.5", settings)
    assert [member.label for member in own.members] == [
        f"points-ckn-{name}" for name in settings.points.channels
    ]
    assert own.members[0].channel.projection.dim == settings.points.dim
    assert (own.region, sift.region, sift.members[0].label) == (None, 6.5, "points-rootsift")
    with pytest.raises(InputError, match="unknown descriptor"):
        parse_points("ckn-blue", settings)


def test_stages_rank_by_vector_then_words_then_geometry():
    """Three images: the first has the query's vector, the second its words, the third nothing."""
    frames = np.zeros((2, 2, 3), np.float32)
    codes = np.arange(32, dtype=np.uint8).reshape(2, 16)
    query = QueryPoints(np.array([[1], [2]], np.uint16), codes[:, None], frames, (10, 10), num_scored=1)

    def image(words: list[int]) -> ImagePoints:
        points = PointSets(np.array(words, np.uint16), codes[: len(words)], np.array([0, len(words)]))
        return ImagePoints(points, np.zeros((len(words), 9), np.uint8), (10, 10), query)

    vectors = np.array([[1.0, 0], [0.2, 0.1], [0.1, 0.5]], np.float32)
    candidates = ArrayCandidates(vectors, [image([5]), image([1, 2]), image([])], np.zeros((9, 128)))
    found = {
        stage: order.tolist()
        for stage, order, _ in rank_stages(candidates, np.array([1.0, 0]), query, expand=True)
    }
    assert found["vlad"] == [0, 1, 2]
    assert found["selective"] == found["verified"] == found["expanded"] == [1, 0, 2]
