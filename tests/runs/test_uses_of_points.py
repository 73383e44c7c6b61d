"""What is made of matching points: pairs and databases for reconstruction, explanations, pictures of hits."""

from __future__ import annotations

import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from photo_runs import parse
from test_copies_of_runs import publish_changed

from ckn_scale.cli.explain import read_indexed
from ckn_scale.core.calibration import DECISION_RATE, Calibration, name_rate
from ckn_scale.errors import InputError
from ckn_scale.runs.colmap import MAX_IMAGE_ID, SCHEMA_VERSION, ColmapDatabase, Pixels
from ckn_scale.runs.explain import explain_search
from ckn_scale.runs.export_pairs import export_pairs, find_common_folder
from ckn_scale.search.engine import open_index
from ckn_scale.search.matches import match_images
from ckn_scale.search.versions import open_version
from ckn_scale.storage.run_folder import RunFolder

PHOTO, VIEW, OTHER = "coffee.jpg", "coffee-tilt.jpg", "astronaut.jpg"


@pytest.fixture(scope="module")
def index(grown):
    return open_index(str(grown))


def needing(index, inliers):
    """The index with another number of inliers that a match needs."""
    index.calibration = replace(Calibration(), thresholds={name_rate(DECISION_RATE): inliers})
    return index


def read_pairs(path):
    return [tuple(line.split()) for line in path.read_text().splitlines()]


def test_pairs_for_hloc_are_images_of_the_same_photograph(grown, photos, tmp_path, command_line):
    said = parse(command_line("export", grown, tmp_path / "out", "--pairs", "hloc", "--json"))
    pairs = read_pairs(tmp_path / "out" / "pairs.txt")
    assert (said["pairs"], said["images"]) == (len(pairs), 24)
    assert len(set(map(frozenset, pairs))) == len(pairs) >= 4
    root = Path(said["image_root"])
    for pair in pairs:
        assert len({Path(name).stem.removesuffix("-tilt") for name in pair}) == 1
        assert all((root / name).is_file() for name in pair)
    again = export_pairs(
        RunFolder.open(str(grown)), str(tmp_path / "one"), "hloc", 1, neighbours=1, image_root=str(photos)
    )
    assert (again.version, again.images) == (1, 21)
    assert all(
        (photos / name).is_file() for pair in read_pairs(tmp_path / "one" / "pairs.txt") for name in pair
    )
    with pytest.raises(InputError, match="does not lie below it"):
        export_pairs(RunFolder.open(str(grown)), str(tmp_path / "two"), "hloc", image_root="/elsewhere")
    assert not (tmp_path / "two").exists()


def test_the_common_folder_is_that_of_all():
    assert find_common_folder(["/a/b/1.jpg", "/a/b/c/2.jpg", "/a/bc/3.jpg"]) == "/a/"
    assert find_common_folder(["/a/1.jpg"]) == "/a/"
    assert find_common_folder(["s3://bucket/x/1.jpg", "s3://bucket/y/2.jpg"]) == "s3://bucket/"
    assert find_common_folder(["1.jpg", "/a/2.jpg"]) == ""
    assert find_common_folder([]) == ""


