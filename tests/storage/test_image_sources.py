from __future__ import annotations

import os
import socket
from urllib.parse import quote

import pyarrow as pa
import pytest
from image_files import image_bytes, parquet_bytes, tar_bytes, webdataset_bytes, write_all

from ckn_scale.errors import ImageRejected, InputError, TransientStoreError
from ckn_scale.storage import image_sources, input_files
from ckn_scale.storage.image_sources import list_images, read_image
from ckn_scale.storage.retries import RetryPolicy
from ckn_scale.storage.run_folder import RunFolder


def uris(source, **options) -> list[str]:
    return sorted(ref.uri for ref in list_images(source, **options))


@pytest.fixture
def folder(store):
    names = ["a.jpg", "b/c.PNG", "b/d/e.webp", "b/notes.md", "list.json", "no_extension", "b/äö #1.jpeg"]
    write_all(store, {name: image_bytes(i) for i, name in enumerate(names)})
    return store


IMAGES = ["a.jpg", "b/c.PNG", "b/d/e.webp", "b/äö #1.jpeg"]


def test_folder_lists_images_below_it(folder):
    assert uris(folder.url) == [f"{folder.url}/{name}" for name in IMAGES]
    assert uris(f"{folder.url}/b/") == [f"{folder.url}/{name}" for name in IMAGES[1:]]


def test_folder_tells_size_and_etag(folder):
    ref = next(ref for ref in list_images(folder.url) if ref.uri.endswith("a.jpg"))
    assert ref.size_bytes == len(image_bytes(0))
    assert ref.etag
    assert ref.columns is None
    assert read_image(ref.uri) == image_bytes(0)


def test_every_listed_image_can_be_read(folder):
    assert sorted(read_image(uri) for uri in uris(folder.url)) == sorted(image_bytes(i) for i in (0, 1, 2, 6))


def test_glob_lists_what_matches(folder):
    assert uris(f"{folder.url}/*.jpg") == [f"{folder.url}/a.jpg"]
    assert uris(f"{folder.url}/b/**/*.webp") == [f"{folder.url}/b/d/e.webp"]
    assert uris(f"{folder.url}/[b]") == [
        f"{folder.url}/{name}" for name in IMAGES[1:]
    ]  # a folder that matches


def test_glob_in_the_middle(store):
    write_all(
        store,
        {f"{day}/{camera}/{i}.jpg": b"x" for day in ("mon", "tue") for camera in "ab" for i in range(2)},
    )
    assert uris(f"{store.url}/*/a/1.jpg") == [f"{store.url}/mon/a/1.jpg", f"{store.url}/tue/a/1.jpg"]
    assert len(uris(f"{store.url}/m*")) == 4
    assert len(uris(f"{store.url}/**/0.jpg")) == 4
    assert len(uris(f"{store.url}/**")) == 8


def test_bucket_cannot_be_a_pattern(s3):
    with pytest.raises(InputError, match="bucket cannot be a pattern"):
        uris("s3://ck*/x.jpg")


def test_single_file_is_kept_whatever_its_name(folder):
    assert uris(f"{folder.url}/no_extension") == [f"{folder.url}/no_extension"]


def test_several_sources_follow_each_other(folder):
    assert uris([f"{folder.url}/a.jpg", f"{folder.url}/b/d"]) == [
        f"{folder.url}/a.jpg",
        f"{folder.url}/b/d/e.webp",
    ]


def test_large_folder_comes_page_by_page(s3, monkeypatch):
    from ckn_scale.storage.store import Store

    store = Store(s3.url("pages"))
    write_all(store, {f"{i}.jpg": b"x" for i in range(7)})
    fs = store.fs
    call = fs.call_s3

    def small_pages(method, **options):
        return call(method, MaxKeys=3, **options)

    monkeypatch.setattr(fs, "call_s3", small_pages)
    assert uris(store.url) == [f"{store.url}/{i}.jpg" for i in range(7)]


