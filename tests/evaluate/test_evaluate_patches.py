"""`ckn-scale evaluate patches` on scenes of known truth, as a user calls it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from small_sets import HOMOGRAPHY, TINY, photo, save

from ckn_scale.evaluate.scenes import read_scenes


def test_read_scenes_reads_both_layouts(scenes):
    found = read_scenes(scenes)
    assert [scene.name for scene in found] == ["people", "v_people"]
    for scene in found:
        assert sorted(scene.images) == [1, 2]
        np.testing.assert_allclose(scene.homographies[2], HOMOGRAPHY)


def test_patches_table_and_json(scenes, run, cache, tmp_path):
    out = tmp_path / "out.json"
    options = [
        "--descriptors",
        "sift,rootsift,ckn-grad,ckn-grad+rootsift",
        "--regions",
        "5.2,10",
        "--json",
        out,
    ]
    result = run("evaluate", "patches", scenes, *TINY, *cache, "--smoothing", "1", *options)
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    assert content["protocol"] == "mikolajczyk"
    rows = {one["descriptor"]: one for one in content["results"]}
    assert list(rows) == ["sift", "rootsift", "ckn-grad", "ckn-grad+rootsift"]
    assert rows["sift"]["dim"] == 128
    assert rows["ckn-grad+rootsift"]["dim"] == rows["ckn-grad"]["dim"] + 128
    for one in rows.values():
        assert 0.3 < one["map"] <= 1.0  # a mild warp: every descriptor works, none is at chance
        assert one["map"] == max(cell["map"] for cell in one["grid"])
        assert one["map"] == pytest.approx(np.mean(list(one["per_scene"].values())))
        assert len(one["grid"]) == len(one["pairs"]) == 2
        assert one["describe_seconds"] > 0
        assert one["pairs"][0]["correspondences"] > 20
    # Both scenes hold the same images, in different layouts.
    assert rows["sift"]["per_scene"]["people"] == pytest.approx(rows["sift"]["per_scene"]["v_people"])
    assert rows["ckn-grad"]["train_seconds"] > 0
    assert "ckn-grad+rootsift" in result.output


def test_second_table_is_the_same_from_the_cache(scenes, run, cache):
    options = ["--descriptors", "rootsift,ckn-grad", "--regions", "8", "--smoothing", "0"]
    first = run("evaluate", "patches", scenes, *TINY, *cache, *options)
    second = run("evaluate", "patches", scenes, *TINY, *cache, *options)
    assert first.exit_code == 0, first.output
    assert second.output == first.output


def test_dense_detector(scenes, run, cache):
    options = ["--descriptors", "sift", "--regions", "8", "--smoothing", "1", "--detector", "dense"]
    dense = ["--set", "keypoints.dense_step_px=24", "--set", "keypoints.dense_num_scales=1"]
    result = run("evaluate", "patches", scenes, *TINY, *cache, *options, *dense)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--descriptors", "surf"], ["unknown descriptor 'surf'", "rootsift"]),
        (["--descriptors", "sift,sift"], ["sift twice"]),
        (["--descriptors", ","], ["names no descriptor"]),
        (["--descriptors", "papre:ckn-grad"], ["papre", "paper"]),
        (["--preset", "papre"], ["papre", "paper"]),
        (["--set", "keypoints.max_keypoint=9"], ["keypoints.max_keypoint"]),
        (["--regions", "5,x"], ["--regions", "5,x"]),
        (["--smoothing=-1"], ["--smoothing", "-1"]),
        (["--train-images", "nowhere"], ["nowhere"]),
        (["--pairs", "pairs.txt", "--protocol", "rome"], ["--pairs"]),
        (["--protocol", "fpr95"], ["--pairs"]),
        (["--json", "nowhere/out.json"], ["nowhere/out.json", "folder is missing"]),
    ],
)
def test_bad_options_are_refused(scenes, run, cache, options, words, tmp_path):
    out = tmp_path / "out.json"
    options = options if "--json" in options else [*options, "--json", str(out)]
    result = run("evaluate", "patches", scenes, *cache, *options)
    assert result.exit_code == 2, result.output
    for word in words:
        assert word in str(result.exception)
    assert not out.exists()
    assert not (tmp_path / "cache").exists()


def test_missing_folder_is_refused(run, tmp_path):
    result = run("evaluate", "patches", tmp_path / "nowhere", "--descriptors", "sift")
    assert result.exit_code == 2
    assert "no such folder" in str(result.exception)


def test_folder_without_scenes_is_refused(run, tmp_path):
    result = run("evaluate", "patches", tmp_path, "--descriptors", "sift")
    assert result.exit_code == 2
    assert "there is no scene in" in str(result.exception)


def test_scene_without_homographies_is_refused(run, tmp_path):
    save(tmp_path / "wall" / "img1.png", photo("coffee"))
    save(tmp_path / "wall" / "img2.png", photo("coffee"))
    result = run("evaluate", "patches", tmp_path, "--descriptors", "sift")
    assert result.exit_code == 2
    assert "no homography" in str(result.exception)
    assert "wall" in str(result.exception)


@pytest.mark.parametrize("text", ["1 0 0 0 1 0 0 0", "one", "0 0 0 0 0 0 0 0 0"])
def test_bad_homography_is_refused(run, tmp_path, text):
    save(tmp_path / "wall" / "img1.png", photo("coffee"))
    save(tmp_path / "wall" / "img2.png", photo("coffee"))
    (tmp_path / "wall" / "H1to2p").write_text(text)
    result = run("evaluate", "patches", tmp_path, "--descriptors", "sift")
    assert result.exit_code == 2
    assert "H1to2p" in str(result.exception)


def test_unreadable_image_is_refused_by_name(run, cache, tmp_path):
    save(tmp_path / "wall" / "img1.png", photo("coffee"))
    (tmp_path / "wall" / "img2.png").write_bytes(b"no image")
    np.savetxt(tmp_path / "wall" / "H1to2p", np.eye(3))
    result = run("evaluate", "patches", tmp_path, "--descriptors", "sift", *cache)
    assert result.exit_code == 2
    assert "img2.png cannot be used" in str(result.exception)
