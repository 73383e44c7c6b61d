"""A process that computes as another kind of CPU would: refused where it would compute, nowhere else."""

from __future__ import annotations

import pytest
import torch
from photo_runs import assert_conserved, copy_trained, read_commits, tiny_options

OTHER = {"ATEN_CPU_CAPABILITY": "default"}
HERE = torch.backends.cpu.get_cpu_capability()
pytestmark = pytest.mark.skipif(HERE == "DEFAULT", reason="torch has one kind of arithmetic only here")


@pytest.fixture
def index_as_other(command_line, photos):
    def index(run, *options):
        return command_line("index", photos, run, *tiny_options(), *options, env=OTHER)

    return index


def test_work_on_another_kind_of_cpu_is_refused_until_the_mix_is_allowed(reference, index_as_other, tmp_path):
    run = copy_trained(reference, tmp_path / "run")
    refused = index_as_other(run, "--workers", "2")
    assert refused.returncode == 2, refused.stderr
    last = refused.stderr.splitlines()[-1]
    assert f"{run} was computed with {HERE} (probe " in last
    assert "computes with DEFAULT (probe " in last
    assert "--allow-mix" in last
    assert read_commits(run) == {}

    allowed = index_as_other(run, "--workers", "0", "--allow-mix")
    assert allowed.returncode == 0, allowed.stderr
    assert_conserved(run)
    kinds = {commit.worker["arithmetic"].split()[0] for commit in read_commits(run).values()}
    assert kinds == {"DEFAULT"}
    assert index_as_other(run, "--workers", "0").returncode == 0, "it is on record"


def test_finished_run_is_called_again_on_another_kind_of_cpu(reference, index_as_other):
    before = sorted(reference.glob("numerics/*"))
    again = index_as_other(reference, "--workers", "0")
    assert again.returncode == 0, again.stderr
    assert sorted(reference.glob("numerics/*")) == before
    assert len(before) == 1