def test_loop_of_links_ends(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.jpg").write_bytes(b"x")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "a" / "dangling.jpg").symlink_to(tmp_path / "nothing")
    assert uris(str(tmp_path / "a")) == [str(tmp_path / "a" / "x.jpg")]


def test_file_name_with_glob_signs_is_a_file(tmp_path):
    (tmp_path / "a[1].jpg").write_bytes(b"x")
    assert uris(str(tmp_path / "a[1].jpg")) == [str(tmp_path / "a[1].jpg")]


def test_name_that_is_not_utf8_is_listed_and_read(tmp_path):
    """As a file:// URL, which a plan can record; the rest of the folder is listed as ever."""
    folder = bytes(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    (tmp_path / "a.jpg").write_bytes(b"a")
    for name, data in {b"\xfc.jpg": b"odd", b"0.tar": tar_bytes({"b.jpg": b"b"})}.items():
        with open(folder + b"/" + name, "wb") as file:
            file.write(data)
    found = uris(str(tmp_path))
    escaped = f"file://{quote(str(tmp_path))}/caf%E9"
    assert found == sorted([f"{tmp_path}/a.jpg", f"{escaped}/0.tar#b.jpg", f"{escaped}/%FC.jpg"])
    assert sorted(read_image(uri) for uri in found) == [b"a", b"b", b"odd"]
    assert uris(f"{tmp_path}/*/*.jpg") == [f"{escaped}/%FC.jpg"]
    assert uris(os.fsdecode(folder)) == [uri for uri in found if uri.startswith("file://")]
    for uri in found:
        uri.encode()
    with pytest.raises(ImageRejected) as caught:
        read_image(f"{escaped}/gone.jpg")
    caught.value.reason.encode()


def test_dot_files_and_folders_are_left_out(store):
    names = ["a.jpg", ".b.jpg", "._a.jpg", ".trash/c.jpg", "d/.e/f.jpg", "d/g.jpg", "d/.h.tar", "i.j/k.jpg"]
    write_all(store, {name: tar_bytes({"x.jpg": b"x"}) for name in names})
    shown = [f"{store.url}/{name}" for name in ("a.jpg", "d/g.jpg", "i.j/k.jpg")]
    assert uris(store.url) == shown
    assert uris(f"{store.url}/**") == shown
    assert uris(f"{store.url}/*") == shown
    assert uris(f"{store.url}/.*") == [
        f"{store.url}/{name}" for name in ("._a.jpg", ".b.jpg", ".trash/c.jpg")
    ]
    assert uris(f"{store.url}/.trash") == [f"{store.url}/.trash/c.jpg"]  # it was named


def test_dot_files_in_a_tar_are_left_out(tmp_path):
    """macOS packs `._x` beside each `x`, between the members of a key."""
    members = {"./._0.jpg": b"shadow", "./0.jpg": b"0", "./._0.json": b"shadow", "./0.json": b'{"a": 1}'}
    (tmp_path / "0.tar").write_bytes(tar_bytes(members))
    (ref,) = list_images(str(tmp_path / "0.tar"), keep=["a"])
    assert (ref.uri, ref.columns) == (f"{tmp_path}/0.tar#./0.jpg", {"a": 1})


def make_run(url: str) -> None:
    """A run with the tables that look most like images: thumbnails, and patches as the only binary column."""
    run = RunFolder.create(url, {"x": 1})
    thumbnails = pa.table({"image_id": [0], "jpeg": [b"x"]})
    patches = pa.table({"image_id": [0], "patch": [b"x"]})
    write_all(run.store, {"thumbnails/00000-a.parquet": parquet_bytes(thumbnails),
                          "samples/patches/00000-a.parquet": parquet_bytes(patches)})  # fmt: skip


@pytest.mark.parametrize("place", ["run", "b/deep/run", "2024.runs/x"])
def test_run_folder_is_never_listed(store, place):
    rows = pa.table({"jpg": [image_bytes(0)]})
    write_all(store, {"a.jpg": b"x", "b/c.jpg": b"x", "b/rows.parquet": parquet_bytes(rows)})
    make_run(f"{store.url}/{place}")
    expected = [f"{store.url}/a.jpg", f"{store.url}/b/c.jpg", f"{store.url}/b/rows.parquet#00000000"]
    assert uris(store.url) == expected
    assert uris(f"{store.url}/**") == expected
    assert uris(f"{store.url}/*") == expected
    with pytest.raises(InputError, match="is a run folder"):
        uris(f"{store.url}/{place}")


def test_run_json_of_others_is_no_run(store):
    write_all(store, {"a/run.json": b'{"settings": {}}', "a/x.jpg": b"x",
                      "b/run.json": b"[1", "b/y.jpg": b"x",
                      "b/z.parquet": parquet_bytes(pa.table({"jpg": [b"x"]}))})  # fmt: skip
    assert uris(store.url) == [
        f"{store.url}/{name}" for name in ("a/x.jpg", "b/y.jpg", "b/z.parquet#00000000")
    ]


def test_only_regular_files_are_listed(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"x")
    os.mkfifo(tmp_path / "fifo.jpg")
    os.mkfifo(tmp_path / "fifo.tar")
    os.mkfifo(tmp_path / "run.json")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s.jpg"))
        assert uris(str(tmp_path)) == uris(f"{tmp_path}/*") == [f"{tmp_path}/a.jpg"]
    with pytest.raises(InputError, match="neither a file nor a folder"):
        uris(str(tmp_path / "fifo.jpg"))


def test_list_whose_names_do_not_resolve_says_so(store):
    write_all(store, {"photos/a.jpg": b"x", "lists/0.txt": b"a.jpg\nb.jpg\n", "lists/1.csv": b"path\na.jpg\n",
                      "lists/2.txt": b"b.jpg\n../photos/a.jpg\n",
                      "lists/3.txt": "\n".join(f"{i}.jpg" for i in range(150)).encode()})  # fmt: skip
    for name, count in (("0.txt", "no name"), ("1.csv", "no name"), ("3.txt", "none of the first 100 names")):
        with pytest.raises(
            InputError, match=rf"{count} in .*/{name} .* looked for at .*/lists/\w\.jpg.*Relative"
        ):
            uris(f"{store.url}/lists/{name}")
    if store.is_local:  # one of two is found: the other becomes a row
        assert len(uris(f"{store.url}/lists/2.txt")) == 2


def test_text_list_keeps_everything_it_names(store):
    lines = [
        "# my images",
        "",
        "a.jpg",
        "sub/odd name.bin  ",
        "s3://bucket/key.jpg",
        "/abs/x.png",
        "https://h/i?w=1",
    ]
    store.write_new("lists/images.txt", "\r\n".join(lines).encode())
    assert [ref.uri for ref in list_images(f"{store.url}/lists/images.txt")] == [
        f"{store.url}/lists/a.jpg",
        f"{store.url}/lists/sub/odd name.bin",
        "s3://bucket/key.jpg",
        "/abs/x.png",
        "https://h/i?w=1",
    ]


def test_list_of_tars_means_their_members(store):
    write_all(store, {"list.txt": b"0.tar\n1.tar\n", "0.tar": webdataset_bytes(range(2)),
                      "1.tar": webdataset_bytes(range(2, 3))})  # fmt: skip
    assert uris(f"{store.url}/list.txt") == [
        f"{store.url}/0.tar#000000000.jpg",
        f"{store.url}/0.tar#000000001.jpg",
        f"{store.url}/1.tar#000000002.jpg",
    ]


@pytest.mark.parametrize("column", ["uri", "URL", "path", "image_path", "Filename"])
def test_csv_list_finds_its_column_and_keeps_others(store, column):
    text = f'title,{column},price\n"a, b",x.jpg,3\nü,/abs/y.jpg,\n,,\n'
    write_all(store, {"list.csv": b"\xef\xbb\xbf" + text.encode(), "x.jpg": b"x"})
    assert [
        (ref.uri, ref.columns) for ref in list_images(f"{store.url}/list.csv", keep=["title", "price"])
    ] == [
        (f"{store.url}/x.jpg", {"title": "a, b", "price": "3"}),
        ("/abs/y.jpg", {"title": "ü", "price": ""}),
    ]


def test_tsv_list(store):
    write_all(store, {"list.tsv": b"path\ttag\nx.jpg\tq\n", "x.jpg": b"x"})
    assert [ref.columns for ref in list_images(f"{store.url}/list.tsv", keep=["tag"])] == [{"tag": "q"}]


def test_parquet_list_finds_its_column_and_keeps_others(store):
    table = pa.table({"id": [7, 8, 9], "url": ["https://h/a", None, "b.jpg"], "caption": ["x", "y", None]})
    store.write_new("list.parquet", parquet_bytes(table))
    assert [
        (ref.uri, ref.columns) for ref in list_images(f"{store.url}/list.parquet", keep=["id", "caption"])
    ] == [
        ("https://h/a", {"id": 7, "caption": "x"}),
        (f"{store.url}/b.jpg", {"id": 9, "caption": None}),
    ]


def test_folder_of_all_kinds(store):
    """img2dataset's output: tars with a Parquet of descriptions beside each, which names no image."""
    described = pa.table({"url": ["https://h/a"], "caption": ["x"]})
    rows = pa.table({"jpg": [image_bytes(0)]})
    write_all(store, {"0.tar": webdataset_bytes(range(1)), "0.parquet": parquet_bytes(described),
                      "rows/0.parquet": parquet_bytes(rows), "0.json": b"{}", "x.jpg": b"x"})  # fmt: skip
    assert uris(store.url) == sorted(
        [f"{store.url}/0.tar#000000000.jpg", f"{store.url}/rows/0.parquet#00000000", f"{store.url}/x.jpg"]
    )


BAD_INPUTS = {
    "text.txt": (b"\xff\xfe\x00binary\x80", "is not a text list"),
    "blank.txt": (b"\n# nothing\n", "there is no image in"),
    "zero.txt": (b"", "there is no image in"),
    "zero.csv": (b"", "has no column of image URIs"),
    "columns.csv": (b"a,b\n1,2\n", "its text columns are a, b"),
    "binary.csv": (b"path\n\xff\xfe\n", "is not a text list"),
    "bad.parquet": (b"PAR1 not really", "is not a whole Parquet file"),
    "zero.parquet": (b"", "is not a whole Parquet file"),
    "numbers.parquet": (parquet_bytes(pa.table({"x": [1]})), "its text columns are none"),
    "norows.parquet": (parquet_bytes(pa.table({"jpg": pa.array([], pa.binary())})), "there is no image in"),
    "bad.tar": (b"not a tar" * 200, "is not a whole tar file"),
    "zero.tar": (b"", "is not a whole tar file"),
    "cut.tar": (webdataset_bytes(range(40))[:20000], "is not a whole tar file"),
    "text.tar": (tar_bytes({"a.txt": b"x"}), "there is no image in"),
    "gzip.tar.gz": (b"\x1f\x8b", "is a compressed tar"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_an_input_error(store, name):
    data, message = BAD_INPUTS[name]
    store.write_new(name, data)
    with pytest.raises(InputError, match=message):
        uris(f"{store.url}/{name}")


@pytest.mark.parametrize(
    "source", ["none.txt", "none/", "none.jpg", "none.tar", "none/*.jpg", "no*", "none.parquet"]
)
def test_missing_source_is_an_input_error(store, source):
    store.write_new("other", b"x")
    with pytest.raises(InputError, match=r"does not exist|no file matches"):
        uris(f"{store.url}/{source}")


def test_folder_without_images_is_an_input_error(store):
    store.write_new("docs/a.md", b"x")
    with pytest.raises(InputError, match="there is no image in"):
        uris(f"{store.url}/docs")


def test_no_source_is_an_input_error():
    with pytest.raises(InputError, match="no images were named"):
        uris([])


@pytest.mark.parametrize("name", ["a.jpg", "list.txt", "list.csv", "list.parquet", "rows.parquet", "0.tar"])
def test_column_that_is_not_there_is_an_input_error(tmp_path_store, name):
    store = tmp_path_store
    write_all(store, {"a.jpg": b"x", "list.txt": b"a.jpg\n", "list.csv": b"path\na.jpg\n",
                      "list.parquet": parquet_bytes(pa.table({"path": ["a.jpg"]})),
                      "rows.parquet": parquet_bytes(pa.table({"jpg": [b"x"]})),
                      "0.tar": webdataset_bytes(range(2))})  # fmt: skip
    with pytest.raises(InputError, match="colour"):
        uris(f"{store.url}/{name}", keep=["colour"])


def test_wrong_credentials_while_listing_are_one_sentence(s3, monkeypatch):
    url = s3.url("x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    for source in (url, f"{url}/*.jpg", f"{url}/list.txt"):
        with pytest.raises(InputError, match="refused"):
            uris(source)


def test_read_image_of_a_gone_file_is_missing(store):
    for name in ("gone.jpg", "gone/gone.jpg", "gone.tar#a.jpg", "gone.parquet#00000000"):
        with pytest.raises(ImageRejected) as caught:
            read_image(f"{store.url}/{name}")
        assert caught.value.state == "missing"


@pytest.mark.parametrize("name", ["0.tar#a.jpg", "0.parquet#00000000"])
def test_read_image_in_a_broken_container_is_corrupt(store, name):
    store.write_new(name.partition("#")[0], b"broken " * 100)
    with pytest.raises(ImageRejected) as caught:
        read_image(f"{store.url}/{name}")
    assert caught.value.state == "corrupt"


def test_read_image_with_a_failing_store_is_transient(tmp_path, monkeypatch):
    def fail(self):
        raise ConnectionResetError("reset")

    monkeypatch.setattr(image_sources, "_READ_RETRY", RetryPolicy(attempts=3, first_delay_s=0))
    monkeypatch.setattr(input_files.InputFile, "read", fail)
    with pytest.raises(TransientStoreError, match="ConnectionResetError"):
        read_image(str(tmp_path / "a.jpg"))
