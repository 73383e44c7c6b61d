"""Images whose hosts are dead or refuse, and files that are none: a row each, and the run ends well."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from photo_runs import assert_conserved, index_here, tiny_options
from web_hosts import WebHost, dead_url

from ckn_scale.errors import TransientStoreError
from ckn_scale.step import WorkerSettings
from ckn_scale.steps.plant_queries import PlantQueries
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.store import Store

GOOD = ("coffee.jpg", "rocket.jpg", "chelsea.jpg", "astronaut.jpg")


def test_dead_and_refusing_hosts_cost_rows_which_are_retried(photos, reference, command_line, tmp_path):
    files = {name: (photos / name).read_bytes() for name in (*GOOD, "coins.jpg")}
    with WebHost(files=files) as host:
        urls = [f"{host.url}/{name}" for name in GOOD]
        urls += [f"{host.url}/status/403/1/coins.jpg", f"{host.url}/status/404", dead_url(), dead_url()]
        (tmp_path / "list.txt").write_text("\n".join(urls))
        run = tmp_path / "run"
        options = [*tiny_options(), "--models", reference, "--accept", "--workers", "2"]
        result = command_line("index", tmp_path / "list.txt", run, *options)
        assert result.returncode == 0, result.stderr  # accepted, though half of the images are no use
        assert assert_conserved(run) == {"missing": 1, "ok": 4, "unreachable": 3}
        reasons = _reasons(command_line, run, "unreachable")
        assert sum("HTTP 403" in reason for reason in reasons) == 1
        assert sum("Cannot connect" in reason for reason in reasons) == 2
        retried = command_line("failures", run, "--reason", "unreachable", "--retry")
        assert retried.returncode in (0, 1), retried.stderr
    assert Counter(assert_conserved(run)) == {"missing": 1, "ok": 5, "unreachable": 2}


def _reasons(command_line, run: Path, state: str) -> list[str]:
    result = command_line("failures", run, "--reason", state, "--json")
    return [json.loads(line)["reason"] for line in result.stdout.splitlines()]


def test_certifying_passes_over_what_became_a_fifo(photos, reference, tmp_path):
    folder, run_url = tmp_path / "photos", tmp_path / "run"
    folder.mkdir()
    for name in GOOD:
        shutil.copy(photos / name, folder / name)
    index_here(folder, run_url, models=str(reference), accept=True)
    step = _open_planting(run_url)
    asked = _count_planted(step)
    (folder / GOOD[0]).unlink()
    os.mkfifo(folder / GOOD[0])
    for isolate in (False, True):
        assert _count_planted(step, isolate=isolate) == asked - 1


def test_certifying_fails_the_shard_when_the_store_hangs(photos, reference, s3, s3_faults, tmp_path):
    store = Store(s3.url("certified"))
    for name in GOOD:
        store.write_new(name, (photos / name).read_bytes())
    index_here(store.url, tmp_path / "run", models=str(reference), accept=True)
    step = _open_planting(tmp_path / "run")
    s3_faults.kinds, s3_faults.rate = ("hang",), 1.0
    for isolate in (False, True):
        with pytest.raises(TransientStoreError, match=r"was not read within 0.5 s"):
            step.apply(0, "attempt", WorkerSettings(isolate=isolate, read_deadline_s=0.5))


def _open_planting(run_url: Path) -> PlantQueries:
    """The step that the published version was certified with."""
    run = RunFolder.open(str(run_url))
    record = run.versions.latest()
    return PlantQueries(run, record.manifest, record.certificate.draw)


def _count_planted(step: PlantQueries, *, isolate: bool = False) -> int:
    (table,) = step.apply(0, "attempt", WorkerSettings(isolate=isolate)).tables.values()
    return table.num_rows
