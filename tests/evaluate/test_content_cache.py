"""The cache: what was saved comes back, what is damaged counts as absent, and it stays bounded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

import ckn_scale
from ckn_scale.core.specs import PatchSpec
from ckn_scale.errors import InputError
from ckn_scale.evaluate.cache import ContentCache, hash_code, hash_folder, make_key

CORE = Path(ckn_scale.__file__).parent / "core"


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


def test_hash_of_the_code_follows_every_file_of_core(tmp_path):
    core = shutil.copytree(CORE, tmp_path / "core", ignore=shutil.ignore_patterns("__pycache__"))
    seen = {hash_folder(core)}
    assert seen == {hash_folder(CORE)}
    files = sorted(core.rglob("*.py"))
    assert core / "ckn_inputs.py" in files
    for path in files:
        path.write_bytes(path.read_bytes() + b"# changed\n")
        seen.add(hash_folder(core))
    assert len(seen) == len(files) + 1


def test_hash_of_the_code_follows_the_arithmetic():
    command = [sys.executable, "-c", "from ckn_scale.evaluate.cache import hash_code; print(hash_code())"]
    other = subprocess.run(
        command, env={**os.environ, "OPENCV_CPU_DISABLE": "AVX2"}, capture_output=True, text=True, check=True
    )
    same = subprocess.run(command, capture_output=True, text=True, check=True)
    assert same.stdout.strip() == hash_code()
    if "AVX2" in cv2.getCPUFeaturesLine():
        assert other.stdout != same.stdout
