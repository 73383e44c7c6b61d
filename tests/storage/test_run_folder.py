from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest

from ckn_scale.errors import CorruptData, InputError, RunMismatch, UnsupportedStore
from ckn_scale.storage import run_folder
from ckn_scale.storage.records import encode_record
from ckn_scale.storage.run_folder import RunFolder, is_run, parse_data_path, split_generation_url
from ckn_scale.storage.run_records import Generation
from ckn_scale.storage.store import Store

SETTINGS = {"encode": {"max_keypoints": 800, "layers": ((3, 64), (2, 256))}, "seed": 0}


def test_create_then_open_gives_the_settings(store_url):
    assert not is_run(store_url)
    made = RunFolder.create(store_url, SETTINGS)
    opened = RunFolder.open(store_url)
    assert is_run(store_url)
    assert opened.body == made.body
    assert opened.settings["encode"] == {"max_keypoints": 800, "layers": [[3, 64], [2, 256]]}


def test_create_with_equal_settings_opens_the_same_run(store_url):
    made = RunFolder.create(store_url, SETTINGS)
    assert RunFolder.create(store_url, SETTINGS).body == made.body


def test_create_with_other_settings_names_key_old_and_new(store_url):
    RunFolder.create(store_url, SETTINGS)
    other = {"encode": {"max_keypoints": 500, "layers": ((3, 64), (2, 128))}, "extra": True}
    with pytest.raises(RunMismatch) as caught:
        RunFolder.create(store_url, other)
    message = str(caught.value)
    assert "encode.max_keypoints is 800 there and 500 here" in message
    assert "encode.layers.1.1 is 256 there and 128 here" in message
    assert "seed is 0 there and '(not set)' here" in message
    assert "extra is '(not set)' there and True here" in message


def test_open_without_a_run_is_an_input_error(store_url):
    with pytest.raises(InputError, match=r"is not a run folder: it has no run\.json"):
        RunFolder.open(store_url)


def test_open_refuses_a_damaged_run_record(run, store, damage):
    damage("run.json", store.read("run.json")[:-10])
    with pytest.raises(CorruptData, match=r"run\.json is not a whole record"):
        RunFolder.open(run.url)


def test_open_refuses_another_format(tmp_path):
    Store(tmp_path).write_new("run.json", encode_record({"format": 99, "settings": {}}))
    with pytest.raises(RunMismatch, match="run format 99, this version of ckn_scale reads 3"):
        RunFolder.open(str(tmp_path))


def test_create_refuses_memory():
    with pytest.raises(UnsupportedStore):
        RunFolder.create("memory://run", {})


def test_paths_are_those_of_the_design(tmp_path):
    run = RunFolder.create(str(tmp_path), {})
    assert run.data_path("vectors", 12, "ab") == "vectors/00012-ab.parquet"
    assert run.draw_path("ab") == "queries/ab.json"
    assert run.outcomes_path("ab", "cd") == "queries/ab-outcomes-cd.json"
    assert run.index_folder("7", "ab") == "index/7-ab"
    assert run.commits("encode").path(12, 1) == "commits/encode/00012.1.json"
    assert [log.path(7) for log in (run.plan, run.models, run.versions)] == [
        "plan/000007.json",
        "models/000007.json",
        "index/000007.json",
    ]


def test_run_pickles(run):
    copy = pickle.loads(pickle.dumps(run))
    copy.models.append(Generation(0, {}))
    assert run.models.latest() == Generation(1, {})


def test_nonce_is_seen_by_another_opening(run):
    nonce = run.write_nonce()
    RunFolder.open(run.url).check_nonce(nonce)
    run.remove_nonce(nonce)
    with pytest.raises(InputError, match="does not see the run"):
        RunFolder.open(run.url).check_nonce(nonce)


def test_nonce_unseen_names_host_and_path(tmp_path):
    here = RunFolder.create(str(tmp_path / "here"), {})
    there = RunFolder.create(str(tmp_path / "there"), {})
    with pytest.raises(InputError, match=r"host \S+ does not see the run at .*/there"):
        there.check_nonce(here.write_nonce())


def test_no_other_module_knows_the_names_inside_a_run():
    package = Path(run_folder.__file__).parents[1]
    folders = "background commits descriptors events images index models nonces numerics plan queries samples"
    name = re.compile(rf"({'|'.join(folders.split())}|thumbnails|vectors)/(?!s$)")  # images/s is a unit
    found = [
        f"{path.relative_to(package)}:{node.lineno} {node.value!r}"
        for path in package.rglob("*.py")
        if path != Path(run_folder.__file__)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if name.match(node.value) and " " not in node.value
    ]
    assert found == []


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("vectors/00012-ab.parquet", ("vectors", 12)),
        ("samples/vlads/0003/00012-ab.parquet", ("samples/vlads/0003", 12)),
        ("images/000002-ab/00000-ab.parquet", ("images", 2)),
        ("index/100000000000007-ab/shard-00100.faiss", ("build_index", 100000000000007)),
        ("index/0123456789abcdef-ab/manifest.json", None),
        ("index/000007.json", None),
        ("models/ckn-grad-0123456789abcdef.safetensors", None),
    ],
)
def test_parse_data_path_says_what_a_file_belongs_to(path, owner):
    assert parse_data_path(path) == owner


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("s3://b/run", ("s3://b/run", None)),
        ("run/models/000012.json", ("run", 12)),
    ],
)
def test_split_generation_url(url, parts):
    assert split_generation_url(url) == parts


@pytest.mark.parametrize("url", ["run/models/ckn-grad-ab.json", "run.json"])
def test_split_generation_url_refuses_other_records(url):
    with pytest.raises(InputError, match="is no record of models"):
        split_generation_url(url)
