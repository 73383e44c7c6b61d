from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from ckn_scale.errors import CorruptData
from ckn_scale.schemas import DESCRIPTORS
from ckn_scale.storage.point_files import PointFile, read_point_ids, serialise_points

COUNTS = {3: 5, 4: 0, 9: 40, 12: 1}  # points by image; 4 has no row in the stage


def draw_points(count: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "frames": rng.integers(0, 256, (count, 9), dtype=np.uint8),
        "words": rng.integers(0, 8, count).astype(np.uint16),
        "codes": rng.integers(0, 256, (count, 16), dtype=np.uint8),
    }


def make_tables(counts: dict[int, int]) -> tuple[pa.Table, pa.Table]:
    ids = list(counts)
    images = pa.table(
        {
            "image_id": pa.array(ids, pa.int64()),
            "width_px": pa.array([100 + one for one in ids], pa.int32()),
            "height_px": pa.array([50 + one for one in ids], pa.int32()),
        }
    )
    rows = [
        {"image_id": one, "num_points": count}
        | {name: values.tobytes() for name, values in draw_points(count, one).items()}
        for one, count in reversed(counts.items())  # the stage may be in any order
        if count
    ]
    return images, pa.Table.from_pylist(rows, schema=DESCRIPTORS)


@pytest.fixture
def opened(tmp_path):
    path = tmp_path / "shard.points"
    path.write_bytes(serialise_points(*make_tables(COUNTS)))
    return PointFile(path)


def test_point_file_gives_the_points_of_any_rows_by_word_then_strength(opened):
    assert opened.ids.tolist() == list(COUNTS)
    found, frames = opened.read_points([2, 0, 1, 2]), opened.read_frames([2, 0, 1, 2])
    assert found.offsets.tolist() == [0, 40, 45, 45, 85]
    for place, image_id in ((0, 9), (1, 3), (3, 9)):
        part, drawn = slice(*found.offsets[place : place + 2]), draw_points(COUNTS[image_id], image_id)
        order = np.argsort(drawn["words"], kind="stable")
        np.testing.assert_array_equal(found.words[part], drawn["words"][order])
        np.testing.assert_array_equal(found.codes[part], drawn["codes"][order])
        np.testing.assert_array_equal(frames[part], drawn["frames"][order])


def test_point_file_knows_the_sizes_and_which_it_does_not_know(opened):
    assert opened.sizes_px([0, 3]).tolist() == [[103, 53, 0, 0], [112, 62, 0, 0]]


def test_no_rows_and_rows_without_points_are_read(opened, tmp_path):
    assert opened.read_points([]).offsets.tolist() == [0]
    assert len(opened.read_points([1]).words) == len(opened.read_frames([1])) == 0
    path = tmp_path / "empty.points"
    path.write_bytes(serialise_points(*make_tables({})))
    assert len(PointFile(path).ids) == 0
    path.write_bytes(serialise_points(*make_tables({7: 0})))
    assert PointFile(path).read_points([0]).offsets.tolist() == [0, 0]


def test_equal_points_give_equal_bytes_however_the_stage_was_cut():
    images, points = make_tables(COUNTS)
    cut = pa.concat_tables([points.slice(2), points.slice(0, 2)])
    assert serialise_points(images, points) == serialise_points(images, cut)


def test_serialise_points_refuses_what_does_not_fit():
    images, points = make_tables(COUNTS)
    with pytest.raises(ValueError, match="ascend"):
        serialise_points(images.take([1, 0]), points)
    short = points.set_column(3, "words", pa.array([b"\0"] * len(points), pa.binary()))
    with pytest.raises(ValueError, match="do not have 1,"):
        serialise_points(images, short)


def test_a_file_of_another_form_is_corrupt(tmp_path):
    data = serialise_points(*make_tables(COUNTS))
    assert read_point_ids(data).tolist() == list(COUNTS)
    for bad in (data[:-1], data[:40], b"x" + data[1:]):
        path = tmp_path / "bad.points"
        path.write_bytes(bad)
        with pytest.raises(CorruptData):
            PointFile(path)
        with pytest.raises(CorruptData):
            read_point_ids(bad)


def test_a_file_that_is_cut_while_it_is_open_is_corrupt(opened):
    with opened._path.open("r+b") as file:
        file.truncate(opened._path.stat().st_size - 20)
    with pytest.raises(CorruptData, match="ends before"):
        opened.read_frames([3])
