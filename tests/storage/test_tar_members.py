from __future__ import annotations

import tarfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from image_files import image_bytes, tar_bytes, webdataset_bytes

from ckn_scale.errors import ImageRejected
from ckn_scale.storage import tars
from ckn_scale.storage.image_sources import list_images, read_image
from ckn_scale.storage.input_files import InputFile
from ckn_scale.storage.store import Store


@pytest.fixture
def tar(store) -> str:
    store.write_new("0.tar", webdataset_bytes(range(30)))
    return f"{store.url}/0.tar"


def test_members_are_listed_with_size_and_columns(tar):
    refs = list(list_images(tar, keep=["caption", "txt"]))
    assert [ref.uri for ref in refs] == [f"{tar}#{i:09d}.jpg" for i in range(30)]
    assert [ref.size_bytes for ref in refs] == [len(image_bytes(i)) for i in range(30)]
    assert refs[3].columns == {"caption": "no. 3", "txt": "no. 3"}


def test_members_are_read_with_and_without_etag(tar):
    for i, ref in enumerate(list_images(tar)):
        assert read_image(ref.uri, etag=ref.etag) == image_bytes(i)
        assert read_image(ref.uri) == image_bytes(i)


def test_member_with_etag_is_one_range_read(tar, monkeypatch):
    ref = list(list_images(tar))[7]
    reads = []
    read_range = InputFile.read_range

    def count(self, start, length):
        reads.append((start, length))
        return read_range(self, start, length)

    monkeypatch.setattr(InputFile, "read_range", count)
    assert read_image(ref.uri, etag=ref.etag) == image_bytes(7)
    assert [length for _, length in reads] == [len(image_bytes(7)) + tars.HEADER_BYTES]


def test_member_is_found_again_in_a_replaced_tar(tmp_path):
    path = tmp_path / "0.tar"
    path.write_bytes(tar_bytes({"a.jpg": b"a" * 700, "b.jpg": b"b" * 900}))
    refs = {ref.uri: ref for ref in list_images(str(path))}
    assert read_image(f"{path}#b.jpg") == b"b" * 900  # an index is kept now
    path.write_bytes(tar_bytes({"b.jpg": b"b" * 900, "a.jpg": b"a" * 700}))
    for name, data in (("a.jpg", b"a" * 700), ("b.jpg", b"b" * 900)):
        uri = f"{path}#{name}"
        assert read_image(uri) == data
        assert read_image(uri, etag=refs[uri].etag) == data


def test_member_that_is_not_there_is_missing(tar):
    with pytest.raises(ImageRejected, match=r"has no member none\.jpg"):
        read_image(f"{tar}#none.jpg")


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize(
    "name", ["./a.jpg", "x/" * 45 + "b.jpg", "x" * 95 + "/" + "y" * 60 + ".jpg", "ü/é #1.jpg"]
)
def test_members_of_every_tar_format_and_name(tmp_path, format, name):
    path = tmp_path / "0.tar"
    path.write_bytes(tar_bytes({"first.jpg": b"first", name: b"data", "last.jpg": b"last"}, format))
    for ref, data in zip(list_images(str(path)), (b"first", b"data", b"last"), strict=True):
        assert read_image(ref.uri, etag=ref.etag) == data
        assert read_image(ref.uri) == data
    assert f"{path}#{name}" in {ref.uri for ref in list_images(str(path))}


def test_links_and_folders_in_a_tar_are_no_images(tmp_path):
    path = tmp_path / "0.tar"
    (tmp_path / "d.jpg").mkdir()
    (tmp_path / "a.jpg").write_bytes(b"a")
    (tmp_path / "link.jpg").symlink_to("a.jpg")
    with tarfile.open(path, "w") as archive:
        for name in ("a.jpg", "d.jpg", "link.jpg"):
            archive.add(tmp_path / name, name)
    assert [ref.uri for ref in list_images(str(path))] == [f"{path}#a.jpg"]


def test_empty_member_is_read_as_no_bytes(tmp_path):
    path = tmp_path / "0.tar"
    path.write_bytes(tar_bytes({"a.jpg": b"", "b.jpg": b"b"}))
    assert [read_image(ref.uri, etag=ref.etag) for ref in list_images(str(path))] == [b"", b"b"]


def test_scan_of_a_remote_tar_takes_few_requests(s3, monkeypatch):
    store = Store(s3.url("tar"))
    store.write_new("0.tar", webdataset_bytes(range(200)))
    requests = []
    read_range = InputFile.read_range

    def count(self, start, length):
        requests.append(start)
        return read_range(self, start, length)

    monkeypatch.setattr(InputFile, "read_range", count)
    assert len(list(list_images(f"{store.url}/0.tar", keep=["caption"]))) == 200
    assert len(requests) == 1


def test_threads_share_one_scan(tmp_path, monkeypatch):
    path = tmp_path / "0.tar"
    path.write_bytes(webdataset_bytes(range(50)))
    scans = []
    scan = tars._scan
    monkeypatch.setattr(tars, "_scan", lambda file: scans.append(1) or scan(file))
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda i: read_image(f"{path}#{i:09d}.jpg"), range(50)))
    assert read == [image_bytes(i) for i in range(50)]
    assert len(scans) == 1


def test_number_of_kept_indexes_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(tars, "_INDEXES_KEPT", 3)
    for i in range(6):
        (tmp_path / f"{i}.tar").write_bytes(tar_bytes({"a.jpg": b"%d" % i}))
    for i in range(6):
        assert read_image(f"{tmp_path}/{i}.tar#a.jpg") == b"%d" % i
    assert len(tars._indexes) <= 3
