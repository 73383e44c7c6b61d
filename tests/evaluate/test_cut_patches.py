"""FPR@95 on pairs and mAP on views, in the layouts users have."""

from __future__ import annotations

import json
from functools import partial

import cv2
import numpy as np
import pytest
from small_sets import TINY, photo, save

from ckn_scale.errors import InputError
from ckn_scale.evaluate.cut_patches import measure_rows, score_views
from ckn_scale.evaluate.patch_sets import PatchViews, read_pairs, read_views


def cut(image, number, shift=0):
    x, y = 20 * (number % 4) + shift, 30 * (number // 4) + shift
    return cv2.resize(image[y : y + 60, x : x + 60], (51, 51))


@pytest.fixture
def views(tmp_path):
    image = photo("astronaut")
    for number in range(6):
        for view in range(3):
            save(tmp_path / f"point{number}" / f"{view}.png", cut(image, number, view))
    return tmp_path


def test_read_views(views):
    found = read_views(views)
    assert found.patches.shape == (18, 51, 51, 3)
    assert found.is_query.sum() == 6
    assert found.points.tolist() == [number for number in range(6) for _ in range(3)]


def test_score_views_by_hand():
    points, is_query = np.array([0, 0, 1, 1]), np.array([True, False, True, False])
    found = PatchViews(np.zeros((4, 8, 8, 3), np.uint8), points, is_query)
    perfect = np.array([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    assert score_views(found, partial(measure_rows, perfect)) == {"map": 1.0, "map_by_steps": 1.0}
    wrong = np.array([[1.0, 0], [0, 1], [0, 1], [1, 0]])
    assert score_views(found, partial(measure_rows, wrong))["map_by_steps"] == 0.5


def test_rome_protocol(views, run, cache, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "out.json"
    options = ["--protocol", "rome", "--descriptors", "sift,ckn-grad", "--smoothing", "0,1", "--json", out]
    result = run(
        "evaluate", "patches", views, *TINY, *cache, *options, "--set", "channels.0.projection.dim=8"
    )
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    assert content["protocol"] == "rome"
    assert all(0 < one["map"] <= 1 for one in content["results"])


def test_networks_that_compare_patches_are_trained_and_measured(views, run, cache, tmp_path):
    weights, name = tmp_path / "2ch.safetensors", "deepcompare-2ch"
    trained = run("train-network", name, views, weights, "--steps", "2", "--batch", "4", "--quiet")
    assert trained.exit_code == 0, trained.output
    assert "after 2 steps, loss" in trained.output
    options = ["--descriptors", f"sift,{name}", "--weights", f"{name}={weights}", "--smoothing", "0"]
    result = run("evaluate", "patches", views, *TINY, *cache, *options, "--protocol", "rome")
    assert result.exit_code == 0, result.output
    assert f"{name}  pairs" in result.output
    refused = run("evaluate", "images", views, *TINY, *options, "--protocol", "groups")
    assert "compares patches and describes none" in str(refused.exception)


def test_fpr95_on_named_pairs(views, run, cache):
    rows = [
        f"point{one}/0.png point{other}/1.png {int(one == other)}" for one in range(6) for other in range(6)
    ]
    (views / "pairs.txt").write_text("\n".join(rows))
    options = ["--protocol", "fpr95", "--pairs", views / "pairs.txt", "--descriptors", "rootsift"]
    result = run("evaluate", "patches", views, *TINY, *cache, *options)
    assert result.exit_code == 0, result.output
    assert "fpr95" in result.output


def test_read_pairs_in_phototour_layout(tmp_path):
    mosaic = np.zeros((1024, 1024), np.uint8)
    mosaic[:64, 64:128] = 50  # patch 1
    mosaic[64:128, :64] = 90  # patch 16
    cv2.imwrite(str(tmp_path / "patches0000.bmp"), mosaic)
    (tmp_path / "m.txt").write_text("1 7 0 16 7 0 0\n1 7 0 2 8 0 0\n")
    pairs = read_pairs(tmp_path, tmp_path / "m.txt")
    assert pairs.matches.tolist() == [True, False]
    assert pairs.patches[pairs.first[0]].mean() == 50
    assert pairs.patches[pairs.second[0]].mean() == 90
    assert pairs.patches[pairs.second[1]].mean() == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "is empty"), ("a.png b.png 2\n", "row 1"), ("a.png b.png 1\n", "a.png is missing")],
)
def test_bad_pairs_are_refused(tmp_path, text, words):
    (tmp_path / "pairs.txt").write_text(text)
    with pytest.raises(InputError, match=words):
        read_pairs(tmp_path, tmp_path / "pairs.txt")


def test_views_without_company_are_refused(tmp_path):
    save(tmp_path / "point0" / "0.png", np.zeros((51, 51, 3), np.uint8))
    with pytest.raises(InputError, match="two folders or more"):
        read_views(tmp_path)
