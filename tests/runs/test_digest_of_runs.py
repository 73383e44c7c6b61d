"""A digest sees one flipped bit of what is committed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from photo_runs import digests_of

from ckn_scale.storage.records import new_attempt
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.stored_files import read_table


def _flip_bit(value: bytes) -> bytes:
    return bytes([value[0] ^ 1]) + value[1:]


CHANGES = {
    ("vectors", "vector"): _flip_bit,
    ("vectors", "state"): lambda state: "corrupt",
    ("descriptors", "codes"): _flip_bit,
    ("descriptors", "frames"): _flip_bit,
}


@pytest.mark.parametrize(("stage", "column"), CHANGES)
def test_one_changed_value_changes_the_digest(reference, reference_digests, tmp_path, stage, column):
    run_path = tmp_path / "run"
    shutil.copytree(reference, run_path)
    _supersede(run_path, stage, column)
    changed = digests_of(run_path)
    assert changed[stage] != reference_digests[stage]
    assert {name for name in changed if changed[name] != reference_digests[name]} == {stage}


def _supersede(run_path: Path, stage: str, column: str) -> None:
    """The next generation of a shard, with one value of one row changed."""
    run = RunFolder.open(str(run_path))
    log = run.commits("encode_images")
    commit = log.committed()[1]
    table = read_table(run.store, commit.files[stage])
    values = table.column(column).to_pylist()
    position = next(i for i, value in enumerate(values) if value)
    values[position] = CHANGES[stage, column](values[position])
    place = table.schema.get_field_index(column)
    table = table.set_column(
        place, table.schema.field(place), pa.array(values, table.schema.field(place).type)
    )
    attempt = new_attempt()
    files = {**commit.files, stage: run.write_table(stage, 1, attempt, table)}
    _, won = log.commit(
        replace(commit, generation=2, attempt=attempt, files=files, supersedes=1, reason="a test")
    )
    assert won
