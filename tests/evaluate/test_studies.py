"""`ckn-scale study` on tiny sets: what varies, what is kept, what is written."""

from __future__ import annotations

import json
from dataclasses import replace

import cv2
import numpy as np
import pytest
from small_sets import TINY, photo

from ckn_scale.config import load_settings
from ckn_scale.errors import InputError
from ckn_scale.evaluate.cache import ContentCache
from ckn_scale.evaluate.studies import measure
from ckn_scale.evaluate.studies.declared import STUDIES, Variant
from ckn_scale.evaluate.studies.measure import Bench, run_study
from ckn_scale.evaluate.studies.present import arrange, draw_study, format_study
from ckn_scale.evaluate.studies.rendered import CHANGES, change_photo

FEW = [*TINY, "--set", "keypoints.max_keypoints=60", "--set", "vlad.num_words=4"]


@pytest.fixture
def bench(groups, tmp_path) -> Bench:
    def load(*overrides, preset=None):
        return load_settings(preset or "tiny", None, list(overrides))

    return Bench("groups", groups, groups, load, ContentCache(tmp_path / "cache"), lambda *_: None)


@pytest.mark.parametrize("name", STUDIES)
def test_every_setting_of_a_study_is_one_that_there_is(bench, name):
    study = STUDIES[name]
    variants = list(study.list_variants(study.descriptors.split(",")))
    assert len({json.dumps([one.panel, one.series, one.x]) for one in variants}) == len(variants)
    known = [
        one for one in variants if one.descriptor in ("sift", "rootsift") or one.descriptor.startswith("ckn")
    ]
    assert len(known) >= 4
    for variant in known:
        bench.resolve(variant)


def test_settings_of_a_variant_reach_the_channel_they_name(bench):
    grad = Variant("p", "s", 1, "ckn-white", ("channels.{white}.projection.dim=24",))
    settings, requests = bench.resolve(grad)
    assert [one.projection.dim for one in settings.channels] == [64, 24, 32]
    assert requests[0].members[0].channel.projection.dim == 24
    settings, _ = bench.resolve(Variant("p", "s", 1, "ckn-grad", ("+pooling=grad",)))
    assert [one.subsampling for one in settings.channels[0].ckn.layers] == [5, 4]
    with pytest.raises(InputError, match="the preset has no channel 'blue'; it has: grad, white, raw"):
        bench.resolve(Variant("p", "s", 1, "sift", ("channels.{blue}.weight=1",)))


