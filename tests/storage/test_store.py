from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from threading import Barrier

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckn_scale.errors import InputError, UnsupportedStore
from ckn_scale.storage.store import Store

NUM_WRITERS = 24


def test_write_new_then_read(store):
    store.write_new("vectors/00001-a.parquet", b"0123456789")
    assert store.read("vectors/00001-a.parquet") == b"0123456789"
    assert store.size("vectors/00001-a.parquet") == 10
    assert store.exists("vectors/00001-a.parquet")
    assert not store.exists("vectors")  # a folder is not a file


def test_write_new_never_overwrites(store):
    store.write_new("a", b"first")
    store.write_new("a", b"first")  # the retry of a write whose reply was lost
    with pytest.raises(FileExistsError, match="other bytes"):
        store.write_new("a", b"second")
    assert store.read("a") == b"first"


def test_write_new_empty_file(store):
    store.write_new("empty", b"")
    assert store.read("empty") == b""
    assert store.size("empty") == 0


@pytest.mark.parametrize(("start", "length", "expected"), [(0, 3, b"012"), (4, 2, b"45"), (8, 9, b"89")])
def test_read_range_gives_the_span(store, start, length, expected):
    store.write_new("a", b"0123456789")
    assert store.read_range("a", start, length) == expected


def test_read_missing_raises_file_not_found(store):
    with pytest.raises(FileNotFoundError):
        store.read("nothing")
    with pytest.raises(FileNotFoundError):
        store.size("nothing")
    assert not store.exists("nothing")


def test_list_folders_names_what_lies_in_a_folder_and_nothing_below(store):
    for path in ("commits/a/1", "commits/b-1/1", "commits/b-1/c/1", "commits/file"):
        store.write_new(path, b"x")
    assert store.list_folders("commits") == ["a", "b-1"]
    assert store.list_folders("nothing") == []


def test_delete_is_repeatable(store):
    store.write_new("a/b", b"x")
    store.delete("a/b")
    store.delete("a/b")
    assert not store.exists("a/b")
    assert store.list() == []


def test_modified_at_is_now(store):
    store.write_new("a", b"x")
    assert abs(store.modified_at("a") - time.time()) < 30
    with pytest.raises(FileNotFoundError):
        store.modified_at("b")


def test_list_is_sorted_and_never_stale(store):
    assert store.list("commits") == []
    for name in ("commits/b/2", "commits/a/1", "commits/0", "other/x"):
        store.write_new(name, b"x")
        assert name in store.list(name.split("/")[0])
    assert store.list("commits") == ["commits/0", "commits/a/1", "commits/b/2"]
    assert store.list("commits", recursive=False) == ["commits/0"]
    assert store.list("comm") == []  # a folder, not the beginning of a name
    assert store.list() == ["commits/0", "commits/a/1", "commits/b/2", "other/x"]


def test_list_sees_writes_of_others(store, store_url):
    store.write_new("a/1", b"x")
    assert store.list("a") == ["a/1"]
    Store(store_url).write_new("a/2", b"x")
    assert store.list("a") == ["a/1", "a/2"]


def test_create_race_of_threads_has_one_winner(store):
    for race in range(10 if store.is_local else 1):  # a loser waits whole seconds on SeaweedFS
        start = Barrier(NUM_WRITERS)

        def write(i, path=f"race-{race}", start=start):
            start.wait()
            return store.create(path, b"writer %d" % i)

        with ThreadPoolExecutor(NUM_WRITERS) as pool:
            won = list(pool.map(write, range(NUM_WRITERS)))
        assert sum(won) == 1
        assert store.read(f"race-{race}") == b"writer %d" % won.index(True)


def _create_all(store, writer):
    return [store.create(f"race/{i:02d}", b"writer %d" % writer) for i in range(4)]


def test_create_race_of_spawned_processes_has_one_winner_each(store):
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
        outcomes = list(pool.map(_create_all, [store] * 3, range(3)))
    assert [sum(column) for column in zip(*outcomes, strict=True)] == [1] * 4
    for i, column in enumerate(zip(*outcomes, strict=True)):
        assert store.read(f"race/{i:02d}") == b"writer %d" % column.index(True)


