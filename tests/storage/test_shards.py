from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from ckn_scale import schemas
from ckn_scale.errors import CorruptData
from ckn_scale.storage.records import encode_record, new_attempt
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.shards import Commit
from ckn_scale.storage.store import Store
from ckn_scale.storage.stored_files import StoredFile, encode_table, read_table


def make_commit(shard_id: int = 0, **changes) -> Commit:
    files = {"vectors": StoredFile(f"vectors/{shard_id:05d}-ab.parquet", "00", 9, 3)}
    base = Commit(
        "encode", shard_id, 1, new_attempt(), "fp", files, {"ok": 3}, {"host": "h", "pid": 1}, 1.5, 2.5
    )
    return replace(base, **changes)


def make_table(num_rows: int = 3, dim: int = 4) -> pa.Table:
    vectors = np.arange(num_rows * dim, dtype=np.float16).reshape(num_rows, dim)
    ids = range(num_rows)
    sizes = [[number] * num_rows for number in (640, 480, 1280, 960)]
    columns = [ids, ["ok"] * num_rows, [""] * num_rows, *sizes]
    return pa.table(
        [*columns, [row.tobytes() for row in vectors]], schema=schemas.vectors_schema("float16", dim, 2 * dim)
    )


def test_commit_stands_and_reads_back(run):
    offered = make_commit(12)
    assert run.commits("encode").commit(offered) == (offered, True)
    assert run.commits("encode").get(12) == offered
    assert run.commits("encode").committed() == {12: offered}
    assert run.store.list("commits") == ["commits/encode/00012.1.json"]


def test_nothing_committed(run):
    assert run.commits("encode").get(0) is None
    assert run.commits("encode").committed() == {}


def test_second_commit_of_a_shard_loses(run):
    log = run.commits("encode")
    first, second = make_commit(1), make_commit(1)
    log.commit(first)
    assert log.commit(second) == (first, False)
    assert log.commit(first) == (first, True)  # its own retry
    assert log.committed() == {1: first}


def test_race_of_commits_has_one_winner(run):
    offers = [make_commit(3) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(run.commits("encode").commit, offers))
    assert sum(won for _, won in outcomes) == 1
    assert {committed.attempt for committed, _ in outcomes} == {run.commits("encode").get(3).attempt}


def test_next_generation_supersedes(run):
    log = run.commits("encode")
    log.commit(make_commit(1))
    repair = make_commit(1, generation=2, supersedes=1, reason="vectors/00001-ab.parquet is damaged")
    assert log.commit(repair)[1]
    assert log.committed()[1] == repair
    assert run.commits("encode").get(1) == repair


def test_late_first_generation_learns_of_the_highest(run):
    """A worker that slept through a repair."""
    log = run.commits("encode")
    log.commit(make_commit(1))
    repair = make_commit(1, generation=2, supersedes=1, reason="x")
    log.commit(repair)
    assert log.commit(make_commit(1)) == (repair, False)


def test_damaged_record_leaves_the_generation_before_it_current(run, store, damage):
    log = run.commits("encode")
    first = make_commit(1)
    log.commit(first)
    log.commit(make_commit(1, generation=2, supersedes=1, reason="x"))
    damage("commits/encode/00001.2.json", b"")
    assert run.commits("encode").committed() == {1: first}
    assert run.commits("encode").get(1) == first


def test_commit_over_a_damaged_record_takes_the_next_generation(run, store, damage):
    run.commits("encode").commit(make_commit(1))
    damage("commits/encode/00001.1.json", store.read("commits/encode/00001.1.json")[:40])
    log = run.commits("encode")
    assert log.committed() == {}
    assert log.get(1) is None
    committed, won = log.commit(make_commit(1))
    assert won
    assert (committed.generation, committed.supersedes) == (2, 1)
    assert "00001.1.json is not a whole record" in committed.reason
    assert run.commits("encode").committed() == {1: committed}


