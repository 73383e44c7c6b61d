"""Versions are listed, and an earlier one becomes current again as the next one."""

from __future__ import annotations

import pytest
from grown_runs import NEW, flip_bit, list_files, numbers_of
from photo_runs import digests_of, index_here, parse, plan_here

from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import DISTRACTORS, read_photo
from ckn_scale.errors import CorruptData, InputError, RunFailed
from ckn_scale.failpoints import SHARD_VARIABLE
from ckn_scale.runs import versions as versions_module
from ckn_scale.runs.collect_garbage import find_garbage
from ckn_scale.runs.versions import list_versions, roll_back
from ckn_scale.search.engine import open_index
from ckn_scale.steps import publish
from ckn_scale.storage.index_files import read_manifest
from ckn_scale.storage.run_folder import RunFolder

GROWN = [(1, 21, None), (2, 24, None)]


def first_hit(run, photo, **options):
    return open_index(str(run), **options).search(photo, 1)[0]


def test_versions_have_the_form_scripts_rely_on(run, command_line):
    listed = parse(command_line("versions", run, "--json"))
    assert listed["current"] == 2
    assert [(one["version"], one["rows"]) for one in listed["versions"]] == [(1, 21), (2, 24)]
    record = RunFolder.open(str(run)).versions.read(1)
    assert listed["versions"][0]["build"] == record.build
    assert listed["versions"][0]["certificate"]["queries"] == record.certificate.queries > 0
    table = command_line("versions", run).stdout.splitlines()
    assert table[0].split()[:2] == ["version", "images"]
    assert [line.split()[:3] for line in table[1:]] == [["1", "21", "1"], ["2", "24", "1"]]
    assert [line.endswith("current") for line in table[1:]] == [False, True]


def test_versions_of_a_run_without_one_and_a_damaged_record(run, photos, command_line, tmp_path):
    plan_here(photos, tmp_path / "planned")
    assert command_line("versions", tmp_path / "planned").stdout == "no version published yet\n"
    assert parse(command_line("versions", tmp_path / "planned", "--json"))["current"] is None
    flip_bit(run / "index" / "000002.json")
    listed = list_versions(RunFolder.open(str(run)))
    assert (listed["current"], len(listed["versions"])) == (1, 1)
    assert "index/000002.json" in listed["damaged"][0]
    assert "damaged: " in command_line("versions", run).stdout


def test_after_a_rollback_the_old_version_answers_under_a_new_number(run, new_photos, command_line):
    photo = new_photos / f"new-{NEW[0]}.jpg"
    old, new = first_hit(run, photo, version=1), first_hit(run, photo)
    assert new.uri == str(photo) != old.uri
    before = list_files(run)
    result = command_line("rollback", run)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "version 3 is current: 21 images, those of version 1\n"
    assert numbers_of(run) == [*GROWN, (3, 21, 1)]
    assert first_hit(run, photo) == old
    found = parse(command_line("search", run, photo, "-k", "1", "--json"))
    assert (found["version"], found["results"][0]["hits"][0]["uri"]) == (3, old.uri)
    after = list_files(run)
    assert {path: after[path] for path in before} == before, "nothing was altered or removed"
    assert after.keys() - before.keys() == {"index/000003.json"}
    assert parse(command_line("status", run, "--json"))["restores"] == 1
    assert "version 3, which restores version 1: " in command_line("status", run).stdout
    assert "current, restores 1" in command_line("versions", run).stdout


def test_index_after_a_rollback_publishes_the_newest_build_again(run, new_photos):
    newest = digests_of(run)
    opened = RunFolder.open(str(run))
    assert find_garbage(opened, grace_s=0) == []
    roll_back(opened)
    assert digests_of(run)["index"] != newest["index"]
    assert find_garbage(opened, grace_s=0) == [], "files of all versions are kept"
    assert index_here(new_photos, run, append=True).version == 4
    assert numbers_of(run) == [*GROWN, (3, 21, 1), (4, 24, None)]
    assert digests_of(run) == newest
    assert opened.versions.read(4).build == opened.versions.read(2).build


def test_rollback_of_a_rollback_and_to_any_version(run):
    opened = RunFolder.open(str(run))
    assert roll_back(opened).restores == 1
    assert roll_back(opened).restores == 2
    assert roll_back(opened, 3).restores == 3
    assert numbers_of(run) == [*GROWN, (3, 21, 1), (4, 24, 2), (5, 21, 3)]
    assert opened.versions.read(5).manifest == opened.versions.read(1).manifest
    assert opened.versions.read(5).certificate == opened.versions.read(1).certificate


