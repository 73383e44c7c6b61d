"""Runs whose index has short codes: they answer like one without, and keep their quantiser."""

from __future__ import annotations

import shutil
from dataclasses import asdict

import pytest
from photo_runs import OVERRIDES, digests_of, read_commits

from ckn_scale.config import Resources, load_settings
from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import DISTRACTORS, read_photo
from ckn_scale.errors import SettingsError
from ckn_scale.pipeline import index_images
from ckn_scale.runs.delete_images import delete_images
from ckn_scale.runs.verify import verify_run
from ckn_scale.search.engine import open_index
from ckn_scale.steps import compress_index, learn_quantiser
from ckn_scale.steps.compress_index import MakeCodes, MeasureShortlist
from ckn_scale.storage.index_files import read_manifest
from ckn_scale.storage.models import load_model
from ckn_scale.storage.run_folder import RunFolder


def make_run(photos, url, reference, kind, **options):
    settings = load_settings("tiny", None, [*OVERRIDES, f"index.kind={kind}"])
    return index_images(
        str(photos), str(url), settings, Resources(workers=0), models=str(reference), **options
    )


def manifest_of(run):
    opened = RunFolder.open(str(run))
    return read_manifest(opened.store, opened.versions.latest().manifest)


@pytest.fixture(scope="module", params=["pq", "ivf-pq"])
def coded(request, photos, reference, tmp_path_factory):
    run = tmp_path_factory.mktemp("coded") / "run"
    make_run(photos, run, reference, request.param)
    return request.param, run


def test_answers_are_those_of_a_run_that_compares_all_rows(coded, reference, photos):
    kind, run = coded
    assert manifest_of(run).short_codes.kind == kind
    assert manifest_of(reference).short_codes is None, "auto: so few are compared as a whole"
    plain, short = open_index(str(reference)), open_index(str(run))
    for name in ("astronaut", "coffee"):
        query = plain.encode(photos / f"{name}-tilt.jpg")
        assert short.search_vector(query, 8) == plain.search_vector(query, 8)
        assert short.search_vector(query, 100) == plain.search_vector(query, 100)


def test_the_certificate_says_what_was_chosen_and_what_it_keeps(coded):
    kind, run = coded
    certificate, models = RunFolder.open(str(run)).versions.latest().certificate, manifest_of(run).models
    words = load_model(RunFolder.open(str(run)).store, "points-words", models["points-words"])
    assert certificate.evidence.words == len(words.arrays["centroids"]) > 1
    found = asdict(certificate)["shortlist"]
    assert (found["kind"], found["used"], found["depth"]) == (kind, True, 2000)
    assert found["queries"] + found["tuned_on"] > 10
    assert found["kept"] >= (0.99 if kind == "pq" else 0.5) * found["queries"]  # lists of 20 images are short
    assert (
        found["bytes_per_row"]
        == manifest_of(run).shards[0].codes.size_bytes / manifest_of(run).shards[0].rows
    )
    assert (found["lists"] > 0) == (kind == "ivf-pq")


def test_the_run_is_whole_and_the_same_again(coded, photos, reference, tmp_path):
    kind, run = coded
    assert not verify_run(RunFolder.open(str(run))).problems
    make_run(photos, run, reference, kind)  # nothing to do
    assert RunFolder.open(str(run)).versions.latest().number == 1
    make_run(photos, tmp_path / "again", reference, kind)
    assert digests_of(tmp_path / "again") == digests_of(run)


@pytest.mark.parametrize("step", [MakeCodes, MeasureShortlist])
def test_killed_while_it_compresses_it_goes_on(coded, photos, reference, tmp_path, monkeypatch, step):
    kind, run = coded
    monkeypatch.setattr(step, "apply", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        make_run(photos, tmp_path / "killed", reference, kind)
    monkeypatch.undo()
    make_run(photos, tmp_path / "killed", reference, kind)
    assert digests_of(tmp_path / "killed") == digests_of(run)


def test_an_append_keeps_the_quantiser_and_the_codes_that_are_there(coded, reference, tmp_path):
    kind, made = coded
    run, more = shutil.copytree(made, tmp_path / "run"), tmp_path / "more"
    more.mkdir()
    for name in DISTRACTORS[5:8]:
        (more / f"new-{name}.jpg").write_bytes(encode_jpeg(read_photo(name), 90))
    before = manifest_of(run)
    name = before.short_codes.quantiser.sha256[:16]
    codes = read_commits(run, f"make_codes-{name}")
    make_run(more, run, reference, kind, append=True)
    after = manifest_of(run)
    assert after.rows == before.rows + 3
    assert after.short_codes.quantiser == before.short_codes.quantiser
    assert all(read_commits(run, f"make_codes-{name}")[number] == one for number, one in codes.items())
    found = open_index(str(run)).search(more / f"new-{DISTRACTORS[5]}.jpg", 1)
    assert found[0].uri.endswith(f"new-{DISTRACTORS[5]}.jpg")


def test_what_is_deleted_leaves_the_answers_and_the_codes_stay(coded, photos, tmp_path):
    run = shutil.copytree(coded[1], tmp_path / "run")
    before, query = manifest_of(run), photos / "astronaut.jpg"
    gone = open_index(str(run)).search(query, 1)[0].image_id
    delete_images(RunFolder.open(str(run)), [gone])
    after = manifest_of(run)
    assert after.short_codes == before.short_codes
    assert [shard.codes for shard in after.shards] == [shard.codes for shard in before.shards]
    found = open_index(str(run)).search(query, 100)
    assert len(found) == before.rows - 1
    assert gone not in {hit.image_id for hit in found}


def test_auto_does_not_use_codes_that_lose_answers(photos, reference, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(learn_quantiser, "COMPARED_BYTES", 0)
    monkeypatch.setattr(compress_index, "DEPTHS", (1,))
    monkeypatch.setattr(MeasureShortlist, "count_before", lambda step: 0 * step.levels + 5)
    make_run(photos, tmp_path / "run", reference, "auto")
    assert manifest_of(tmp_path / "run").short_codes is None
    found = RunFolder.open(str(tmp_path / "run")).versions.latest().certificate.shortlist
    assert (found["used"], found["kept"]) == (False, 0)
    assert "they are not used: all rows are compared" in caplog.text


def test_a_kind_that_the_vectors_are_not_stored_for_is_refused():
    stored = load_settings("tiny", None, []).reduction.stored
    wrong = {"signs": "exact", "float16": "signs"}[stored]
    with pytest.raises(SettingsError, match=f"index.kind = {wrong} compares vectors stored as"):
        load_settings("tiny", None, [f"index.kind={wrong}"])