def test_a_colmap_database_holds_keypoints_and_matches_that_its_homographies_explain(
    grown, photos, tmp_path, command_line
):
    said = parse(command_line("export", grown, tmp_path / "out", "--matches", "colmap-db", "--json"))
    path = tmp_path / "out" / "database.db"
    database = sqlite3.connect(path)
    assert database.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    images = dict(database.execute("SELECT image_id, name FROM images"))
    assert len(images) == said["images"] == 24
    assert min(images) >= 1
    keypoints = {}
    for image_id, rows, columns, data in database.execute("SELECT * FROM keypoints"):
        keypoints[image_id] = np.frombuffer(data, "<f4").reshape(rows, columns)
        width, height = database.execute(
            "SELECT width, height FROM cameras WHERE camera_id = ?", (image_id,)
        ).fetchone()
        source = cv2.imread(str(Path(said["image_root"]) / images[image_id]))
        assert (width, height) == source.shape[1::-1]
        assert columns == 6
        assert (keypoints[image_id][:, :2] >= 0).all()
        assert (keypoints[image_id][:, :2] <= (width, height)).all()
    verified = list(database.execute("SELECT pair_id, rows, data, config, H FROM two_view_geometries"))
    assert len(verified) == said["pairs"] >= 4
    assert sum(rows for _, rows, *_ in verified) == said["matches"]
    for pair, rows, data, config, matrix in verified:
        first, second = divmod(pair, MAX_IMAGE_ID)
        assert 0 < first < second
        chosen = np.frombuffer(data, "<u4").reshape(rows, 2)
        homography = np.frombuffer(matrix, "<f8").reshape(3, 3)
        points = keypoints[first][chosen[:, 0], :2].astype(np.float64)
        moved = cv2.perspectiveTransform(points[None], homography)[0]
        off = np.linalg.norm(moved - keypoints[second][chosen[:, 1], :2], axis=1)
        assert config == 6
        assert np.median(off) < 0.02 * 512
        every = database.execute("SELECT rows, data FROM matches WHERE pair_id = ?", (pair,)).fetchone()
        tentative = set(map(tuple, np.frombuffer(every[1], "<u4").reshape(every[0], 2).tolist()))
        assert set(map(tuple, chosen.tolist())) <= tentative


def test_pycolmap_opens_the_database(grown, tmp_path):
    pycolmap = pytest.importorskip("pycolmap")
    said = export_pairs(RunFolder.open(str(grown)), str(tmp_path / "out"), "colmap-db")
    database = pycolmap.Database.open(str(tmp_path / "out" / "database.db"))
    assert (database.num_images(), database.num_matched_image_pairs()) == (said.images, said.pairs)
    assert len(database.read_all_frames()) == said.images
    assert database.num_inlier_matches() == said.matches


def test_a_database_in_pixels_of_the_original_size(tmp_path):
    frames = np.array([[[2.0, 0, 10], [0, 3, 20]]])
    with ColmapDatabase(tmp_path / "one.db") as database:
        database.add_image(1, "a b/c.jpg", Pixels((100, 50), (200, 150)), frames)
        with pytest.raises(ValueError, match="first < second"):
            database.add_pair(2, 1, np.zeros((0, 2)), np.zeros((0, 2)), np.eye(3))
    rows = sqlite3.connect(tmp_path / "one.db")
    camera = rows.execute("SELECT width, height, params FROM cameras").fetchone()
    assert camera[:2] == (200, 150)
    assert np.frombuffer(camera[2], "<f8").tolist() == [240, 100, 75, 0]
    data = rows.execute("SELECT data FROM keypoints").fetchone()[0]
    assert np.frombuffer(data, "<f4").tolist() == [21, 61.5, 4, 0, 0, 9]  # the middle of a pixel is a half
    assert Pixels((100, 50), (0, 0)).size_px == (100, 50)


def test_export_says_what_it_cannot_do(grown, tmp_path, command_line):
    result = command_line("export", grown, tmp_path / "out", "--pairs", "hloc", "--faiss")
    assert (result.returncode, "one of: --vectors npy" in result.stderr) == (2, True)
    run = shutil.copytree(grown, tmp_path / "run")
    shards = open_version(RunFolder.open(str(run))).manifest.shards
    publish_changed(run, shards=tuple(replace(shard, points=None) for shard in shards))
    result = command_line("export", run, tmp_path / "out", "--pairs", "hloc")
    assert (result.returncode, "keeps no points" in result.stderr) == (2, True)


