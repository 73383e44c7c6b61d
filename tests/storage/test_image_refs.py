from __future__ import annotations

import random

import pytest

from ckn_scale.storage.image_refs import ImageRef, sort_refs


def shuffled(count: int) -> list[ImageRef]:
    refs = [ImageRef(f"s3://b/{i:05d}.jpg", i, f"e{i}") for i in range(count)]
    random.Random(0).shuffle(refs)
    return refs


@pytest.mark.parametrize("run_rows", [1, 7, 100, 1000])
def test_sort_refs_sorts_whatever_the_run_length(run_rows, tmp_path):
    refs = shuffled(50)
    assert list(sort_refs(refs, run_rows=run_rows, temp_dir=tmp_path)) == sorted(
        refs, key=lambda ref: ref.uri
    )
    assert list(tmp_path.iterdir()) == []


def test_sort_refs_keeps_the_first_of_equal_uris():
    refs = [ImageRef("b", 1), ImageRef("a", 2), ImageRef("b", 3), ImageRef("a", 4), ImageRef("c", 5)]
    for run_rows in (1, 2, 10):
        assert [(r.uri, r.size_bytes) for r in sort_refs(refs, run_rows=run_rows)] == [
            ("a", 2),
            ("b", 1),
            ("c", 5),
        ]


@pytest.mark.parametrize("runs_at_once", [2, 3, 32])
def test_sort_refs_merges_many_runs_a_few_at_a_time(runs_at_once, tmp_path):
    refs = shuffled(40)
    given = [*refs, *(ImageRef(ref.uri, -1) for ref in refs)]
    merged = sort_refs(given, run_rows=3, temp_dir=tmp_path, runs_at_once=runs_at_once)
    assert list(merged) == sorted(refs, key=lambda ref: ref.uri)


def test_sort_refs_orders_as_bytes_do():
    uris = ["a", "B", "ä", "z", "中", "😀", "a/b", "a b"]
    assert [ref.uri for ref in sort_refs(map(ImageRef, uris))] == sorted(uris, key=str.encode)


def test_sort_refs_keeps_columns():
    columns = {"title": "ü", "price": 1.5, "tags": ["a"], "none": None}
    assert [ref.columns for ref in sort_refs([ImageRef("a", columns=columns), ImageRef("b")])] == [
        columns,
        None,
    ]


def test_sort_refs_of_nothing():
    assert list(sort_refs([])) == []


def test_sort_refs_refuses_empty_runs():
    with pytest.raises(ValueError, match="run_rows must be ≥ 1, got 0"):
        list(sort_refs([], run_rows=0))
    with pytest.raises(ValueError, match="runs_at_once must be ≥ 2, got 1"):
        list(sort_refs([], runs_at_once=1))


def test_sort_refs_removes_its_files_when_it_is_left_early(tmp_path):
    refs = sort_refs(shuffled(20), run_rows=5, temp_dir=tmp_path)
    next(refs)
    assert list(tmp_path.iterdir())
    refs.close()
    assert list(tmp_path.iterdir()) == []


def test_sort_refs_holds_one_run_at_a_time(tmp_path):
    """The input is taken run by run: 2,000 runs never stand open at once in memory."""
    seen = []

    def watched():
        for i in range(100):
            seen.append(i)
            yield ImageRef(f"{i:03d}")
            if i == 55:
                assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 5

    assert len(list(sort_refs(watched(), run_rows=10, temp_dir=tmp_path))) == 100
