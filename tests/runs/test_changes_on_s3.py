"""Delete, append beside it, purge: the same on S3."""

from __future__ import annotations

from pathlib import Path

from photo_runs import digests_of, index_here, parse
from test_purge import DEAD, purge_here, traces_of

from ckn_scale.runs.delete_images import delete_images
from ckn_scale.runs.verify import verify_run
from ckn_scale.search.engine import open_index
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.store import Store


def upload(folder: Path, url: str) -> None:
    store = Store(url)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.write_new(path.relative_to(folder).as_posix(), path.read_bytes())


def test_deleted_and_purged_on_s3_as_on_a_disk(run, new_photos, s3, command_line):
    url, traces = s3.url("run"), traces_of(run, DEAD)
    upload(run, url)
    deleted = parse(command_line("delete", url, *map(str, DEAD), "--json"))
    assert (deleted["version"], deleted["rows"]) == (3, 21)
    delete_images(RunFolder.open(str(run)), DEAD)
    assert digests_of(url) == digests_of(run)
    purge_here(url)
    purge_here(run)
    index_here(new_photos, url, append=True)
    assert digests_of(url) == digests_of(run)
    opened = RunFolder.open(url)
    assert verify_run(opened).problems == []
    index = open_index(url)
    assert all(index.vector(one) is None and index.thumbnail(one) is None for one in DEAD)
    for path in opened.store.list(""):
        data = opened.store.read(path)
        assert not any(trace in data for trace in traces.values()), path