def test_each_stage_that_loses_an_image(grown, photos, index):
    run, query = RunFolder.open(str(grown)), index.encode_query(str(photos / VIEW))

    def explain(expected=PHOTO, **options):
        return explain_search(run, index, query, str(photos / expected), **options)

    needing(index, 8)
    found, matches = explain()
    assert (found.stage, found.rank) == ("found", 2)  # the view itself is first
    assert (found.similarity_rank, found.min_inliers) == (2, 8)
    assert found.inliers == matches.inliers >= 8
    assert len(matches.query) == found.matches >= found.inliers
    hits = index.search(str(photos / VIEW), 2)
    assert (hits[1].uri, hits[1].inliers) == (found.expected.uri, found.inliers)

    late, _ = explain(k=1)
    assert (late.stage, late.rank) == ("rank", 2)
    cut, _ = explain(shortlist=1)
    assert (cut.stage, cut.similarity_rank, cut.inliers) == ("shortlist", None, found.inliers)
    assert "would match" in cut.sentence
    below, _ = explain(head=1)
    assert (below.stage, below.head_rank) == ("head", 2)
    needing(index, found.matches + 1)
    assert explain()[0].stage == "matches"
    needing(index, found.inliers + 1)
    assert explain()[0].stage == ("inliers" if found.inliers < found.matches else "matches")
    needing(index, 8)
    assert explain(OTHER)[0].stage in ("matches", "inliers")
    broken, nothing = explain("broken.jpg")
    assert (broken.stage, broken.expected.state, nothing) == ("not indexed", "truncated", None)
    assert broken.expected.reason
    by_id, _ = explain_search(run, index, query, str(found.expected.image_id))
    assert by_id == found
    for unknown in ("999", str(photos / "nowhere.jpg")):
        with pytest.raises(InputError, match="has no image"):
            explain_search(run, index, query, unknown)


def test_images_that_are_deleted_or_came_later_are_not_indexed(grown, photos, tmp_path):
    run = shutil.copytree(grown, tmp_path / "run")
    first = open_index(str(run), 1)
    query = first.encode_query(str(photos / VIEW))
    opened = RunFolder.open(str(run))
    late, _ = explain_search(opened, first, query, "23")
    assert (late.stage, late.expected.state) == ("not indexed", "not published")
    image_id = explain_search(opened, first, query, str(photos / PHOTO))[0].expected.image_id
    publish_changed(run, tombstones=np.array([image_id]))
    gone, _ = explain_search(opened, open_index(str(run)), query, str(photos / PHOTO))
    assert (gone.stage, gone.expected.state) == ("not indexed", "deleted or replaced")


def test_without_points_vectors_decide(grown, photos, tmp_path):
    run = shutil.copytree(grown, tmp_path / "run")
    shards = open_version(RunFolder.open(str(run))).manifest.shards
    publish_changed(run, shards=tuple(replace(shard, points=None) for shard in shards))
    index = open_index(str(run))
    query = index.encode_query(str(photos / VIEW))
    stages = [
        explain_search(RunFolder.open(str(run)), index, query, str(photos / PHOTO), **options)[0].stage
        for options in ({}, {"k": 1}, {"shortlist": 1})
    ]
    assert stages == ["found", "rank", "shortlist"]


def test_explain_and_hits_write_pictures(grown, photos, tmp_path, command_line, index):
    picture = tmp_path / "explain.png"
    said = parse(command_line("explain", grown, photos / VIEW, photos / PHOTO, "-o", picture, "--json"))
    assert said["expected"]["uri"] == str(photos / PHOTO)
    assert said["stage"] in ("found", "inliers")
    printed = command_line("explain", grown, photos / VIEW, photos / PHOTO)
    assert printed.stdout.splitlines()[-1] == f"{said['stage']}: {said['sentence']}"
    drawn = cv2.imread(str(picture))
    assert drawn.shape[1] > 300
    hits = tmp_path / "hits.png"
    result = command_line("show", "hits", grown, photos / VIEW, "-o", hits, "-k", "3")
    assert result.returncode == 0, result.stderr
    assert cv2.imread(str(hits)).shape[1] > 900
    for command in (("explain", grown, photos / VIEW, "0"), ("show", "hits", grown, photos / VIEW)):
        result = command_line(*command, "-o", tmp_path / "a.jpg")
        assert (result.returncode, "must end in .png" in result.stderr) == (2, True)
    query = index.encode_query(str(photos / VIEW)).points
    size = match_images(index.shards, query, [0])[0].size_px
    thumbnail = read_indexed(index, 0, "/nowhere.jpg", size)
    assert thumbnail.shape[1::-1] == size
    assert thumbnail.std() > 10