def test_store_pickles_by_url(store):
    store.write_new("a", b"x")
    copy = pickle.loads(pickle.dumps(store))
    assert (copy.url, copy.retry) == (store.url, store.retry)
    assert copy.read("a") == b"x"


def test_self_test_passes_and_leaves_nothing(store):
    store.self_test()
    assert store.list() == []


class OverwritingFileSystem(MemoryFileSystem):
    """What an S3 look-alike does that ignores If-None-Match."""

    protocol = "overwriting"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        super().pipe_file(path, value, mode="overwrite", **kwargs)


class RacyFileSystem(OverwritingFileSystem):
    """One that looks first and writes then: right one after the other, wrong in a race."""

    protocol = "racy"

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        if self.exists(path):
            raise FileExistsError(path)
        time.sleep(0.05)
        super().pipe_file(path, value, **kwargs)


@pytest.mark.parametrize("filesystem", [OverwritingFileSystem, RacyFileSystem])
def test_self_test_refuses_a_store_where_two_creates_win(filesystem):
    fsspec.register_implementation(filesystem.protocol, filesystem, clobber=True)
    with pytest.raises(UnsupportedStore, match="second create"):
        Store(f"{filesystem.protocol}://run").self_test()


def test_self_test_refuses_memory():
    with pytest.raises(UnsupportedStore, match="memory://run lives in one process"):
        Store("memory://run").self_test()


def test_local_files_are_absolute_and_temp_files_are_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store("run")
    assert store.url == str(tmp_path / "run")
    assert Store(f"file://{tmp_path}/run").url == store.url
    assert Store("file:///a%20b").url == "/a b"
    store.write_new("a/b", b"x")
    assert store.local_path("a/b").read_bytes() == b"x"
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["b"]


def test_local_list_ignores_what_a_killed_write_left(tmp_path):
    store = Store(tmp_path)
    store.write_new("a/b", b"x")
    (tmp_path / "a" / ".new-0123").write_bytes(b"half")
    assert store.list("a") == ["a/b"]


def test_s3_has_no_local_path(s3):
    assert Store(s3.url("x")).local_path("a") is None


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x"])
def test_path_outside_the_store_is_refused(tmp_path, path):
    with pytest.raises(ValueError, match="relative"):
        Store(tmp_path).read(path)


@pytest.mark.parametrize("url", ["", "nosuch://x", "simplecache::s3://x", "zip://a::s3://b/c"])
def test_bad_url_is_refused(url):
    with pytest.raises(InputError):
        Store(url).read("a")


@pytest.mark.parametrize("wrong", [{"AWS_SECRET_ACCESS_KEY": "wrong"}, {"AWS_ACCESS_KEY_ID": "nobody"}])
def test_wrong_credentials_are_one_sentence_quickly(s3, monkeypatch, wrong):
    url = s3.url("locked")
    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    started = time.monotonic()
    for call in (lambda s: s.create("a", b"x"), lambda s: s.read("a"), lambda s: s.list("a")):
        with pytest.raises(InputError, match=r"access to s3://ckn/locked-.* was refused .*check keys"):
            call(Store(url))
    assert time.monotonic() - started < 5


def test_missing_credentials_are_one_sentence(s3, monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(InputError, match="Unable to locate credentials"):
        Store(s3.url("x")).read("a")


FILL_THE_DISK = """
import resource, sys
from ckn_scale.errors import UnsupportedStore
from ckn_scale.storage.store import Store
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    Store(sys.argv[1]).write_new("vectors/1", bytes(1_000_000))
except UnsupportedStore as error:
    sys.exit(str(error))
"""


def test_full_disk_leaves_nothing_that_counts(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FILL_THE_DISK, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "no room to write" in done.stderr, done.stderr
    assert done.returncode == 1
    assert Store(tmp_path).list() == []
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
