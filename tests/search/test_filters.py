from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from synthetic_index import publish_synthetic, random_units

from ckn_scale.errors import InputError
from ckn_scale.search.filters import Condition, Filter, as_filter, only_ids
from ckn_scale.search.shard import ShardGroup
from ckn_scale.storage.index_files import make_side_table

KEPT = pa.table(
    {
        "year": pa.array([2018, 2019, None, 2021, 2022], pa.int64()),
        "price": pa.array([1.5, -2.0, 0.0, None, 10.0], pa.float64()),
        "sold": pa.array([True, False, None, True, False], pa.bool_()),
        "label": pa.array(["rock and roll", "in=5", "a,b", None, "ä"], pa.string()),
    }
)
URIS = ["s3://a/1", "s3://a/2", "s3://ab/1", "x/s3://a/", "s3://a/ä"]
TABLE = make_side_table([10, 20, 30, 40, 2**53 + 1], URIS, KEPT)


@pytest.mark.parametrize(
    ("texts", "rows"),
    [
        (["year=2019"], [1]),
        (["year != 2019"], [0, 3, 4]),  # not the one without a year
        (["year<2019"], [0]),
        (["year<=2019"], [0, 1]),
        (["year > 2019"], [3, 4]),
        (["year>=2019", "year<2022"], [1, 3]),
        (["price>=-2e0"], [0, 1, 2, 4]),
        (["price<0.5"], [1, 2]),
        (["sold=true"], [0, 3]),
        (["sold!=true"], [1, 4]),
        (["label=rock and roll"], [0]),
        (["label=in=5"], [1]),
        (["label in a, ä,rock and roll"], [0, 4]),
        (["label>=rock"], [0, 4]),
        (["label="], []),
        (["uri^=s3://a/"], [0, 1, 4]),
        (["uri=s3://ab/1"], [2]),
        (["year in 2018,2022"], [0, 4]),
        (["image_id in 20,9007199254740993,7"], [1, 4]),
        (["image_id=9007199254740992"], []),  # not rounded to a neighbour by a float
        (["uri^=s3://a/", "sold=false"], [1, 4]),
        ([], [0, 1, 2, 3, 4]),
    ],
)
def test_conditions_select_rows(texts, rows):
    assert np.flatnonzero(Filter.parse(*texts).evaluate(TABLE)).tolist() == rows


def test_a_list_comes_from_a_file(tmp_path):
    (tmp_path / "ids.txt").write_text("10\n\n 40 \n")
    found = Filter.parse(f"image_id in @{tmp_path}/ids.txt")
    assert np.flatnonzero(found.evaluate(TABLE)).tolist() == [0, 3]
    with pytest.raises(InputError, match=r"none\.txt cannot be read"):
        Filter.parse(f"image_id in @{tmp_path}/none.txt")


def test_python_values_and_forms():
    rows = np.flatnonzero(
        Filter((Condition("year", ">=", 2021), Condition("sold", "=", True))).evaluate(TABLE)
    )
    assert rows.tolist() == [3]
    assert np.flatnonzero(only_ids(range(20, 31)).evaluate(TABLE)).tolist() == [1, 2]
    assert as_filter("year=1") == as_filter(["year=1"]) == Filter((Condition("year", "=", "1"),))
    assert as_filter(None) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("year", "a filter is COLUMN OPERATOR VALUE, as in 'year>=2020', got 'year'"),
        ("=5", "a filter is COLUMN OPERATOR VALUE"),
        ("yeer=5", "has no such column; it has image_id, uri, year, price, sold, label"),
        ("thumbnail=x", "has no such column"),
        ("year=abc", "the column holds whole numbers, got 'abc'"),
        ("year=5.5", "the column holds whole numbers, got '5.5'"),
        ("year=99999999999999999999", "the column holds whole numbers, got '99999999999999999999'"),
        ("price=x", "the column holds numbers, got 'x'"),
        ("sold=yes", "the column holds true or false, got 'yes'"),
        ("year^=20", r"\^= compares text, and the column holds whole numbers"),
    ],
)
def test_what_does_not_fit_is_said(text, message):
    with pytest.raises(InputError, match=message):
        Filter.parse(text).evaluate(TABLE)


@pytest.mark.parametrize(("operator", "value"), [("~", 1), ("in", "abc"), ("=", (1, 2))])
def test_a_condition_that_means_nothing_is_refused(operator, value):
    with pytest.raises(InputError, match="filter year"):
        Condition("year", operator, value)


@pytest.mark.parametrize("value", [True, 5.5, "x"])
def test_python_values_of_another_type_are_refused(value):
    with pytest.raises(InputError, match="the column holds whole numbers"):
        Filter((Condition("year", "=", value),)).evaluate(TABLE)


@pytest.mark.parametrize("num_shards", [1, 3, 7])
def test_one_of_many_images_is_found_by_its_filter(tmp_path, num_shards):
    vectors = random_units(2000)
    index = publish_synthetic(tmp_path / "run", vectors, num_shards, deleted=[6])
    group = ShardGroup(index.run.store, index.manifest)
    wanted = only_ids([5, 6, 700, 1999])
    hits = group.search(-vectors[5:6], 10, allowed=group.allow(wanted))[0]
    assert {hit.image_id for hit in hits} == {5, 700, 1999}  # 6 is deleted; 5 is the most unlike of all
    assert hits[-1].image_id == 5
    scores = {hit.image_id: hit.score for hit in group.search(-vectors[5:6], 2000)[0]}
    assert all(hit.score == scores[hit.image_id] for hit in hits)
    assert group.allow(only_ids([5, 6, 700, 1999])) is group.allow(wanted)
    assert group.search(vectors[:1], 3, allowed=group.allow(Filter.parse("label=none"))) == [[]]
    prefix = group.allow(Filter.parse("uri^=photos/010"))
    assert sorted(hit.image_id for hit in group.search(vectors[:1], 99, allowed=prefix)[0]) == list(
        range(100, 110)
    )
