from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save

from ckn_scale.errors import CorruptData, InputError
from ckn_scale.storage.models import ModelFile, find_model, load_model, save_model

ARRAYS = {
    "filters": np.arange(12, dtype=np.float32).reshape(3, 4),
    "words": np.arange(4, dtype=np.int64),
    "scale": np.array(2.5, dtype=np.float64),
    "none": np.zeros((0, 4), np.float32),
}
META = {"channel": "grad", "layers": [[3, 64]], "alpha": 0.5}


def test_save_model_then_load_model(store):
    file = save_model(store, "ckn-grad", ARRAYS, META)
    arrays, meta = load_model(store, file)
    assert meta == META
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype


def test_save_model_twice_is_one_file(store):
    file = save_model(store, "ckn", ARRAYS, META)
    assert save_model(store, "ckn", dict(reversed(ARRAYS.items())), dict(reversed(META.items()))) == file
    stem = f"models/ckn-{file.sha256[:16]}"
    assert store.list("models") == [f"{stem}.json", f"{stem}.safetensors"]
    assert json.loads(store.read(f"{stem}.json"))["arrays"]["filters"] == {
        "dtype": "float32",
        "shape": [3, 4],
    }


def test_save_model_keeps_what_a_view_shows(tmp_path_store):
    view = np.arange(12, dtype=np.float32).reshape(3, 4).T
    arrays, _ = load_model(tmp_path_store, save_model(tmp_path_store, "m", {"a": view}, {}))
    np.testing.assert_array_equal(arrays["a"], view)


@pytest.mark.parametrize("change", [{"meta": {**META, "alpha": 0.25}}, {"name": "other"}, {"arrays": {}}])
def test_model_hash_covers_name_arrays_and_meta(tmp_path_store, change):
    base = {"name": "ckn", "arrays": ARRAYS, "meta": META}
    first = save_model(tmp_path_store, **base)
    assert save_model(tmp_path_store, **{**base, **change}).sha256 != first.sha256


def test_load_model_refuses_every_flipped_byte(tmp_path_store):
    file = save_model(tmp_path_store, "ckn", ARRAYS, META)
    data = tmp_path_store.read(file.path)
    for position in range(0, len(data), 7):
        flipped = data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :]
        tmp_path_store.local_path(file.path).write_bytes(flipped)
        with pytest.raises(CorruptData, match="the model ckn is damaged"):
            load_model(tmp_path_store, file)


def test_load_model_refuses_a_truncated_file(store, damage):
    file = save_model(store, "ckn", ARRAYS, META)
    damage(file.path, store.read(file.path)[:100])
    with pytest.raises(CorruptData, match="the model ckn is damaged"):
        load_model(store, file)


def test_load_model_of_a_gone_file(store):
    with pytest.raises(CorruptData, match="the model ckn is gone"):
        load_model(store, ModelFile("ckn", "models/ckn-0.safetensors", "0"))


def test_load_model_refuses_another_model(tmp_path_store):
    file = save_model(tmp_path_store, "codebook", ARRAYS, META)
    with pytest.raises(InputError, match="holds the model codebook, not ckn"):
        load_model(tmp_path_store, ModelFile("ckn", file.path, file.sha256))


def test_save_model_mends_a_damaged_file(tmp_path_store):
    file = save_model(tmp_path_store, "ckn", ARRAYS, META)
    tmp_path_store.local_path(file.path).write_bytes(b"other")
    assert save_model(tmp_path_store, "ckn", ARRAYS, META) == file
    load_model(tmp_path_store, file)


def test_find_model_describes_a_users_file(store):
    file = save_model(store, "ckn", ARRAYS, META)
    assert find_model(store, file.path) == file


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
def test_find_model_refuses_other_files(tmp_path_store, data, message):
    tmp_path_store.write_new("m.safetensors", data)
    with pytest.raises(InputError, match=message):
        find_model(tmp_path_store, "m.safetensors")


def test_find_model_refuses_a_name_that_does_not_fit(tmp_path_store):
    file = save_model(tmp_path_store, "ckn", ARRAYS, META)
    tmp_path_store.write_new("models/ckn-0123456789abcdef.safetensors", tmp_path_store.read(file.path))
    with pytest.raises(InputError, match="does not fit the hash in its name"):
        find_model(tmp_path_store, "models/ckn-0123456789abcdef.safetensors")
    with pytest.raises(InputError, match="there is no model file"):
        find_model(tmp_path_store, "models/none.safetensors")


@pytest.mark.parametrize("name", ["", "../x", "a/b", "A"])
def test_save_model_refuses_a_bad_name(tmp_path_store, name):
    with pytest.raises(ValueError, match="name"):
        save_model(tmp_path_store, name, ARRAYS, META)
