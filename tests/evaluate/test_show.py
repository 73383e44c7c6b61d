"""`ckn-scale show` writes pictures, and their parts are where they should be."""

from __future__ import annotations

import sys

import cv2
import numpy as np
import pytest
from small_sets import TINY, photo, save

from ckn_scale.core.keypoints import Keypoints
from ckn_scale.core.specs import PatchSpec
from ckn_scale.errors import MissingDependency
from ckn_scale.evaluate.pictures.canvas import (
    add_caption,
    colour_by_value,
    outline_regions,
    outline_squares,
    place_side_by_side,
    tile_images,
)
from ckn_scale.evaluate.pictures.chart import Panel, draw_panels
from ckn_scale.evaluate.pictures.figures import (
    differentiate_patches,
    match_images,
    scale_frames,
    show_filter,
    spread_keypoints,
    whiten_patches,
)
from ckn_scale.evaluate.pictures.robustness import DISTURBANCES, disturb, measure_robustness


@pytest.fixture
def images(tmp_path):
    image = photo("astronaut")
    save(tmp_path / "photos" / "a.png", image)
    turned = cv2.warpAffine(image, cv2.getRotationMatrix2D((120, 120), 15, 0.95), (240, 240))
    save(tmp_path / "photos" / "b.png", turned)
    return tmp_path / "photos"


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("keypoints", ["--points", "40"]),
        ("patches", ["--points", "6"]),
        ("inputs", ["--points", "4"]),
        ("robustness", ["--points", "40", "--descriptors", "rootsift,ckn-grad"]),
    ],
)
def test_show_one_image(images, run, tmp_path, monkeypatch, verb, options):
    if verb == "robustness":
        pytest.importorskip("matplotlib")
    monkeypatch.setenv("CKN_SCALE_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out.png"
    result = run("show", verb, images / "a.png", "-o", out, *TINY, *options)
    assert result.exit_code == 0, (result.output, result.exception)
    picture = cv2.imread(str(out))
    assert min(picture.shape[:2]) > 100
    assert picture.std() > 10


def test_show_matches_explains_most_of_them(images, run, tmp_path):
    out = tmp_path / "out.png"
    options = ["--descriptor", "rootsift", "--points", "150"]
    result = run("show", "matches", images / "a.png", images / "b.png", "-o", out, *TINY, *options)
    assert result.exit_code == 0, (result.output, result.exception)
    green = np.all(cv2.imread(str(out))[..., ::-1] == (0, 200, 83), axis=2)
    assert green.sum() > 100  # inliers were found and drawn
    lines = result.output.splitlines()
    start = next(
        k for k, line in enumerate(lines) if line.startswith("transform of pixels, a.png (240 × 240)")
    )
    transform = np.array([line.split() for line in lines[start + 1 : start + 4]], float)
    corners = np.array([[0, 0, 1], [239, 0, 1], [0, 239, 1], [239, 239, 1.0]])
    there = corners @ transform.T
    expected = corners @ cv2.getRotationMatrix2D((120, 120), 15, 0.95).T
    assert np.abs(there[:, :2] / there[:, 2:] - expected).max() < 5
    assert "inliers of one" in result.output
    assert "box in b.png: " in result.output


def test_show_filters(images, run, tmp_path, monkeypatch):
    monkeypatch.setenv("CKN_SCALE_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out.png"
    result = run("show", "filters", images, "-o", out, *TINY)
    assert result.exit_code == 0, (result.output, result.exception)
    assert cv2.imread(str(out)) is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["keypoints", "nowhere.png"], "nowhere.png"),
        (["keypoints", "flat.png"], "flat.png is flat"),
        (["keypoints", "broken.png"], "broken.png cannot be used"),
        (["keypoints", "flat.png", "-o", "out.jpg"], "must end in .png"),
        (["keypoints", "flat.png", "-o", "nowhere/out.png"], "its folder is missing"),
        (["keypoints", "flat.png", "--set", "keypoints.sadles=true"], "keypoints.sadles"),
        (["matches", "flat.png", "flat.png", "--descriptor", "surf"], "unknown descriptor 'surf'"),
        (["matches", "flat.png", "flat.png", "--descriptor", "sift,rootsift"], "one descriptor is wanted"),
        (["filters", "nowhere"], "no such folder"),
    ],
)
def test_bad_input_is_refused(run, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKN_SCALE_CACHE", str(tmp_path / "cache"))
    save(tmp_path / "flat.png", np.full((100, 100, 3), 90, np.uint8))
    (tmp_path / "broken.png").write_bytes(b"no image")
    result = run("show", *arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert words in str(result.exception)
    assert {path.name for path in tmp_path.glob("*.png")} == {"flat.png", "broken.png"}


def test_outlines_of_a_frame():
    frames = np.array([[[2.0, 0, 10], [0, 1, 20]]])
    ellipse = outline_regions(frames, 3.0)
    np.testing.assert_allclose(ellipse[0].max(axis=0), [16, 23], atol=0.05)
    np.testing.assert_allclose(outline_squares(frames, 3.0)[0], [[4, 17], [16, 17], [16, 23], [4, 23]])


def test_scale_frames_keeps_pixel_centres():
    frames = np.array([[[1.0, 0, 0], [0, 1, 0]]])
    np.testing.assert_allclose(scale_frames(frames, 2), [[[2, 0, 0.5], [0, 2, 0.5]]])


def test_tiles_and_sides_have_the_right_size():
    image = np.zeros((10, 20, 3), np.uint8)
    assert tile_images([image] * 5, 2, gap_px=1).shape == (34, 43, 3)
    canvas, starts = place_side_by_side([image, image[:5]], gap_px=4)
    assert canvas.shape == (10, 44, 3)
    assert starts == [0, 24]
    assert add_caption(image, "").shape[0] > 10


def test_colours_go_by_rank():
    first = colour_by_value(np.array([1.0, 2.0, 1000.0]))
    assert first == colour_by_value(np.array([1.0, 2.0, 3.0]))
    assert len(set(first)) == 3


def test_chart_draws_its_curve_where_it_belongs():
    pytest.importorskip("matplotlib")
    panel = Panel("t", "x", [0.0, 1.0], {"a": np.array([0.25, 0.25])})
    chart = draw_panels([panel, panel], y_label="y", y_limits=(0.0, 1.0))
    assert chart.shape == (320, 840, 3)
    curve = np.all(np.abs(chart[:, :420].astype(int) - (0, 114, 178)) < 40, axis=2)
    frame = np.flatnonzero((chart[:, :420] < 100).all(axis=2).sum(axis=0) > 100).min()  # the y axis
    ink = np.flatnonzero((chart[:, frame] < 100).all(axis=1))
    middle = ink.max() - 0.25 * (ink.max() - ink.min())
    rows = np.flatnonzero(curve[:, frame + 40 : 300].any(axis=1))
    assert abs(rows.mean() - middle) < 3


def test_show_robustness_names_the_extra_before_anything_is_learned(images, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("show", "robustness", images / "a.png", "-o", images / "out.png", *TINY)
    assert isinstance(result.exception, MissingDependency)
    assert "ckn-scale[charts]" in str(result.exception)


def test_spread_keypoints_takes_the_strongest_and_keeps_apart():
    frames = np.zeros((6, 2, 3), np.float32)
    frames[:, 0, 2] = [0, 1, 2, 50, 51, 100]
    chosen = spread_keypoints(Keypoints(frames, np.arange(6, 0, -1.0)), 3)
    assert chosen.frames[:, 0, 2].tolist() == [0, 50, 100]
    assert len(spread_keypoints(Keypoints(frames, np.ones(6)), 20)) == 6


def test_match_images_needs_enough_that_agree():
    rng = np.random.default_rng(0)
    linear = np.array([[0.9, 0.1], [-0.1, 1.0]])
    first, second = np.zeros((2, 40, 2, 3))
    first[:, :, :2], first[:, :, 2] = 3 * np.eye(2), rng.random((40, 2)) * 200
    second[:, :, :2], second[:, :, 2] = 3 * linear, first[:, :, 2] @ linear.T + 5
    second[:10, :, 2] += 60
    rows, sizes = np.eye(40, dtype=np.float32), ((200, 200), (220, 220))
    i, j, verified = match_images((rows, rows), (first, second), sizes)
    np.testing.assert_array_equal(i, j)
    assert i[verified.inliers].tolist() == list(range(10, 40))
    few = match_images((rows[:4], rows[:4]), (first[10:14], second[10:14]), sizes)[2]
    assert (len(few.inliers), few.transform) == (0, None)
    second[:, :, 2] = rng.random((40, 2)) * 200
    assert len(match_images((rows, rows), (first, second), sizes)[2].inliers) == 0


def test_input_maps_of_a_flat_patch_show_nothing():
    flat = np.full((2, 51, 51, 3), 77, np.uint8)
    assert np.ptp(whiten_patches(flat)) == 0
    assert differentiate_patches(flat).max() == 0


def test_filters_are_shown_at_full_brightness():
    assert show_filter(np.array([0.0, 0.5, 1.0]), signed=False).tolist() == [0, 128, 255]
    assert show_filter(np.array([-2.0, 0.0, 1.0]), signed=True).tolist() == [0, 128, 191]


def test_disturb_moves_in_the_frames_own_coordinates():
    frames = np.array([[[0.0, -2, 10], [2, 0, 20]]])  # turned by a quarter, scale 2
    shift = np.array([[1.0, 0, 3], [0, 1, 0]])
    np.testing.assert_allclose(disturb(frames, shift)[0, :, 2], [10, 26])


def test_robustness_is_zero_when_nothing_moves():
    image, spec = photo("astronaut"), PatchSpec(region=3.0)
    frames = np.zeros((20, 2, 3), np.float32)
    frames[:, 0, 0] = frames[:, 1, 1] = 6.0
    frames[:, :, 2] = np.random.default_rng(0).uniform(40, 200, (20, 2))
    keypoints = Keypoints(frames, np.ones(20, np.float32))

    def describe(patches):
        rows = patches.reshape(len(patches), -1).astype(float)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    for one in DISTURBANCES:
        distances = measure_robustness(image, keypoints, describe, spec, one)
        still = list(one.amounts).index(1.0 if one.title == "zoom" else 0)
        assert distances[still] == 0
        assert distances[-1] > 0.1
