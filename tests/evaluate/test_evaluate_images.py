"""`ckn-scale evaluate images` on three photographs and their turned copies."""

from __future__ import annotations

import json

import numpy as np
import pytest
from small_sets import TINY, photo, save

from ckn_scale.config import load_settings
from ckn_scale.evaluate.cache import ContentCache
from ckn_scale.evaluate.descriptors import fit_member, list_members, parse_requests
from ckn_scale.evaluate.image_sets import read_image_set
from ckn_scale.evaluate.image_table import ImageTable, Place
from ckn_scale.evaluate.parallel import describe_files
from ckn_scale.evaluate.regions import ImageFile, RegionReader, describe_regions
from ckn_scale.evaluate.training_images import TrainingPatches


def test_images_table_and_json(groups, run, cache, tmp_path):
    out = tmp_path / "out.json"
    options = ["--protocol", "groups", "--descriptors", "sift,ckn-grad,ckn,ckn-mix,sift+ckn-grad"]
    more = ["--words", "4", "--regions", "8", "--intra", "both", "--seeds", "2", "--json", out]
    result = run("evaluate", "images", groups, *TINY, *cache, *options, *more)
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    assert content["protocol"] == "groups"
    assert (content["images"], content["queries"]) == (6, 6)
    assert content["data"] == str(groups)
    assert content["machine"]["cores"] >= 1
    rows = {one["descriptor"]: one for one in content["results"]}
    assert rows["sift"]["dim"] == 4 * 128
    assert rows["sift+ckn-grad"]["dim"] == 4 * (128 + 64)
    for one in rows.values():
        assert 0.5 < one["map"] <= 1.0
        assert len(one["seeds"]) == 2
        assert len(one["grid"]) == 2  # with and without intra-normalisation
        assert one["map"] == pytest.approx(sum(one["seeds"]) / 2)
        assert one["recall_at"]["5"] == 1.0  # five others are there
        assert all((groups / example["query"]).is_file() for example in one["examples"])
    # The tiny preset indexes with all three channels, which is the paper's mix.
    assert rows["ckn"]["dim"] == rows["ckn-mix"]["dim"] == 4 * (64 + 32 + 32)


def test_second_table_is_the_same_from_the_cache(groups, run, cache):
    options = ["--protocol", "groups", "--descriptors", "rootsift,ckn-grad", "--words", "4", "--seeds", "1"]
    first = run("evaluate", "images", groups, *TINY, *cache, *options)
    second = run("evaluate", "images", groups, *TINY, *cache, *options)
    assert first.exit_code == 0, first.output
    assert second.output == first.output


def test_reductions_are_learned_on_other_images(groups, scenes, run, cache, tmp_path):
    out, others = tmp_path / "out.json", tmp_path / "others"
    image = photo("rocket", 240)
    for i in range(20):  # 20 pieces of another photograph
        save(others / f"{i}.png", image[5 * (i // 5) : 100 + 5 * (i // 5), 20 * (i % 5) : 140 + 20 * (i % 5)])
    options = ["--protocol", "groups", "--descriptors", "ckn-grad", "--words", "4", "--intra", "yes"]
    more = ["--seeds", "1", "--reduction-images", others, "--dim", "4,2", "--json", out]
    result = run("evaluate", "images", groups, *TINY, *cache, *options, *more)
    assert result.exit_code == 0, result.output
    rows = {(one["reduction"], one["dim"]): one for one in json.loads(out.read_text())["results"]}
    dim = 4 * 64
    assert set(rows) == {("none", dim), ("flatten", dim), ("signs", dim), ("pca", 2), ("pca", 4)}
    assert rows["signs", dim]["bytes"] == dim // 8 + 8
    assert rows["pca", 4]["bytes"] == 8
    assert all(0 < one["map"] <= 1 for one in rows.values())
    assert "ckn-grad, pca 4" in result.output
    assert "ckn-grad, signs" in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dim", "8"], ["--dim", "--reduction-images"]),
        (["--dim", "x", "--reduction-images", "nowhere"], ["--dim", "'x'"]),
        (["--reduction-images", "nowhere"], ["nowhere"]),
        (["--descriptors", "ckn-gard"], ["ckn-gard", "ckn-grad"]),
        (["--set", "vlad.num_word=8"], ["vlad.num_word"]),
        (["--regions", "0"], ["--regions", "0"]),
        (["--train-images", "nowhere"], ["nowhere"]),
    ],
)
def test_bad_options_are_refused(groups, run, cache, tmp_path, options, words):
    result = run("evaluate", "images", groups, "--protocol", "groups", *cache, *options)
    assert result.exit_code == 2, result.output
    for word in words:
        assert word in str(result.exception)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("protocol", ["holidays", "ukbench", "oxford", "groups"])
def test_missing_folder_is_refused(run, tmp_path, protocol):
    result = run("evaluate", "images", tmp_path / "nowhere", "--protocol", protocol)
    assert result.exit_code == 2
    assert "nowhere" in str(result.exception)


def test_folder_without_images_is_refused(run, tmp_path):
    result = run("evaluate", "images", tmp_path, "--protocol", "holidays")
    assert result.exit_code == 2
    assert "there is no image in" in str(result.exception)


def test_processes_give_the_same_descriptors(groups, tmp_path, monkeypatch):
    monkeypatch.setattr("ckn_scale.evaluate.parallel.MIN_FILES", 2)
    settings = load_settings("tiny", None, TINY[3::2])
    paths = sorted(groups.glob("*.png"))
    rows = []
    for workers in (1, 2):
        cache = ContentCache(tmp_path / str(workers))
        reader = RegionReader(settings.images, settings.keypoints, settings.patches, cache)
        member = parse_requests("ckn-grad", lambda _: settings)[0].members[0]
        training = TrainingPatches(paths, reader, lambda *_: None)
        keyed = fit_member(member, None, training.source(settings.patches.region, settings.sample), cache)
        files = [ImageFile(path) for path in paths]
        assert describe_files(files, reader, keyed, "test", lambda *_: None, workers=workers) > 0
        rows.append([describe_regions(reader, file, keyed)[0] for file in files])
    for alone, together in zip(*rows, strict=True):
        np.testing.assert_array_equal(alone, together)


def test_a_channel_of_few_points_makes_its_vector_of_the_strongest(groups):
    """As encoding does."""

    def compare(*overrides):
        settings = load_settings("tiny", None, ["vlad.num_words=4", "sample.num_patches=300", *overrides])
        images = read_image_set(groups, "groups")
        requests = parse_requests("ckn-grad", lambda _: settings)
        train = [file.path for file in images.images]
        table = ImageTable(images, requests, settings, train, ContentCache(None), lambda *_: None, seeds=(0,))
        training = TrainingPatches(train, table.reader, lambda *_: None)
        (member,) = list_members(requests)
        return table.compare(member, Place(8.0, None), training)

    few = compare("channels.0.max_points=15")
    whole = compare()
    same = compare("channels.0.max_points=500")
    np.testing.assert_array_equal(same.similarities[0, True], whole.similarities[0, True])
    assert np.abs(few.similarities[0, True] - whole.similarities[0, True]).max() > 0.01
