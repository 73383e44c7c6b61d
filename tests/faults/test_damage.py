"""Files of a finished run are cut, altered or lost: noticed, and rebuilt by the same command."""

from __future__ import annotations

import shutil

import pytest
from photo_runs import (
    assert_conserved,
    assert_some_skipped,
    digests_of,
    index_here,
    list_records,
    parse,
    read_commits,
    tiny_options,
)

from ckn_scale.errors import CorruptData
from ckn_scale.search.engine import open_index
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.stored_files import read_table


@pytest.fixture
def run(reference, tmp_path):
    return shutil.copytree(reference, tmp_path / "run", ignore=shutil.ignore_patterns("events"))


def _data_path(run, shard_id, stage, step="encode_images"):
    return run / read_commits(run, step)[shard_id].files[stage].path


def _flip_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def _assert_redone(run, shard_ids):
    commits = read_commits(run)
    assert {
        one: commit.generation for one, commit in commits.items() if commit.generation > 1
    } == dict.fromkeys(shard_ids, 2)
    assert all(commits[one].supersedes == 1 and commits[one].reason for one in shard_ids)


def test_truncated_and_lost_data_are_made_again_by_a_rerun(run, photos, reference_digests):
    damaged = read_commits(run)[1].files["vectors"]
    _cut(run / damaged.path)
    _data_path(run, 4, "thumbnails").unlink()
    with pytest.raises(CorruptData, match=damaged.path):
        read_table(RunFolder.open(str(run)).store, damaged)
    index_here(photos, run)
    _assert_redone(run, [1, 4])
    assert_some_skipped(run)
    assert digests_of(run) == reference_digests
    assert_conserved(run)


def test_corrupt_record_is_invalid_and_its_shard_done_as_the_next_generation(run, photos, reference_digests):
    _flip_bit(list_records(run)[2])
    assert 2 not in read_commits(run)
    index_here(photos, run)
    _assert_redone(run, [2])
    assert_some_skipped(run)
    assert digests_of(run) == reference_digests
    assert_conserved(run)


def test_damage_that_a_later_step_meets_is_repaired_on_the_way(run, photos, reference_digests):
    """A bit is flipped, which no size shows, before the index is built."""
    _flip_bit(_data_path(run, 3, "vectors"))
    for folder in (run / "index", run / "commits" / "build_index"):
        shutil.rmtree(folder)
    index_here(photos, run)
    _assert_redone(run, [3])
    assert digests_of(run) == reference_digests


def test_check_finds_a_flipped_bit_in_a_finished_run(run, photos, reference_digests, command_line):
    _flip_bit(_data_path(run, 5, "descriptors"))
    index_here(photos, run)
    with pytest.raises(CorruptData):
        digests_of(run)
    result = command_line("index", photos, run, *tiny_options(), "--check", "--workers", "0")
    assert result.returncode == 0, result.stderr
    _assert_redone(run, [5])
    assert digests_of(run) == reference_digests


def test_damaged_index_file_is_built_again_and_published_as_the_next_version(
    run, photos, reference_digests, tmp_path, monkeypatch
):
    monkeypatch.setenv("CKN_SCALE_CACHE", str(tmp_path / "cache"))
    _cut(_data_path(run, min(read_commits(run, "build_index")), "index", "build_index"))
    with pytest.raises(CorruptData):
        open_index(str(run)).search(photos / "coffee.jpg", 1)
    assert index_here(photos, run).version == 2
    hits = open_index(str(run)).search(photos / "coffee.jpg", 1)
    assert hits[0].uri.endswith("coffee.jpg")
    assert digests_of(run) == reference_digests


def test_damaged_model_is_learned_again(run, photos, reference_digests):
    _flip_bit(next((run / "models").glob("codebook-*.safetensors")))
    shutil.rmtree(run / "commits" / "encode_images")
    index_here(photos, run)
    assert digests_of(run) == reference_digests


def test_corrupt_record_of_the_models_is_followed_by_the_next(run, photos, reference_digests):
    _flip_bit(run / "models" / "000001.json")
    index_here(photos, run)
    assert RunFolder.open(str(run)).models.numbers() == [1, 2]
    assert digests_of(run) == reference_digests


def test_corrupt_plan_is_refused_by_name(run, photos):
    _flip_bit(run / "plan" / "000001.json")
    with pytest.raises(CorruptData, match=r"plan/000001\.json"):
        index_here(photos, run)


def test_corrupt_version_record_is_named_with_what_is_used_instead(run, photos, command_line):
    opened = RunFolder.open(str(run))
    opened.versions.append(opened.versions.latest())
    _flip_bit(run / "index" / "000002.json")
    status = command_line("status", run, "--json")
    found = command_line("search", run, photos / "coffee.jpg", "--json")
    assert (parse(status)["version"], parse(found)["version"]) == (1, 1)
    assert "index/000002.json" in parse(status)["damaged"][0]
    for result in (status, found):
        assert "index/000002.json" in result.stderr
        assert "index/000001.json is used instead" in result.stderr
    with pytest.raises(CorruptData, match=r"index/000002\.json"):
        open_index(str(run), version=2)


def test_status_of_a_corrupt_plan_says_so(run, command_line):
    _flip_bit(run / "plan" / "000001.json")
    status = parse(command_line("status", run, "--json"))
    assert "plan/000001.json" in status["damaged"][0]
    assert (status["version"], status["steps"]) == (1, [])
    publishing = command_line("publish", run, "--workers", "0")
    assert publishing.returncode == 1
    _, line = publishing.stderr.splitlines()  # after the first, which says what begins
    assert "plan/000001.json" in line
