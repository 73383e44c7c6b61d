"""One digest per stage: of the content alone, and of all of it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from vector_tables import DIM, make_vectors

from ckn_scale import schemas
from ckn_scale.errors import CorruptData
from ckn_scale.runs.digest import digest_rows
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.stored_files import read_table


@pytest.fixture(params=["local", "s3"])
def run(request, tmp_path) -> RunFolder:
    url = str(tmp_path / "run") if request.param == "local" else request.getfixturevalue("s3").url("run")
    return RunFolder.create(url, {})


def make_descriptors(num_rows: int = 6) -> pa.Table:
    rng = np.random.default_rng(1)
    counts = [0, 3, 1, 0, 2, 5][:num_rows]
    rows = {
        "image_id": range(num_rows),
        "num_points": counts,
        "frames": [rng.bytes(9 * n) for n in counts],
        "words": [rng.bytes(2 * n) for n in counts],
        "codes": [rng.bytes(16 * n) for n in counts],
    }
    return pa.table({name: rows.get(name, [b""] * num_rows) for name in schemas.DESCRIPTORS.names},
                    schema=schemas.DESCRIPTORS)  # fmt: skip


def set_value(table: pa.Table, row: int, column: str, value: object) -> pa.Table:
    values = table.column(column).to_pylist()
    values[row] = value
    index = table.column_names.index(column)
    return table.set_column(
        index, table.schema.field(column), pa.array(values, table.schema.field(column).type)
    )


def flip(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ (1 << bit % 8)]) + data[bit // 8 + 1 :]


@pytest.mark.parametrize("cuts", [[], [7], [1, 2, 3], list(range(20)), [0, 0, 20]])
def test_digest_does_not_depend_on_sharding(cuts):
    table = make_vectors()
    bounds = [0, *cuts, table.num_rows]
    pieces = [table.slice(a, b - a) for a, b in pairwise(bounds)]
    assert digest_rows(pieces) == digest_rows([table])


def test_digest_does_not_depend_on_order_inside_a_table():
    table = make_vectors()
    assert digest_rows([table.take(list(reversed(range(20))))]) == digest_rows([table])


def test_digest_does_not_depend_on_column_order_chunks_or_what_lies_under_nulls():
    table = make_vectors()
    chunked = pa.concat_tables([table.slice(0, 3), table.slice(3)])
    assert digest_rows([chunked.select(list(reversed(table.column_names)))]) == digest_rows([table])
    masked = pa.array([1, 9, 3], pa.int32(), mask=np.array([False, True, False]))
    plain = pa.array([1, None, 3], pa.int32())
    ids = pa.array([0, 1, 2])
    assert digest_rows([pa.table({"image_id": ids, "x": masked})]) == digest_rows(
        [pa.table({"image_id": ids, "x": plain})]
    )


def test_digest_does_not_depend_on_file_names_and_attempts(run):
    table = make_vectors()
    whole = [run.write_table("vectors", 0, "aa", table)]
    parts = [run.write_table("vectors", i, f"b{i}", table.slice(10 * i, 10)) for i in range(2)]
    assert digest_rows(read_table(run.store, f) for f in whole) == digest_rows(
        read_table(run.store, f) for f in parts
    )


def test_digest_changes_with_every_bit_of_a_vector():
    table = make_vectors(4)
    vector = table.column("vector")[1].as_py()
    digests = {digest_rows([set_value(table, 1, "vector", flip(vector, bit))]) for bit in range(16 * DIM)}
    assert len(digests | {digest_rows([table])}) == 16 * DIM + 1


@pytest.mark.parametrize(
    ("row", "column", "value"),
    [
        (1, "state", "no_keypoints"),
        (0, "state", "empty"),
        (0, "reason", "Mull"),
        (0, "reason", None),
        (1, "reason", None),  # null is not the empty text
        (1, "width_px", 641),
        (1, "width_px", None),
        (0, "width_px", 0),
        (1, "vector", None),
        (0, "vector", bytes(2 * DIM)),
        (19, "image_id", 20),
    ],
)
def test_digest_changes_with_every_kind_of_value(row, column, value):
    table = make_vectors()
    assert digest_rows([set_value(table, row, column, value)]) != digest_rows([table])


@pytest.mark.parametrize("column", ["frames", "words", "codes"])
def test_digest_changes_with_a_bit_of_a_descriptor(column):
    table = make_descriptors()
    data = table.column(column)[5].as_py()
    for bit in range(0, 8 * len(data), 5):
        assert digest_rows([set_value(table, 5, column, flip(data, bit))]) != digest_rows([table])


def test_digest_sees_a_byte_that_moves_to_the_next_row():
    a = pa.table({"image_id": [0, 1], "codes": [b"ab", b"c"]})
    b = pa.table({"image_id": [0, 1], "codes": [b"a", b"bc"]})
    assert digest_rows([a]) != digest_rows([b])


def test_digest_sees_a_missing_row():
    table = make_vectors()
    assert digest_rows([table.slice(0, 19)]) != digest_rows([table])


def test_digest_of_nothing():
    assert digest_rows([]) == digest_rows([make_vectors(0)])
    assert digest_rows([]) != digest_rows([make_vectors(1)])


def test_digest_refuses_a_row_that_comes_twice():
    table = make_vectors()
    with pytest.raises(CorruptData, match="comes twice"):
        digest_rows([pa.concat_tables([table, table.slice(3, 1)])])
    with pytest.raises(CorruptData, match="out of order"):
        digest_rows([table, table.slice(19)])


def test_digest_refuses_tables_of_different_form():
    with pytest.raises(CorruptData, match="differ in their columns"):
        digest_rows([pa.table({"image_id": [0], "x": [1]}), pa.table({"image_id": [1], "y": [1]})])
    with pytest.raises(CorruptData, match="differ in a column's type"):
        digest_rows([pa.table({"image_id": [0], "x": [1]}), pa.table({"image_id": [1], "x": ["1"]})])


def test_digest_by_a_key_of_two_columns():
    table = pa.table({"image_id": [0, 0, 1], "point": [0, 1, 0], "patch": [b"a", b"b", b"c"]})
    key = ("image_id", "point")
    assert digest_rows([table.slice(0, 1), table.slice(1)], key=key) == digest_rows([table], key=key)
    with pytest.raises(CorruptData, match="comes twice"):
        digest_rows([table])


def test_digest_takes_kept_columns_of_any_type():
    rows = {"image_id": [0, 1], "tags": [["a"], None], "price": [1.5, None], "sold": [True, False]}
    table = pa.table(rows)
    assert digest_rows([table.slice(0, 1), table.slice(1)]) == digest_rows([table])
    assert digest_rows([pa.table({**rows, "tags": [["b"], None]})]) != digest_rows([table])
    assert digest_rows([pa.table({**rows, "sold": [True, True]})]) != digest_rows([table])
