"""The words of points are learned in steps of their own, from what the settings ask for."""

from __future__ import annotations

import numpy as np
import pytest
from photo_runs import OVERRIDES, digests_of, index_here

from ckn_scale.config import Resources, load_settings
from ckn_scale.pipeline import index_images, train
from ckn_scale.runners.driver import open_driver
from ckn_scale.search.engine import open_index
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.steps.plan_images import plan_images
from ckn_scale.storage.models import load_models, read_generation
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.stored_files import read_table


def encode_here(photos, folder, *overrides):
    settings = load_settings("tiny", None, [*OVERRIDES, *overrides])
    run = plan_images(str(folder), settings, str(photos))
    with open_driver(run, Resources(workers=0), lambda progress: None) as driver:
        train(driver)
        driver.run_step(EncodeImages(driver.run))
    return run


def read_points(run):
    commits = run.commits("encode_images").committed()
    return [read_table(run.store, commits[one].files["descriptors"]) for one in sorted(commits)]


def count_bytes(tables, column):
    return sum(len(one) for table in tables for one in table.column(column).to_pylist())


def test_points_of_two_channels_have_codes_of_both(photos, reference, tmp_path):
    run = encode_here(photos, tmp_path / "run", 'points.channels=["white", "grad"]')
    tables, plain = read_points(run), read_points(RunFolder.open(str(reference)))
    num_points = sum(table.column("num_points").to_numpy().sum() for table in tables)
    assert count_bytes(tables, "codes") == 32 * num_points == 2 * count_bytes(plain, "codes")
    assert count_bytes(tables, "frames") == 9 * num_points
    models = load_models(run.store, read_generation(run).models)
    words = models["points-words"]
    assert words.arrays["centroids"].shape == (words.metadata["words"], 256)
    assert words.metadata["images"] == 21, "of 22 files one is no image"
    projections = {name for name in models if name.startswith("points-projection")}
    assert projections == {"points-projection-grad", "points-projection-white"}
    encoder = EncodeImages(run).encoder
    photo = encoder.encode_bytes((photos / "coffee.jpg").read_bytes())
    norms = [np.linalg.norm(half, axis=1) for half in np.split(photo.descriptors, 2, axis=1)]
    np.testing.assert_allclose(np.concatenate(norms), 1, atol=1e-5)


def test_a_run_without_points_learns_nothing_for_them_and_answers(photos, tmp_path):
    settings = load_settings("tiny", None, [*OVERRIDES, "points.max_points=0"])
    index_images(str(photos), str(tmp_path / "run"), settings, Resources(workers=0))
    run = RunFolder.open(str(tmp_path / "run"))
    assert not [name for name in read_generation(run).models if name.startswith("points")]
    assert EncodeImages(run).encoder.points is None
    assert {int(n) for table in read_points(run) for n in table.column("num_points").to_pylist()} == {0}
    hits = open_index(run.url).search(photos / "coffee.jpg", k=1)
    assert hits[0].uri.endswith("coffee.jpg")


@pytest.mark.parametrize("place", ["data_written", "recorded"])
def test_killed_while_words_are_learned_and_resumed(
    photos, reference_digests, command_line, user_env, tmp_path, place
):
    from photo_runs import tiny_options

    from ckn_scale.failpoints import SHARD_VARIABLE

    run = tmp_path / "run"
    arguments = ("index", photos, run, *tiny_options(), "--workers", "0")
    killed = command_line(*arguments, env={SHARD_VARIABLE: f"{place}:train_point_words"})
    assert killed.returncode != 0
    assert not RunFolder.open(str(run)).models.all()
    index_here(photos, run)
    assert digests_of(run) == reference_digests
