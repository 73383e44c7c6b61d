"""`ckn-scale build-patches` on rendered planes, whose points are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rendered_scenes import (
    CAMERA,
    RenderedScene,
    render_scene,
    write_bundler,
    write_colmap_binary,
    write_colmap_text,
)
from small_sets import TINY

from ckn_scale.config import load_settings
from ckn_scale.errors import InputError
from ckn_scale.evaluate.builders.cameras import View, make_fundamental, measure_epipolar, triangulate
from ckn_scale.evaluate.builders.patch_set import (
    BuildPlan,
    Tracked,
    choose_images,
    choose_points,
    make_reader,
    split_scenes,
    track_scene,
)
from ckn_scale.evaluate.builders.reconstructions import Reconstruction, read_reconstructions
from ckn_scale.evaluate.builders.tracks import Matches, Regions, join_matches
from ckn_scale.evaluate.cache import ContentCache
from ckn_scale.evaluate.image_sets import read_image_set
from ckn_scale.evaluate.patch_sets import read_views
from ckn_scale.evaluate.regions import ImageFile

WRITERS = {"text": write_colmap_text, "binary": write_colmap_binary, "bundler": write_bundler}


@pytest.fixture(scope="module")
def photos_of_scenes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RenderedScene]]:
    folder = tmp_path_factory.mktemp("rendered")
    return folder, [render_scene(folder, "people", "astronaut", 7), render_scene(folder, "cat", "chelsea", 6)]


@pytest.fixture(scope="module")
def tracked(photos_of_scenes, tmp_path_factory) -> Tracked:
    scene = photos_of_scenes[1][0]
    reader = make_reader(load_settings("tiny", None, []), ContentCache(tmp_path_factory.mktemp("cache")))
    return track_scene(
        Reconstruction(scene.name, scene.views), reader, BuildPlan(num_views=5), lambda *_: None
    )


def test_undistort_inverts_distort():
    camera = replace(CAMERA, radial=(-0.2, 0.05), tangential=(0.002, -0.001))
    points = np.array([[120.0, 110], [20, 30], [230, 200]])
    distorted = camera.distort(points)
    assert np.abs(distorted - points).max() > 1
    np.testing.assert_allclose(camera.undistort(distorted), points, atol=1e-6)
    # by hand: at half a focal length to the right of the centre, x (1 + k1 / 4 + k2 / 16)
    plain = replace(CAMERA, radial=(-0.2, 0.05))
    expected = 120 + 135 * (1 - 0.05 + 0.003125)
    np.testing.assert_allclose(plain.distort(np.array([[255.0, 110]])), [[expected, 110]])


@pytest.mark.filterwarnings("error")
def test_pixels_that_a_lens_cannot_show_have_no_place():
    """A short focal length with k1 = -0.23, as pycolmap gave it to a photograph."""
    camera = replace(CAMERA, focal_px=(286.0, 286.0), centre_px=(320.0, 240.0), radial=(-0.23, 0.0))
    found = camera.undistort(np.array([[320.0, 240.0], [420.0, 300.0], [640.0, 480.0]]))
    np.testing.assert_allclose(camera.distort(found[:2]), [[320, 240], [420, 300]], atol=0.1)
    assert np.isnan(found[2]).all()


def test_epipolar_distance_is_that_to_the_line(photos_of_scenes):
    first, second = photos_of_scenes[1][0].views[:2]
    scene = np.random.default_rng(0).uniform(-0.3, 0.3, (20, 3))
    pixels = [project(view, scene) for view in (first, second)]
    fundamental = make_fundamental(first, second)
    assert measure_epipolar(fundamental, *pixels).max() < 1e-6
    line = fundamental @ np.array([*pixels[0][0], 1])
    across = line[:2] / np.hypot(*line[:2])
    moved = measure_epipolar(fundamental, pixels[0][:1], pixels[1][:1] + 5 * across)
    assert moved[0] == pytest.approx(5, rel=0.3)  # the larger of the distances in both images
    assert moved[0] >= 5 - 1e-6
    assert np.isnan(measure_epipolar(make_fundamental(first, first), pixels[0], pixels[0])).all()


def project(view: View, points: np.ndarray) -> np.ndarray:
    seen = points @ view.projection[:, :3].T + view.projection[:, 3]
    return seen[:, :2] / seen[:, 2:]


def test_triangulate_finds_the_point_and_its_error(photos_of_scenes):
    views = photos_of_scenes[1][0].views
    point = np.array([0.1, -0.2, 0.05])
    projections = np.stack([view.projection for view in views])
    pixels = np.concatenate([project(view, point[None]) for view in views])
    found, error = triangulate(projections, pixels)
    np.testing.assert_allclose(found, point, atol=1e-9)
    assert error < 1e-6
    pixels[2] += (8, 0)
    assert 4 < triangulate(projections, pixels)[1] < 8
    behind = np.array([0.0, 0, -5])  # the cameras look the other way
    pixels = np.concatenate([project(view, behind[None]) for view in views])
    assert triangulate(projections, pixels)[1] == np.inf


@pytest.mark.parametrize("form", WRITERS)
def test_each_form_of_a_reconstruction_gives_its_cameras(photos_of_scenes, tmp_path, form):
    folder, scenes = photos_of_scenes
    for scene in scenes:
        WRITERS[form](tmp_path / "model" / scene.name, scene)
    found = read_reconstructions(tmp_path / "model", folder)
    assert [one.name for one in found] == ["cat", "people"]
    for one, scene in zip(found, reversed(scenes), strict=True):
        assert [view.path for view in one.views] == [view.path for view in scene.views]
        for mine, true in zip(one.views, scene.views, strict=True):
            np.testing.assert_allclose(mine.projection, true.projection, atol=1e-9)


def test_scenes_are_found_wherever_they_lie(photos_of_scenes, tmp_path):
    folder, scenes = photos_of_scenes
    write_colmap_binary(tmp_path / "people" / "sparse" / "0", scenes[0])
    write_bundler(tmp_path / "cat", scenes[1])
    (tmp_path / "cat" / "bundle").mkdir()
    (tmp_path / "cat" / "bundle.out").rename(tmp_path / "cat" / "bundle" / "bundle.out")
    found = read_reconstructions(tmp_path, folder)
    assert [(one.name, len(one.views)) for one in found] == [("cat-bundle", 6), ("people-sparse-0", 7)]


def test_reconstructions_that_cannot_be_read(photos_of_scenes, tmp_path):
    folder, scenes = photos_of_scenes
    model = tmp_path / "people"
    write_colmap_binary(model, scenes[0])
    with pytest.raises(InputError, match=r"00\.png does not exist: --images names the folder"):
        read_reconstructions(model, tmp_path)
    images = (model / "images.bin").read_bytes()
    for length in (3, 70, 200):
        (model / "images.bin").write_bytes(images[:length])
        with pytest.raises(InputError, match="is not what COLMAP writes"):
            read_reconstructions(model, folder)
    (model / "images.bin").write_bytes(images)
    cameras = (model / "cameras.bin").read_bytes()
    (model / "cameras.bin").write_bytes(cameras[:12] + b"\x05" + cameras[13:])
    with pytest.raises(InputError, match="the model number 5 are not read: undistort"):
        read_reconstructions(model, folder)
    with pytest.raises(InputError, match="there is no reconstruction in"):
        read_reconstructions(folder, folder)
    write_bundler(tmp_path / "bundler", scenes[0])
    (tmp_path / "bundler" / "list.txt").write_text("people/00.png\n")
    with pytest.raises(InputError, match="not what Bundler writes: 8 cameras for 1 images"):
        read_reconstructions(tmp_path / "bundler", folder)


def test_tracks_show_one_point_of_the_plane_each(tracked, photos_of_scenes):
    scene = photos_of_scenes[1][0]
    facts = tracked.facts
    assert facts["epipolar"] < facts["matches"]
    assert facts["points_of_enough_views"] >= 15
    spreads = []
    for group in tracked.groups:
        assert len({image for image, _ in group}) == len(group)
        if len(group) >= 5:
            places = np.array([find_on_texture(scene, tracked, *one) for one in group])
            spreads.append(np.linalg.norm(places - np.median(places, axis=0), axis=1).max())
    assert np.median(spreads) < 2
    assert np.mean(np.array(spreads) < 5) > 0.9  # pixels of the texture, which is about as fine as an image


@pytest.mark.parametrize(("off_px", "groups"), [(0.0, [[0, 2, 4]]), (12.0, [[0, 2]])])
def test_groups_are_joined_only_if_one_point_explains_them(photos_of_scenes, off_px, groups):
    """Regions 0, 2 and 4 of three images show one point, 4 as far off as is said; 1 and 3 show others."""
    views = photos_of_scenes[1][0].views[:3]
    seen = [project(view, np.array([[0.1, 0.05, 0.02], [-0.2, 0.1, 0.1]])) for view in views]
    seen[2] = seen[2][:1] + off_px
    regions = [Regions(one, np.zeros((len(one), 1))) for one in seen]
    matches = Matches(np.array([0, 2, 0]), np.array([2, 4, 3]), 3)  # the last would have two of one image
    assert join_matches(views, regions, matches) == groups


def find_on_texture(scene: RenderedScene, tracked: Tracked, image: int, region: int) -> np.ndarray:
    centre = tracked.detected[image].keypoints.frames[region, :, 2].astype(float) + 0.5
    plane_from_image = np.linalg.inv(scene.views[image].projection[:, [0, 1, 3]])
    place = scene.texture_from_plane @ plane_from_image @ np.array([*centre, 1])
    return place[:2] / place[2]


def make_tracked(name: str, sizes: list[int], images: int = 9) -> Tracked:
    groups = tuple(tuple((image, 0) for image in range(size)) for size in sizes)
    files = tuple(ImageFile(Path(f"/{name}/{k}.jpg")) for k in range(images))
    return Tracked(name, files, (), groups, {})


def test_points_and_images_are_drawn_evenly_from_the_scenes():
    scenes = [
        make_tracked("a", [12] * 50),
        make_tracked("b", [12] * 3 + [9] * 50),
        make_tracked("c", [12] * 50),
    ]
    plan = BuildPlan(num_points=21, num_images=9)
    chosen = choose_points(scenes, plan)
    assert [sum(one.scene.name == name for one in chosen) for name in "abc"] == [9, 3, 9]
    assert all(len(set(one.views)) == 10 for one in chosen)
    assert [one.views for one in chosen] == [one.views for one in choose_points(scenes, plan)]
    assert len({one.views[0] for one in chosen}) > 3  # the query is not always of the same image
    images = list(choose_images(scenes, plan))
    assert [sum(scene == name for _, scene, _ in images) for name in "abc"] == [6, 6, 6]
    assert sum(role == "query" for _, _, role in images) == 9
    assert len({path for path, _, _ in images}) == 18


def test_scenes_are_split_two_to_one_and_a_single_one_is_for_training():
    names = [f"bundle{k}" for k in range(66)]
    split = split_scenes(names, BuildPlan())
    assert list(split.values()).count("test") == 22
    assert split != split_scenes(names, BuildPlan(seed=1))
    assert split_scenes(["one"], BuildPlan()) == {"one": "train"}
    assert sorted(split_scenes(["a", "b"], BuildPlan()).values()) == ["test", "train"]


def test_build_patches_and_measure_on_them(photos_of_scenes, run, cache, tmp_path):
    folder, scenes = photos_of_scenes
    for scene in scenes:
        write_colmap_text(tmp_path / "model" / scene.name, scene)
    command = ["build-patches", tmp_path / "model", "--images", folder, "--workers", "1", *TINY, *cache]
    result = run(*command, tmp_path / "set", "--views", "20")
    assert result.exit_code == 2
    assert "no point is seen in 20 images, the best in" in str(result.exception)
    assert not (tmp_path / "set").exists()
    result = run(*command, tmp_path / "set", "--views", "4", "--points", "30")
    assert result.exit_code == 0, (result.output, result.exception)
    content = json.loads((tmp_path / "set" / "build.json").read_text())
    assert {len(one["scenes"]) for one in content["splits"].values()} == {1}
    for split, counts in content["splits"].items():
        views = read_views(tmp_path / "set" / split / "patches")
        assert (len(views.patches), int(views.is_query.sum())) == (4 * counts["points"], counts["points"])
        assert counts["points"] >= 10
        images = read_image_set(tmp_path / "set" / split / "images", "groups")
        assert (len(images.queries), len(images.database)) == (3, 3)
        assert all(query.image not in images.database for query in images.queries)
    out = tmp_path / "out.json"
    measured = ["--protocol", "rome", "--descriptors", "sift", "--smoothing", "1", "--json", out]
    result = run("evaluate", "patches", tmp_path / "set" / "train" / "patches", *measured, *TINY, *cache)
    assert result.exit_code == 0, (result.output, result.exception)
    assert json.loads(out.read_text())["results"][0]["map"] > 0.8
    result = run(*command, tmp_path / "set")
    assert "is there already" in str(result.exception)


def test_groups_with_roles_of_another_name_are_refused(groups, tmp_path):
    names = sorted(path.name for path in groups.glob("*.png"))
    rows = [
        f"{groups / name}\tg\t{role}" for name, role in zip(names, ("query", "target", "x"), strict=False)
    ]
    file = tmp_path / "groups.tsv"
    file.write_text("image\tgroup\trole\n" + "\n".join(rows) + "\n")
    with pytest.raises(InputError, match="has the role 'x'"):
        read_image_set(file, "groups")
    file.write_text("image\tgroup\trole\n" + "\n".join(rows[:2]) + "\n")
    found = read_image_set(file, "groups")
    assert [query.relevant for query in found.queries] == [frozenset([0])]
