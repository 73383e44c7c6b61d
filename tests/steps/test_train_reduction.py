"""What is learned for the vector on small, medium and background images, what is stored, what is refused."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from photo_runs import background_photos, finish_with_background, read_commits

from ckn_scale.config import Resources, load_settings, parse_settings
from ckn_scale.core.vector_codes import make_codec
from ckn_scale.errors import InputError, RunMismatch
from ckn_scale.pipeline import build, index_images, plan, train
from ckn_scale.runners.driver import open_driver
from ckn_scale.schemas import read_codes
from ckn_scale.search.engine import open_index
from ckn_scale.steps.build_index import BuildIndex, write_build_manifest
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.steps.plan_images import record_background
from ckn_scale.storage.index_files import read_manifest
from ckn_scale.storage.models import load_trained
from ckn_scale.storage.plans import read_images, read_segments
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.stored_files import read_table


def settings_of(*overrides):
    """One channel is enough here."""
    tree = load_settings("tiny", None, ["sample.images_per_shard=6", *overrides]).model_dump(mode="json")
    return parse_settings({**tree, "channels": tree["channels"][:1]})


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return background_photos(tmp_path_factory.mktemp("others"))


@pytest.fixture(scope="module")
def many_photos(photos, others, tmp_path_factory):
    folder = shutil.copytree(photos, tmp_path_factory.mktemp("many") / "photos")
    shutil.copytree(others, folder, dirs_exist_ok=True)
    (folder / "broken.jpg").unlink()
    return folder


def encode_here(folder, url, settings, **options):
    run = plan(str(folder), str(url), settings, **options)
    with open_driver(run, Resources(workers=0), lambda progress: None) as driver:
        train(driver)
        driver.run_step(EncodeImages(driver.run))
        built = build(driver)
    return run, built


def reduction_of(run):
    return load_trained(run, ["train_reduction"], "reduction")["reduction"].metadata


def stored_codes(run):
    commits = sorted(run.commits("encode_images").committed().items())
    tables = [read_table(run.store, commit.files["vectors"]) for _, commit in commits]
    return np.concatenate([read_codes(t.filter(t.column("vector").is_valid())) for t in tables]), tables[0]


def test_a_small_collection_is_centred_only(reference):
    facts = reduction_of(RunFolder.open(str(reference)))
    assert (facts["method"], facts["num_directions"], facts["num_images"]) == ("flatten", 0, 21)
    codes, table = stored_codes(RunFolder.open(str(reference)))
    assert table.schema.metadata[b"encoding"] == b"signs"
    assert codes.shape == (21, 2048 // 8 + 8)


def test_a_handful_of_images_is_kept_as_it_is(photos, tmp_path):
    few = [str(photos / f"{name}.jpg") for name in ("astronaut", "camera", "coffee")]
    run = plan(few, str(tmp_path / "run"), settings_of())
    with open_driver(run, Resources(workers=0), lambda progress: None) as driver:
        train(driver)
    assert reduction_of(run) == {"method": "none"}
    assert read_commits(run.url, "sample_vlads") == {}


def test_a_medium_collection_loses_a_direction_and_is_found_by_its_signs(many_photos, tmp_path):
    run, built = encode_here(many_photos, tmp_path / "run", settings_of())
    facts = reduction_of(run)
    assert (facts["num_directions"], facts["num_images"], facts["background"]) == (1, 32, False)
    manifest = write_build_manifest(built)
    assert read_manifest(run.store, manifest).kind == "signs"


def test_pca_is_learned_on_as_many_images_as_asked_for_and_stored_in_half_precision(many_photos, tmp_path):
    pca = ["reduction.method=pca", "reduction.dim=8", "reduction.stored=float16", "reduction.num_images=20"]
    run, built = encode_here(many_photos, tmp_path / "run", settings_of(*pca))
    facts = reduction_of(run)
    assert (facts["method"], facts["dim"], facts["num_images"]) == ("pca", 8, 20)
    sampled = read_commits(run.url, "sample_vlads").values()
    assert sum(commit.report["images"] for commit in sampled) == 20
    vectors = make_codec("float16", 8).decode(stored_codes(run)[0])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
    assert isinstance(built, BuildIndex)
    manifest = write_build_manifest(built)
    assert read_manifest(run.store, manifest).kind == "exact"


def test_pca_of_too_few_images_is_refused_and_nothing_is_written(photos, others, tmp_path):
    settings = settings_of("reduction.method=pca", "reduction.dim=30")
    url = str(tmp_path / "run")
    with pytest.raises(
        InputError, match=r"at least 31 images, there are 22: use --set reduction\.method=fla"
    ):
        plan(str(photos), url, settings)
    with pytest.raises(InputError, match="at least 31 images, the background has 24"):
        plan(str(photos), url, settings, background=[str(others)])
    assert not (tmp_path / "run").exists()


def test_a_background_is_learned_from_and_not_indexed(reference, others, tmp_path):
    run = finish_with_background(reference, others, tmp_path / "run")
    facts = reduction_of(run)
    assert (facts["num_directions"], facts["num_images"], facts["background"]) == (6, 24, True)
    assert sum(segment.num_images for segment in read_segments(run)) == 22
    plain, with_background = (stored_codes(one)[0] for one in (RunFolder.open(str(reference)), run))
    assert plain.shape == with_background.shape
    assert not np.array_equal(plain, with_background)


def test_another_background_or_a_late_one_is_refused(reference, photos, others, tmp_path):
    settings = settings_of()
    run = plan(str(photos), str(tmp_path / "run"), settings, background=[str(others)])
    background = run.background.latest()
    assert len(read_images(run, background.images)) == background.num_images == 24
    record_background(run, settings, str(others))
    with pytest.raises(RunMismatch, match=r"is .*others.*, not .*photos.*: leave --background out"):
        record_background(run, settings, str(photos))
    trained = RunFolder.open(shutil.copytree(reference, tmp_path / "trained"))
    with pytest.raises(RunMismatch, match="are learned already, without a background"):
        record_background(trained, settings, str(others))
    with pytest.raises(InputError, match="--background is of no use with --models"):
        plan(str(photos), str(tmp_path / "third"), settings, background=[str(others)], models=run.url)


def test_a_run_may_be_the_background(reference, others, tmp_path):
    settings = settings_of("reduction.num_images=10")
    run = plan(str(others), str(tmp_path / "run"), settings, background=str(reference))
    background = run.background.latest()
    assert background.num_images == 22
    assert len(read_images(run, background.images)) == 10


def test_a_background_that_is_not_there_is_refused_before_anything_is_written(photos, tmp_path):
    with pytest.raises(InputError, match="nowhere does not exist"):
        index_images(
            str(photos), str(tmp_path / "run"), settings_of(), background=[str(tmp_path / "nowhere")]
        )
    assert not (tmp_path / "run").exists()


def test_a_background_that_teaches_nothing_is_refused(photos, others, tmp_path):
    settings = settings_of("reduction.min_images=1000")
    with pytest.raises(InputError, match=r"a background of \d+ images teaches nothing: give at least 1000 "):
        index_images(str(photos), str(tmp_path / "run"), settings, background=[str(others)])
    assert not (tmp_path / "run").exists()


def test_scores_of_the_index_are_those_of_the_signs(reference, photos):
    index = open_index(str(reference))
    hits = index.search(str(photos / "coffee.jpg"), k=2)
    assert [hit.uri.rsplit("/", 1)[1] for hit in hits] == ["coffee.jpg", "coffee-tilt.jpg"]
    assert hits[0].score == pytest.approx(1, abs=0.02)
    assert index.vector(hits[0].image_id) @ index.vector(hits[0].image_id) > 1.3  # signs, not the vector
