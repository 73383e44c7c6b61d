from __future__ import annotations

import datetime
import decimal
import math

import pytest

from ckn_scale.errors import InputError
from ckn_scale.storage.image_refs import ImageRef, sort_refs
from ckn_scale.storage.kept_columns import RESERVED, Cell, KeptColumns, to_arrow


def resolve(values: list, before: str | None = None) -> tuple[str, list]:
    """(type, values) of one column after it went through the sort."""
    kept = KeptColumns(["c"])
    refs = [ImageRef(f"{i:03d}", columns={"c": value}) for i, value in enumerate(values)]
    passed = [(ref.columns or {})["c"] for ref in sort_refs(kept.watch(refs), run_rows=2)]
    kind = kept.resolve_types({"c": before} if before else None)["c"]
    return kind, to_arrow(passed, kind).to_pylist()


CELLS = {
    "numbers": (["1", "-20", "0"], ("int", [1, -20, 0])),
    "an empty cell among numbers": (["1", ""], ("int", [1, None])),
    "decimals": (["1", "2.5", ".5", "1e3"], ("float", [1.0, 2.5, 0.5, 1000.0])),
    "leading zeros are codes": (["007", "12"], ("text", ["007", "12"])),
    "a plus, a dot at the end, spaces": (["+1", "5.", " 7"], ("text", ["+1", "5.", " 7"])),
    "words for no number": (["nan", "inf", "1"], ("text", ["nan", "inf", "1"])),
    "larger than 64 bit": (["9223372036854775808"], ("text", ["9223372036854775808"])),
    "the largest of 64 bit": (["9223372036854775807"], ("int", [2**63 - 1])),
    "past the largest float": (["1e999"], ("text", ["1e999"])),
    "truth": (["true", "False", ""], ("bool", [True, False, None])),
    "truth and numbers": (["true", "1"], ("text", ["true", "1"])),
    "text with an empty cell": (["a", ""], ("text", ["a", ""])),
    "nothing at all": (["", ""], ("null", [None, None])),
}


@pytest.mark.parametrize("name", CELLS)
def test_cells_of_a_csv_get_the_type_that_fits_all(name):
    cells, expected = CELLS[name]
    assert resolve([Cell(cell) for cell in cells]) == expected


VALUES = {
    "int": ([1, None, 2**63 - 1], ("int", [1, None, 2**63 - 1])),
    "int and float": ([1, 2.5], ("float", [1.0, 2.5])),
    "nan": ([1.5, math.nan, math.inf], ("float", [1.5, None, None])),
    "bool": ([True, False], ("bool", [True, False])),
    "bool and int": ([True, 1], ("text", ["true", "1"])),
    "digits of JSON are text": (["1", "2"], ("text", ["1", "2"])),
    "nulls first, text later": ([None, None, "x"], ("text", [None, None, "x"])),
    "nested": ([{"a": [1, "ü"]}, [1], "x"], ("text", ['{"a": [1, "ü"]}', "[1]", "x"])),
    "dates": (
        [datetime.date(2024, 5, 1), datetime.datetime(2024, 5, 1, 12, 30)],
        ("text", ["2024-05-01", "2024-05-01T12:30:00"]),
    ),
    "decimal": ([decimal.Decimal("1.10")], ("text", ["1.10"])),
    "larger than 64 bit": ([2**64, 1], ("text", [str(2**64), "1"])),
    "what UTF-8 cannot spell": (["\ud800x"], ("text", ["\\ud800x"])),
}


@pytest.mark.parametrize("name", VALUES)
def test_typed_values_keep_their_type_through_the_sort(name):
    values, expected = VALUES[name]
    assert resolve(values) == expected


def test_bytes_are_refused():
    with pytest.raises(InputError, match="the column c holds bytes"):
        resolve([b"x"])


@pytest.mark.parametrize(
    ("before", "values", "expected"),
    [
        ("null", [Cell("x")], ("text", ["x"])),
        ("null", [None], ("null", [None])),
        ("int", [None, 3], ("int", [None, 3])),
        ("int", [Cell(""), Cell("3")], ("int", [None, 3])),
        ("float", [Cell("3")], ("float", [3.0])),
        ("text", [Cell("3"), Cell("007")], ("text", ["3", "007"])),
    ],
)
def test_later_values_that_fit_take_the_type_of_the_run(before, values, expected):
    assert resolve(values, before) == expected


@pytest.mark.parametrize(
    ("before", "values", "new"),
    [
        ("int", [Cell("x")], "text"),
        ("int", [2.5], "float"),
        ("text", [3], "int"),
        ("bool", [Cell("1")], "int"),
        ("float", ["x"], "text"),
    ],
)
def test_later_values_that_do_not_fit_are_refused(before, values, new):
    with pytest.raises(InputError, match=f"the column c holds {before} in this run, and {new} here"):
        resolve(values, before)


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_names_that_hits_and_tables_have_are_refused(name):
    with pytest.raises(InputError, match=f"cannot be named {name}"):
        KeptColumns(["title", name])
