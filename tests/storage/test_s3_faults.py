"""The whole of storage through a network that fails: nothing lost, nothing doubled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from image_files import image_bytes, webdataset_bytes
from s3_fault_proxy import KINDS
from test_shards import make_commit
from vector_tables import make_vectors

from ckn_scale.runs.digest import digest_rows
from ckn_scale.storage import image_sources, input_files
from ckn_scale.storage.image_sources import list_images, read_image
from ckn_scale.storage.retries import RetryPolicy
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.store import Store
from ckn_scale.storage.stored_files import read_table

PATIENT = RetryPolicy(attempts=12, first_delay_s=0.01, max_delay_s=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_create_under_each_kind_of_fault_has_one_winner(s3, s3_faults, kind):
    store = Store(s3.url(f"fault-{kind}"), retry=PATIENT)
    s3_faults.kinds, s3_faults.rate = (kind,), 0.4
    for i in range(3):
        assert store.create(f"{i}", b"first")
        assert not store.create(f"{i}", b"other")
        assert store.read(f"{i}") == b"first"
    assert s3_faults.counts[kind] > 0


def test_shards_written_under_faults_have_the_digest_of_a_calm_run(s3, s3_faults):
    table = make_vectors(40)
    run = RunFolder.create(s3.url("faults"), {})
    run.store.retry = PATIENT
    s3_faults.rate = 0.3

    def work(job: int) -> bool:
        """Two workers for each shard."""
        shard_id, attempt = job // 2, f"a{job}"
        file = run.write_table("vectors", shard_id, attempt, table.slice(10 * shard_id, 10))
        return run.commits("encode").commit(make_commit(shard_id, attempt=attempt, files={"vectors": file}))[
            1
        ]

    with ThreadPoolExecutor(3) as pool:
        assert sum(pool.map(work, range(8))) == 4
    commits = run.commits("encode").committed()
    assert digest_rows(read_table(run.store, commits[i].files["vectors"]) for i in range(4)) == digest_rows(
        [table]
    )
    assert sum(s3_faults.counts[kind] for kind in KINDS) > 10


def test_images_are_listed_and_read_under_faults(s3, s3_faults, monkeypatch):
    store = Store(s3.url("images"))
    store.write_new("0.tar", webdataset_bytes(range(12)))
    store.write_new("x.jpg", b"x")
    for module, name in ((image_sources, "_READ_RETRY"), (input_files, "_LIST_RETRY")):
        monkeypatch.setattr(module, name, PATIENT)
    s3_faults.rate = 0.3
    refs = sorted(list_images(store.url), key=lambda ref: ref.uri)
    assert [read_image(ref.uri, etag=ref.etag) for ref in refs] == [*map(image_bytes, range(12)), b"x"]
