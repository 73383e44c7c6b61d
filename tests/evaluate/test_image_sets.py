"""Layouts of image sets: who is a query and what it should find."""

from __future__ import annotations

import numpy as np
import pytest

from ckn_scale.errors import InputError
from ckn_scale.evaluate.image_sets import Query, add_distractors, read_image_set
from ckn_scale.evaluate.image_table import score_query
from ckn_scale.evaluate.regions import ImageFile


def make_files(folder, names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def names_of(image_set, positions):
    return sorted(image_set.database[position].path.name for position in positions)


def test_holidays_queries_end_in_00(tmp_path):
    make_files(tmp_path, ["100000.jpg", "100001.jpg", "100002.jpg", "100100.jpg", "100101.jpg", "readme.jpg"])
    found = read_image_set(tmp_path, "holidays")
    assert len(found.database) == 5
    assert [query.image.path.name for query in found.queries] == ["100000.jpg", "100100.jpg"]
    assert names_of(found, found.queries[0].relevant) == ["100001.jpg", "100002.jpg"]
    assert names_of(found, found.queries[0].ignored) == ["100000.jpg"]


def test_ukbench_groups_of_four(tmp_path):
    make_files(tmp_path, [f"ukbench{number:05d}.jpg" for number in range(8)])
    found = read_image_set(tmp_path, "ukbench")
    assert len(found.queries) == 8
    assert found.queries[5].relevant == {4, 5, 6, 7}


def test_ukbench_refuses_an_incomplete_group(tmp_path):
    make_files(tmp_path, [f"ukbench{number:05d}.jpg" for number in range(7)])
    with pytest.raises(InputError, match=r"group 1 .* has 3 images, not 4"):
        read_image_set(tmp_path, "ukbench")


@pytest.fixture
def oxford(tmp_path):
    make_files(tmp_path / "jpg", ["hall_1.jpg", "hall_2.jpg", "hall_3.jpg", "other_1.jpg"])
    (tmp_path / "gt").mkdir()
    (tmp_path / "gt" / "hall_1_query.txt").write_text("oxc1_hall_1 10.5 20 110 220.5\n")
    (tmp_path / "gt" / "hall_1_good.txt").write_text("hall_1\nhall_2\n")
    (tmp_path / "gt" / "hall_1_ok.txt").write_text("")
    (tmp_path / "gt" / "hall_1_junk.txt").write_text("hall_3\n")
    return tmp_path


def test_oxford_query_is_its_box(oxford):
    found = read_image_set(oxford, "oxford")
    query = found.queries[0]
    assert query.image.box == (10.5, 20.0, 110.0, 220.5)
    assert names_of(found, query.relevant) == ["hall_1.jpg", "hall_2.jpg"]
    assert names_of(found, query.ignored) == ["hall_3.jpg"]
    assert len(found.images) == 5  # the cropped query is an image of its own


def test_oxford_without_crop(oxford):
    found = read_image_set(oxford, "oxford", crop=False)
    assert found.queries[0].image.box is None
    assert len(found.images) == 4


def test_oxford_names_what_is_missing(oxford):
    (oxford / "gt" / "hall_1_good.txt").write_text("hall_9\n")
    with pytest.raises(InputError, match="hall_9"):
        read_image_set(oxford, "oxford")


def test_paris_has_a_folder_for_each_landmark_and_names_without_prefix(tmp_path):
    make_files(tmp_path / "paris" / "defense", ["paris_defense_000605.jpg", "paris_defense_000041.jpg"])
    make_files(tmp_path / "paris" / "eiffel", ["paris_eiffel_000001.jpg"])
    (tmp_path / "gt").mkdir()
    (tmp_path / "gt" / "defense_1_query.txt").write_text("paris_defense_000605 1.0 2.0 30.0 40.0 \n")
    (tmp_path / "gt" / "defense_1_good.txt").write_text("paris_defense_000605\n")
    (tmp_path / "gt" / "defense_1_ok.txt").write_text("paris_defense_000041\n")
    (tmp_path / "gt" / "defense_1_junk.txt").write_text("")
    found = read_image_set(tmp_path, "oxford")
    query = found.queries[0]
    assert query.image.path.name == "paris_defense_000605.jpg"
    assert query.image.box == (1.0, 2.0, 30.0, 40.0)
    assert names_of(found, query.relevant) == ["paris_defense_000041.jpg", "paris_defense_000605.jpg"]
    assert len(found.database) == 3


def test_distractors_come_after_the_images_that_queries_know(tmp_path):
    make_files(tmp_path / "set", ["100000.jpg", "100001.jpg"])
    found = read_image_set(tmp_path / "set", "holidays")
    more = add_distractors(found, make_files(tmp_path, ["a.jpg", "b.jpg"]))  # the set lies inside
    assert [file.path.name for file in more.database] == ["100000.jpg", "100001.jpg", "a.jpg", "b.jpg"]
    assert more.queries == found.queries
    with pytest.raises(InputError, match="no photograph that is not of the set"):
        add_distractors(found, tmp_path / "set")


@pytest.mark.parametrize("header", ["", "image\tgroup\n"])
def test_groups_of_a_two_column_file(tmp_path, header):
    make_files(tmp_path, ["a.jpg", "b.jpg", "c.jpg"])
    (tmp_path / "groups.tsv").write_text(header + "a.jpg\tx\nb.jpg\tx\nc.jpg\ty\n")
    for data in (tmp_path, tmp_path / "groups.tsv"):
        found = read_image_set(data, "groups")
        assert [query.image.path.name for query in found.queries] == ["a.jpg", "b.jpg"]
        assert found.queries[0].relevant == {1}


def test_names_in_a_file_of_tabs_may_have_commas(tmp_path):
    names = ["a, b; c.jpg", "d.jpg"]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "groups.tsv").write_text("".join(f"{name}\tx\n" for name in names))
    assert [file.path.name for file in read_image_set(tmp_path, "groups").database] == names


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a.jpg\n", "row 1 has one"),
        ("", "it is empty"),
        ("z.jpg\tx\nb.jpg\tx\n", "z.jpg, which does not exist"),
    ],
)
def test_groups_file_is_refused_with_the_reason(tmp_path, text, words):
    make_files(tmp_path, ["a.jpg", "b.jpg"])
    (tmp_path / "groups.tsv").write_text(text)
    with pytest.raises(InputError, match=words):
        read_image_set(tmp_path, "groups")


def test_set_without_queries_is_refused(tmp_path):
    make_files(tmp_path, ["photo.jpg"])
    with pytest.raises(InputError, match="no query"):
        read_image_set(tmp_path, "holidays")


def test_score_query_ignores_the_query_itself():
    query = Query(ImageFile(None), frozenset([2]), frozenset([0]))  # type: ignore[arg-type]
    assert score_query(query, np.array([1.0, 0.1, 0.9]), "holidays") == 1.0


def test_score_query_of_ukbench_is_four_when_perfect():
    query = Query(ImageFile(None), frozenset([0, 1, 2, 3]))  # type: ignore[arg-type]
    assert score_query(query, np.array([1.0, 0.9, 0.8, 0.7, 0.1]), "ukbench") == 4.0
