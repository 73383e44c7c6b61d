"""A run on S3 through a network that fails in every way the proxy knows: the same bytes."""

from __future__ import annotations

from pathlib import Path

from photo_runs import assert_conserved, copy_trained, digests_of, tiny_options
from s3_fault_proxy import KINDS

from ckn_scale.storage.store import Store


def test_run_through_a_failing_network_has_equal_digests(
    photos, reference, reference_digests, s3, s3_faults, command_line, tmp_path
):
    trained = copy_trained(reference, tmp_path / "trained")
    run = s3.url("run")
    _upload(trained, run)
    s3_faults.rate = 0.15
    result = command_line("index", photos, run, *tiny_options(), "--workers", "2")
    assert result.returncode == 0, result.stderr
    assert all(s3_faults.counts[kind] > 0 for kind in KINDS), s3_faults.counts
    s3_faults.rate = 0
    assert digests_of(run) == reference_digests
    assert_conserved(run)


def _upload(folder: Path, url: str) -> None:
    store = Store(url)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.write_new(path.relative_to(folder).as_posix(), path.read_bytes())
