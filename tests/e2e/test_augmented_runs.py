"""Runs with `index.augment`: their rows are joined with neighbours; all else goes as without."""

from __future__ import annotations

import shutil
import signal

import numpy as np
import pytest
from photo_runs import OVERRIDES, digests_of, read_commits, tiny_options

from ckn_scale.config import Resources, load_settings
from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import DISTRACTORS, read_photo
from ckn_scale.errors import CknScaleError
from ckn_scale.failpoints import SHARD_VARIABLE
from ckn_scale.pipeline import index_images
from ckn_scale.runners.driver import open_driver
from ckn_scale.runs.delete_images import delete_images
from ckn_scale.runs.purge import purge_run
from ckn_scale.runs.verify import verify_run
from ckn_scale.search.engine import open_index
from ckn_scale.search.shard import ShardGroup
from ckn_scale.steps.augment_index import restore_built
from ckn_scale.steps.draw_queries import read_draw
from ckn_scale.storage.builds import position_of
from ckn_scale.storage.index_files import read_manifest
from ckn_scale.storage.run_folder import RunFolder

SMALL_SHARDS = ["index.shards_per_index_shard=3", "publish.queries_per_shard=4"]  # a purge loses few queries


def make_run(photos, url, reference, *overrides, workers=0, **options):
    settings = load_settings("tiny", None, [*OVERRIDES, *SMALL_SHARDS, *overrides])
    resources = Resources(workers=workers)
    return index_images(str(photos), str(url), settings, resources, models=str(reference), **options)


def manifest_of(run):
    opened = RunFolder.open(str(run))
    return read_manifest(opened.store, opened.versions.latest().manifest)


def rows_of(run, manifest):
    group = ShardGroup(RunFolder.open(str(run)).store, manifest)
    return {
        int(one): shard.index.vector(row) for shard in group.shards for row, one in enumerate(shard.index.ids)
    }


@pytest.fixture(scope="module")
def augmented(photos, reference, tmp_path_factory):
    run = tmp_path_factory.mktemp("augmented") / "run"
    make_run(photos, run, reference, "index.augment=2")
    return run


@pytest.fixture
def more(tmp_path):
    folder = tmp_path / "more"
    folder.mkdir()
    for name in DISTRACTORS[5:8]:
        (folder / f"new-{name}.jpg").write_bytes(encode_jpeg(read_photo(name), 90))
    return folder


def test_it_is_published_whole_and_answers(augmented, photos):
    assert not verify_run(RunFolder.open(str(augmented))).problems
    assert len(read_commits(augmented, "augment_index")) == len(manifest_of(augmented).shards) == 4
    rows, built = (
        rows_of(augmented, one)
        for one in (
            manifest_of(augmented),
            restore_built(RunFolder.open(str(augmented)), manifest_of(augmented)),
        )
    )
    assert rows.keys() == built.keys()
    assert any(not np.array_equal(rows[one], built[one]) for one in rows)
    found = open_index(str(augmented)).search(photos / "astronaut.jpg", 2)
    assert {hit.uri.rsplit("/")[-1] for hit in found} == {"astronaut.jpg", "astronaut-tilt.jpg"}


def test_called_again_it_does_nothing_and_another_number_is_refused(augmented, photos, reference):
    make_run(photos, augmented, reference, "index.augment=2")
    assert RunFolder.open(str(augmented)).versions.latest().number == 1
    for other in ("index.augment=3", "index.augment=0"):
        with pytest.raises(CknScaleError, match=r"index\.augment"):
            make_run(photos, augmented, reference, other)


def test_off_it_leaves_everything_as_it_was(photos, reference, tmp_path):
    make_run(photos, tmp_path / "off", reference, "index.augment=0")
    make_run(photos, tmp_path / "plain", reference)
    assert digests_of(tmp_path / "off") == digests_of(tmp_path / "plain")
    run = RunFolder.open(str(tmp_path / "off"))
    assert "augment" not in run.settings["index"], "runs of earlier releases have the same settings"
    assert not any("augment" in label for label in run.logs())


