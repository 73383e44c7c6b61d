from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save

from ckn_scale.core.model_parts import ModelPart
from ckn_scale.errors import CorruptData, InputError
from ckn_scale.storage.models import load_model, save_model
from ckn_scale.storage.stored_files import StoredFile, write_file

ARRAYS = {
    "filters": np.arange(12, dtype=np.float32).reshape(3, 4),
    "words": np.arange(4, dtype=np.int64),
    "scale": np.array(2.5, dtype=np.float64),
    "none": np.zeros((0, 4), np.float32),
}
META = {"channel": "grad", "layers": [[3, 64]], "alpha": 0.5}
PART = ModelPart(ARRAYS, META)


def test_save_model_then_load_model(store):
    file = save_model(store, "ckn-grad", PART)
    arrays, meta = load_model(store, "ckn-grad", file)
    assert meta == META
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype


def test_save_model_twice_is_one_file(store):
    file = save_model(store, "ckn", PART)
    assert save_model(store, "ckn", ModelPart(*(dict(reversed(one.items())) for one in PART))) == file
    stem = f"models/ckn-{file.sha256[:16]}"
    assert store.list("models") == [f"{stem}.json", f"{stem}.safetensors"]
    assert json.loads(store.read(f"{stem}.json"))["arrays"]["filters"] == {
        "dtype": "float32",
        "shape": [3, 4],
    }


def test_save_model_keeps_what_a_view_shows(tmp_path_store):
    view = np.arange(12, dtype=np.float32).reshape(3, 4).T
    arrays, _ = load_model(tmp_path_store, "m", save_model(tmp_path_store, "m", ModelPart({"a": view}, {})))
    np.testing.assert_array_equal(arrays["a"], view)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("ckn", PART._replace(metadata={**META, "alpha": 0.25})),
        ("other", PART),
        ("ckn", PART._replace(arrays={})),
    ],
)
def test_model_hash_covers_name_arrays_and_metadata(tmp_path_store, name, part):
    first = save_model(tmp_path_store, "ckn", PART)
    assert save_model(tmp_path_store, name, part).sha256 != first.sha256


def test_load_model_refuses_every_flipped_byte(tmp_path_store):
    file = save_model(tmp_path_store, "ckn", PART)
    data = tmp_path_store.read(file.path)
    for position in range(0, len(data), 7):
        flipped = data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :]
        tmp_path_store.local_path(file.path).write_bytes(flipped)
        with pytest.raises(CorruptData, match=r"ckn-.* is damaged"):
            load_model(tmp_path_store, "ckn", file)


def test_load_model_refuses_a_truncated_file(store, damage):
    file = save_model(store, "ckn", PART)
    damage(file.path, store.read(file.path)[:100])
    with pytest.raises(CorruptData, match=r"ckn-.* is damaged"):
        load_model(store, "ckn", file)


def test_load_model_of_a_gone_file(store):
    with pytest.raises(CorruptData, match=r"ckn-0\.safetensors is gone"):
        load_model(store, "ckn", StoredFile("models/ckn-0.safetensors", "0", 1))


def test_load_model_refuses_another_model(tmp_path_store):
    file = save_model(tmp_path_store, "codebook", PART)
    with pytest.raises(InputError, match="holds the model codebook, not ckn"):
        load_model(tmp_path_store, "ckn", file)


def test_save_model_mends_a_damaged_file(tmp_path_store):
    file = save_model(tmp_path_store, "ckn", PART)
    tmp_path_store.local_path(file.path).write_bytes(b"other")
    assert save_model(tmp_path_store, "ckn", PART) == file
    load_model(tmp_path_store, "ckn", file)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a whole ckn_scale model"),
        (b"\x80\x04pickle", "not a whole ckn_scale model"),
        (save({"a": np.zeros(3)}), "not a whole ckn_scale model"),  # of another program
        (
            save({}, metadata={"ckn_scale": json.dumps({"name": "a", "meta": {}, "format": 9})}),
            "model format 9",
        ),
    ],
)
def test_load_model_refuses_other_files(tmp_path_store, data, message):
    file = write_file(tmp_path_store, "m.safetensors", data)
    with pytest.raises(CorruptData, match=message):
        load_model(tmp_path_store, "m", file)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "A"])
def test_save_model_refuses_a_bad_name(tmp_path_store, name):
    with pytest.raises(ValueError, match="name"):
        save_model(tmp_path_store, name, PART)