def test_record_in_the_place_of_another_is_invalid(run, store):
    store.write_new("commits/encode/00002.1.json", encode_record(make_commit(1).to_body()))
    store.write_new("commits/encode/00003.1.json", encode_record({"attempt": "ab"}))
    assert run.commits("encode").committed() == {}


def test_committed_reads_many(tmp_path):
    run = RunFolder.create(str(tmp_path), {})
    commits = {i: make_commit(i) for i in range(200)}
    for commit in commits.values():
        run.commits("encode").commit(commit)
    log = run.commits("encode")
    assert log.committed() == commits
    assert list(log.committed()) == sorted(commits)


class CountingStore(Store):
    """Counts what is read."""

    reads = 0

    def read(self, path: str) -> bytes:
        self.reads += 1
        return super().read(path)


def test_a_record_is_read_once_whoever_asks(run):
    for shard_id in range(5):
        run.commits("encode").commit(make_commit(shard_id))
    counting = RunFolder(CountingStore(run.url), run.body)
    for _ in range(3):
        assert len(counting.commits("encode").committed()) == 5
    assert counting.store.reads == 5


def test_what_others_commit_meanwhile_is_seen(run):
    mine, other = run.commits("encode"), RunFolder.open(run.url).commits("encode")
    other.commit(make_commit(0))
    assert set(mine.committed()) == {0}
    other.commit(make_commit(1))
    repair = make_commit(0, generation=2, supersedes=1, reason="x")
    other.commit(repair)
    assert mine.get(0) == repair
    assert set(mine.committed()) == {0, 1}
    assert mine.committed()[0] == repair


def _commit_shard(url: str) -> bool:
    run = RunFolder.open(url)
    attempt = new_attempt()
    file = run.write_table("vectors", 0, attempt, make_table())
    return run.commits("encode").commit(make_commit(0, attempt=attempt, files={"vectors": file}))[1]


def test_spawned_processes_commit_a_shard_once(run):
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert sum(pool.map(_commit_shard, [run.url] * 2)) == 1
    file = run.commits("encode").committed()[0].files["vectors"]
    assert read_table(run.store, file).num_rows == 3
    assert len(run.store.list("vectors")) == 2  # the loser's file stays, and nobody reads it


def test_write_table_then_read_table(run):
    file = run.write_table("vectors", 12, "ab", make_table())
    assert file.path == "vectors/00012-ab.parquet"
    assert (file.rows, file.size_bytes) == (3, run.store.size(file.path))
    table = read_table(run.store, file)
    assert table.equals(make_table())
    assert table.schema.metadata[b"dim"] == b"4"
    assert read_table(run.store, file, columns=["image_id"]).column_names == ["image_id"]


def test_write_table_without_rows(run):
    file = run.write_table("vectors", 0, "ab", make_table(0))
    assert read_table(run.store, file).num_rows == 0


def test_encode_table_is_deterministic_whatever_the_chunks():
    table = make_table(6)
    chunked = pa.concat_tables([table.slice(0, 2), table.slice(2)])
    assert encode_table(table) == encode_table(chunked)


def test_read_table_of_a_gone_file_is_damage(run):
    with pytest.raises(CorruptData, match=r"vectors/1\.parquet is gone, though a record names it"):
        read_table(run.store, StoredFile("vectors/1.parquet", "0", 1, 1))


@pytest.mark.parametrize(
    "alter", [lambda d: d[:-1], lambda d: d[:50] + bytes([d[50] ^ 1]) + d[51:], lambda d: b""]
)
def test_read_table_recognises_damaged_bytes(run, damage, alter):
    file = run.write_table("vectors", 1, "ab", make_table())
    damage(file.path, alter(run.store.read(file.path)))
    with pytest.raises(CorruptData, match="sha256"):
        read_table(run.store, file)


def test_read_table_recognises_a_wrong_row_count(run):
    file = run.write_table("vectors", 1, "ab", make_table())
    with pytest.raises(CorruptData, match="has 3 rows, 4 were recorded"):
        read_table(run.store, replace(file, rows=4))