@pytest.mark.parametrize("kind", ["auto", "pq"])
def test_killed_in_the_middle_and_gone_on_by_three_workers_it_is_the_same(
    photos, reference, tmp_path, command_line, kind
):
    options = ("index.augment=2", f"index.kind={kind}")
    run, alone = tmp_path / "run", tmp_path / "alone"
    make_run(photos, alone, reference, *options)
    numbers = sorted(read_commits(alone, "augment_index"))
    settings = [part for one in (*SMALL_SHARDS, *options) for part in ("--set", one)]
    arguments = ("index", photos, run, *tiny_options(), *settings, "--models", reference, "--workers", "0")
    killed = command_line(*arguments, env={SHARD_VARIABLE: f"data_written:augment_index:{numbers[-1]}"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert numbers[-1] not in read_commits(run, "augment_index")
    make_run(photos, run, reference, *options, workers=3)
    assert digests_of(run) == digests_of(alone)
    assert not verify_run(RunFolder.open(str(run))).problems


def test_an_append_augments_what_it_adds_among_all(augmented, reference, tmp_path, more, photos):
    run = shutil.copytree(augmented, tmp_path / "run")
    (more / "again.jpg").write_bytes((photos / "astronaut.jpg").read_bytes())
    before = manifest_of(run)
    make_run(more, run, reference, "index.augment=2", append=True)
    after = manifest_of(run)
    assert after.shards[: len(before.shards)] == before.shards
    assert len(read_commits(run, "augment_index")) == len(after.shards) == len(before.shards) + 1
    rows, built = rows_of(run, after), rows_of(run, restore_built(RunFolder.open(str(run)), after))
    new = max(rows) if max(rows) not in rows_of(run, before) else None
    assert new is not None
    assert not verify_run(RunFolder.open(str(run))).problems
    assert any(not np.array_equal(rows[one], built[one]) for one in rows.keys() - rows_of(run, before).keys())
    found = open_index(str(run)).search(more / f"new-{DISTRACTORS[5]}.jpg", 1)
    assert found[0].uri.endswith(f"new-{DISTRACTORS[5]}.jpg")


def test_what_is_deleted_leaves_rows_as_they_are_and_is_no_neighbour_of_later_ones(
    augmented, reference, tmp_path, more, photos
):
    shutil.copy(photos / "astronaut.jpg", more / "new.jpg")
    run, other = (shutil.copytree(augmented, tmp_path / name) for name in ("run", "other"))
    before = manifest_of(run)
    gone = [hit.image_id for hit in open_index(str(run)).search(photos / "astronaut.jpg", 2)]
    delete_images(RunFolder.open(str(run)), gone)
    make_run(photos, run, reference, "index.augment=2")
    assert RunFolder.open(str(run)).versions.latest().number == 2, "there was nothing to do"
    assert manifest_of(run).shards == before.shards
    for one in (run, other):
        make_run(more, one, reference, "index.augment=2", append=True)
        assert manifest_of(one).shards[: len(before.shards)] == before.shards
    new = open_index(str(run)).search(photos / "astronaut.jpg", 1)[0].image_id
    rows, others = (rows_of(one, manifest_of(one)) for one in (run, other))
    assert not np.array_equal(rows[new], others[new]), "there the deleted ones are its neighbours"


def test_a_purge_leaves_nothing_of_an_image_in_the_rows_of_others(augmented, reference, tmp_path, photos):
    run = shutil.copytree(augmented, tmp_path / "run")
    opened, before = RunFolder.open(str(run)), manifest_of(run)
    gone = open_index(str(run)).search(photos / "astronaut.jpg", 1)[0].image_id
    delete_images(opened, [gone])
    with open_driver(opened, Resources(workers=0), lambda progress: None) as driver:
        purge_run(driver)
    after = manifest_of(run)
    assert gone not in rows_of(run, after)
    old = {shard.index.path for shard in before.shards}
    assert not any((run / path).exists() for path in old), "sums with the image are removed"
    pairs = zip(after.shards, before.shards, strict=True)
    other = [one.shard for one, was in pairs if one.index.sha256 != was.index.sha256]
    asked = read_draw(opened, RunFolder.open(str(run)).versions.latest().certificate.draw)
    assert len(other) > 1
    assert list(map(position_of, asked.new_shards)) == other, "also where only rows of neighbours are others"
    assert not verify_run(RunFolder.open(str(run))).problems
    make_run(photos, run, reference, "index.augment=2")
    assert manifest_of(run) == after