@pytest.mark.parametrize("number", [1, 3])
def test_a_rollback_to_what_is_current_writes_nothing(run, command_line, number):
    roll_back(RunFolder.open(str(run)), 1)
    before = list_files(run)
    result = command_line("rollback", run, str(number))
    assert (result.returncode, list_files(run)) == (0, before), result.stderr
    assert "version 3 is current" in result.stdout
    assert "nothing to do" in result.stdout


def test_a_version_that_is_not_there_is_refused(run, reference, photos, command_line, tmp_path):
    with pytest.raises(InputError, match=r"has no version 7; published are: 1, 2$"):
        roll_back(RunFolder.open(str(run)), 7)
    with pytest.raises(InputError, match="has no version before 1 "):
        roll_back(RunFolder.open(str(reference)))
    plan_here(photos, tmp_path / "planned")
    result = command_line("rollback", tmp_path / "planned")
    assert result.returncode == 2
    assert "has no published index yet" in result.stderr
    assert command_line("rollback", run, "0").returncode == 2


@pytest.mark.parametrize("kind", ["manifest", "cut shard", "lost table", "model", "record"])
def test_a_damaged_version_is_not_restored(run, kind):
    opened = RunFolder.open(str(run))
    record = opened.versions.read(1)
    manifest = read_manifest(opened.store, record.manifest)
    damaged = {
        "manifest": record.manifest.path,
        "cut shard": manifest.shards[2].index.path,
        "lost table": manifest.shards[3].table.path,
        "model": manifest.models["encoder"].path,
        "record": "index/000001.json",
    }[kind]
    if kind == "cut shard":
        (run / damaged).write_bytes((run / damaged).read_bytes()[:-1])
    elif kind == "lost table":
        (run / damaged).unlink()
    else:
        flip_bit(run / damaged)
    with pytest.raises(CorruptData, match=damaged):
        roll_back(opened, 1)
    assert opened.versions.numbers() == [1, 2]


def rival(monkeypatch, module, call):
    """`call` happens once, in the moment before a version is recorded."""
    calls = [call]
    monkeypatch.setattr(module, "hit_failpoint", lambda *place: calls.pop()() if calls else None)
    return calls


def publish_more(run, folder):
    folder.mkdir()
    (folder / "one-more.jpg").write_bytes(encode_jpeg(read_photo(DISTRACTORS[8]), 90))
    return index_here(folder, run, append=True).version


def test_a_rollback_to_a_number_comes_after_what_was_published_meanwhile(run, monkeypatch, tmp_path):
    left = rival(monkeypatch, versions_module, lambda: publish_more(run, tmp_path / "rival"))
    assert roll_back(RunFolder.open(str(run)), 1).number == 4
    assert not left
    assert numbers_of(run) == [*GROWN, (3, 25, None), (4, 21, 1)]


def test_a_rollback_to_the_version_before_is_refused_when_another_is_published(run, monkeypatch, tmp_path):
    rival(monkeypatch, versions_module, lambda: publish_more(run, tmp_path / "rival"))
    with pytest.raises(RunFailed, match=r"published version 3 meanwhile.*rollback .* 1` restores version 1"):
        roll_back(RunFolder.open(str(run)))
    assert numbers_of(run) == [*GROWN, (3, 25, None)]


@pytest.mark.parametrize("number", [None, 1])
def test_two_equal_rollbacks_at_once_are_one(run, monkeypatch, number):
    rival(monkeypatch, versions_module, lambda: roll_back(RunFolder.open(str(run)), number))
    assert roll_back(RunFolder.open(str(run)), number).number == 3
    assert numbers_of(run) == [*GROWN, (3, 21, 1)]


def test_who_publishes_while_another_rolls_back_publishes_after_it(run, monkeypatch, tmp_path):
    left = rival(monkeypatch, publish, lambda: roll_back(RunFolder.open(str(run)), 1))
    assert publish_more(run, tmp_path / "more") == 4
    assert not left
    assert numbers_of(run) == [*GROWN, (3, 21, 1), (4, 25, None)]


def test_a_number_that_a_damaged_record_holds_is_left_to_it(run):
    (run / "index" / "000003.json").write_bytes(b"torn")
    assert roll_back(RunFolder.open(str(run)), 1).number == 4


def test_a_rollback_killed_before_its_record_has_done_nothing_and_can_be_repeated(run, command_line):
    before = list_files(run)
    killed = command_line("rollback", run, "1", env={SHARD_VARIABLE: "data_written:rollback:3"})
    assert killed.returncode == -9
    assert list_files(run) == before
    assert command_line("rollback", run, "1").returncode == 0
    assert numbers_of(run) == [*GROWN, (3, 21, 1)]
    assert "nothing to do" in command_line("rollback", run, "1").stdout
