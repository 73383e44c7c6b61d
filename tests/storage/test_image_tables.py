from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
from image_files import image_bytes, parquet_bytes

from ckn_scale.errors import ImageRejected
from ckn_scale.storage import image_tables
from ckn_scale.storage.image_sources import list_images, read_image

BYTES = [image_bytes(i) for i in range(8)]
HUGGING_FACE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
TABLES = {
    "img2dataset": pa.table(
        {"key": list("abcdefgh"), "caption": [f"no. {i}" for i in range(8)], "jpg": BYTES}
    ),
    "laion": pa.table({"URL": ["u"] * 8, "caption": [f"no. {i}" for i in range(8)], "image_bytes": BYTES}),
    "hugging_face": pa.table(
        {
            "image": pa.array([{"bytes": data, "path": "x.jpg"} for data in BYTES], HUGGING_FACE),
            "caption": [f"no. {i}" for i in range(8)],
        }
    ),
    "only_binary": pa.table(
        {"x": pa.array(BYTES, pa.large_binary()), "caption": [f"no. {i}" for i in range(8)]}
    ),
}


@pytest.mark.parametrize("layout", TABLES)
def test_rows_are_listed_and_read(store, layout):
    store.write_new("0.parquet", parquet_bytes(TABLES[layout]))
    url = f"{store.url}/0.parquet"
    refs = list(list_images(url, keep=["caption"]))
    assert [ref.uri for ref in refs] == [f"{url}#{row:08d}" for row in range(8)]
    assert refs[5].columns == {"caption": "no. 5"}
    assert [ref.uri for ref in list_images(url)] == [ref.uri for ref in refs]
    for row in (7, 0, 3, 2):
        assert read_image(refs[row].uri) == BYTES[row]


def test_hugging_face_row_with_a_path_only_is_read_beside_the_table(store):
    rows = pa.array([{"bytes": None, "path": "images/x.jpg"}, {"bytes": None, "path": None}], HUGGING_FACE)
    store.write_new("0.parquet", parquet_bytes(pa.table({"image": rows})))
    store.write_new("images/x.jpg", b"beside")
    assert read_image(f"{store.url}/0.parquet#00000000") == b"beside"
    with pytest.raises(ImageRejected, match=r"row 1 of .* has no bytes") as caught:
        read_image(f"{store.url}/0.parquet#00000001")
    assert caught.value.state == "empty"


def test_row_without_bytes_is_empty(tmp_path):
    """A download that failed."""
    path = tmp_path / "0.parquet"
    path.write_bytes(parquet_bytes(pa.table({"jpg": pa.array([None, b"", b"x"], pa.binary())})))
    for row in (0, 1):
        with pytest.raises(ImageRejected) as caught:
            read_image(f"{path}#{row:08d}")
        assert caught.value.state == "empty"
    assert read_image(f"{path}#00000002") == b"x"


@pytest.mark.parametrize("member", ["00000008", "x", "-1"])
def test_row_that_is_not_there_is_missing(tmp_path, member):
    path = tmp_path / "0.parquet"
    path.write_bytes(parquet_bytes(TABLES["laion"]))
    with pytest.raises(ImageRejected) as caught:
        read_image(f"{path}#{member}")
    assert caught.value.state == "missing"


def test_row_groups_are_read_once_and_kept_bounded(tmp_path, monkeypatch):
    path = tmp_path / "0.parquet"
    path.write_bytes(parquet_bytes(TABLES["laion"], rows_per_group=2))
    reads = []
    read_group = image_tables._read_group
    monkeypatch.setattr(image_tables, "_read_group", lambda *args: reads.append(args) or read_group(*args))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda row: read_image(f"{path}#{row:08d}"), range(8))) == BYTES
    assert len(reads) == 4
    monkeypatch.setattr(image_tables, "_BYTES_KEPT", 1)
    for row in range(8):
        read_image(f"{path}#{row:08d}")
    image_tables._groups.clear()
    for row in range(8):
        assert read_image(f"{path}#{row:08d}") == BYTES[row]
        assert len(image_tables._groups) == 1


OUTSIDE = {
    "absolute": "{secret}",
    "file scheme": "file://{secret}",
    "short file scheme": "file:{secret}",
    "up": "../secret/key.jpg",
    "up in the middle": "images/../../secret/key.jpg",
    "home": "~/key.jpg",
    "http": "http://127.0.0.1:9/key.jpg",
    "other store": "s3://bucket/key.jpg",
    "chained": "zip://key.jpg::{secret}",
    "drive": "C:\\key.jpg",
    "nul": "x\0.jpg",
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_path_in_a_table_stays_below_its_folder(tmp_path, name):
    secret = tmp_path / "secret" / "key.jpg"
    secret.parent.mkdir()
    secret.write_bytes(b"root:x:0")
    (tmp_path / "tables").mkdir()
    path = tmp_path / "tables" / "0.parquet"
    rows = pa.array([{"bytes": None, "path": OUTSIDE[name].format(secret=secret)}], HUGGING_FACE)
    path.write_bytes(parquet_bytes(pa.table({"image": rows})))
    with pytest.raises(ImageRejected) as caught:
        read_image(f"{path}#00000000")
    assert caught.value.state == "unsupported"
    assert "row 0 of" in caught.value.reason
    assert "key" not in caught.value.reason


def test_damaged_page_is_a_corrupt_row(tmp_path):
    """Arrow tells of it by a plain OSError, which is not the store's."""
    path = tmp_path / "0.parquet"
    data = bytearray(parquet_bytes(pa.table({"jpg": [b"x" * 3000 + b"%d" % i for i in range(40)]}), 40))
    data[8:200] = b"\xff" * 192
    path.write_bytes(data)
    with pytest.raises(ImageRejected) as caught:
        read_image(f"{path}#00000000")
    assert caught.value.state == "corrupt"