def test_study_goes_on_where_it_was_stopped(scenes, run, cache, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    command = ["study", "gravity", scenes, tmp_path / "out", "--protocol", "mikolajczyk", *FEW, *cache]
    command += ["--descriptors", "sift,ckn-grad"]
    measured = []
    real = Bench.measure

    def stop_after_two(self, variant, folder):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(variant.x)
        return real(self, variant, folder)

    monkeypatch.setattr(measure.Bench, "measure", stop_after_two)
    assert run(*command).exit_code != 0
    assert not (tmp_path / "out" / "study.json").exists()
    again = []
    monkeypatch.setattr(measure.Bench, "measure", lambda *call: again.append(call[1].series) or real(*call))
    result = run(*command)
    assert result.exit_code == 0, (result.output, result.exception)
    assert again == ["ckn-grad", "ckn-grad"]  # those of sift were kept
    lines = result.stderr.splitlines()
    assert "   2/4  measured before" in lines
    assert any(line.startswith("   3/4  orientation dominant, ckn-grad: ") for line in lines)
    assert lines[-1].startswith("   4/4  orientation gravity, ckn-grad: ")
    written = json.loads((tmp_path / "out" / "study.json").read_text())
    rows = written["rows"]
    assert written["seconds"] == pytest.approx(sum(row["seconds"] for row in rows))  # of both calls
    assert "points an image" in written["sizes"]
    assert written["sizes"] in (tmp_path / "out" / "study.txt").read_text()
    assert [(row["series"], row["x"]) for row in rows][:2] == [("sift", "dominant"), ("sift", "gravity")]
    assert all(0 < row["figure"] <= 1 for row in rows)
    assert rows[0]["figure"] != rows[1]["figure"]
    picture = cv2.imread(str(tmp_path / "out" / "study.png"))
    assert min(picture.shape[:2]) > 200
    assert "dominant" in (tmp_path / "out" / "study.txt").read_text()
    monkeypatch.undo()
    other = run("study", "context", scenes, tmp_path / "out", "--protocol", "mikolajczyk", *FEW, *cache)
    assert "holds the study gravity: name another folder" in str(other.exception)


def test_study_of_images_and_what_cannot_be_measured(groups, run, cache, tmp_path):
    pytest.importorskip("matplotlib")
    command = ["study", "supervision", groups, tmp_path / "out", "--protocol", "groups", "--seeds", "2"]
    result = run(*command, *FEW, *cache, "--workers", "1", "--descriptors", "sift,nonsense")
    assert result.exit_code == 0, (result.output, result.exception)
    rows = json.loads((tmp_path / "out" / "study.json").read_text())["rows"]
    assert rows[0]["figure"] > 0.5
    assert rows[0]["spread"] >= 0
    assert rows[1]["figure"] is None
    assert "unknown descriptor 'nonsense'" in rows[1]["reason"]
    assert "not measured:" in result.output


def test_robustness_of_rendered_pairs(groups, run, cache, tmp_path):
    pytest.importorskip("matplotlib")
    command = ["study", "robustness", groups, tmp_path / "out", "--protocol", "photos", "--photos", "1"]
    result = run(*command, *FEW, *cache, "--descriptors", "sift")
    assert result.exit_code == 0, (result.output, result.exception)
    rows = json.loads((tmp_path / "out" / "study.json").read_text())["rows"]
    figures = {(row["panel"].split()[0], row["x"]): row["figure"] for row in rows}
    assert figures["blur", 0.5] > figures["blur", 4]
    assert figures["turn", 90] > 0.3  # orientations are found


@pytest.mark.parametrize("kind", CHANGES)
def test_homography_of_a_change_leads_to_its_pixels(kind):
    image = cv2.GaussianBlur(photo("astronaut", 120), (0, 0), 3)
    changed, homography = change_photo(image, kind, CHANGES[kind][0])
    x, y, w = homography @ np.array([60.0, 50, 1])
    expected = change_photo(image, "light, gamma", CHANGES[kind][0])[0] if kind.startswith("light") else image
    there = changed[round(y / w), round(x / w)].astype(int)
    assert np.abs(there - expected[50, 60]).max() <= 12


def test_other_weights_are_measured_again(bench, tmp_path, monkeypatch):
    """The name of their file does not count, what is in it does."""
    weights, calls = tmp_path / "weights", []
    bench = replace(bench, weights=[f"tfeat={weights}"])
    monkeypatch.setattr(Bench, "measure", lambda *call: calls.append(call) or (0.5, 0.0))
    for content in (b"one", b"one", b"two"):
        weights.write_bytes(content)
        run_study(STUDIES["supervision"], bench, ["sift"], tmp_path)
    assert len(calls) == 2


def test_other_data_are_measured_again(bench, tmp_path, monkeypatch):
    photos, calls = tmp_path / "photos", []
    photos.mkdir()
    bench = replace(bench, data=photos, train_images=photos)
    monkeypatch.setattr(Bench, "measure", lambda *call: calls.append(call) or (0.5, 0.0))
    for content in (b"one", b"one", b"two!"):
        if not (photos / "a.jpg").exists() or (photos / "a.jpg").read_bytes() != content:
            (photos / "a.jpg").write_bytes(content)
        run_study(STUDIES["supervision"], bench, ["sift"], tmp_path / "out")
    assert len(calls) == 2


def test_results_do_not_lie_among_the_data(groups, run):
    pytest.importorskip("matplotlib")
    result = run("study", "context", groups, groups / "out", "--protocol", "groups")
    assert "lies in" in str(result.exception)
    assert not (groups / "out").exists()


def test_wrong_protocol_is_one_sentence(groups, run, tmp_path):
    pytest.importorskip("matplotlib")
    result = run("study", "crop", groups, tmp_path / "out", "--protocol", "groups")
    assert "the study crop takes --protocol oxford, got groups" in str(result.exception)
    result = run("study", "context", groups, tmp_path / "out", "--protocol", "rome")
    assert "the study context takes --protocol mikolajczyk or holidays or" in str(result.exception)
    assert not (tmp_path / "out").exists()


ROWS = [
    {"panel": "p", "series": "a", "x": 8, "figure": 0.5, "spread": 0.01},
    {"panel": "p", "series": "b", "x": 8, "figure": None, "reason": "too small"},
    {"panel": "p", "series": "a", "x": 16, "figure": 0.75},
]


def test_table_has_a_line_for_each_place():
    assert arrange(ROWS) == (["x", "a", "b"], [["8", "50.0 ± 1.0", "–"], ["16", "75.0", "–"]])
    text = format_study("question", "mAP", "4 scenes", ROWS)
    assert text.splitlines()[-2:] == ["not measured:", "b, 8: too small"]


def test_picture_has_a_panel_for_each_part():
    pytest.importorskip("matplotlib")
    rows = [{**row, "panel": panel} for panel in "pqrs" for row in ROWS]
    assert draw_study("q", "", "mAP", rows).shape[1] > draw_study("q", "", "mAP", ROWS).shape[1]
