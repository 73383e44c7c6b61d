"""The cache: what was saved comes back, what is damaged counts as absent, and it stays bounded."""

from __future__ import annotations

import os

import numpy as np
import pytest

from ckn_scale.core.specs import PatchSpec
from ckn_scale.errors import InputError
from ckn_scale.evaluate.cache import ContentCache, hash_code, make_key


def test_saved_arrays_come_back(tmp_path):
    cache = ContentCache(tmp_path)
    cache.save("ab12", {"rows": np.arange(6.0).reshape(2, 3)})
    loaded = cache.load("ab12")
    assert loaded is not None
    np.testing.assert_array_equal(loaded["rows"], [[0, 1, 2], [3, 4, 5]])
    assert cache.has("ab12")
    assert cache.load("ab13") is None


def test_damaged_file_counts_as_absent(tmp_path):
    cache = ContentCache(tmp_path)
    cache.save("ab12", {"rows": np.arange(6.0)})
    file = next(tmp_path.rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:20])
    assert cache.load("ab12") is None


def test_oldest_use_leaves_first(tmp_path):
    cache = ContentCache(tmp_path, limit_bytes=5000)
    for number, key in enumerate(["aa", "bb", "cc"]):
        cache.save(key, {"rows": np.zeros(1400, np.uint8)})
        os.utime(cache._path(key), (1000 + number, 1000 + number))
    assert cache.load("aa") is not None  # now the last used
    cache.save("dd", {"rows": np.zeros(1400, np.uint8)})
    assert [cache.has(key) for key in ("aa", "bb", "cc", "dd")] == [True, False, False, True]


def test_folder_that_cannot_be_written_is_an_input_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        ContentCache(tmp_path / "file").save("ab12", {"rows": np.zeros(1)})


def test_key_depends_on_every_fact():
    facts = [
        ("patches", b"bytes", np.arange(3), PatchSpec(), None),
        ("patches", b"other", np.arange(3), PatchSpec(), None),
        ("patches", b"bytes", np.arange(3.0), PatchSpec(), None),
        ("patches", b"bytes", np.arange(3), PatchSpec(region=5.0), None),
        ("patches", b"bytes", np.arange(3), PatchSpec(), [1, 2]),
    ]
    keys = {make_key(*one) for one in facts}
    assert len(keys) == len(facts)
    assert make_key(*facts[0]) in keys


def test_code_of_descriptors_and_of_regions_have_hashes_of_their_own():
    assert hash_code(True) != hash_code(False)
