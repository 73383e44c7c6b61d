"""A built wheel, installed outside the clone, finds its presets and page files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOOK = """
import ckn_scale, pathlib
from ckn_scale.config import list_presets, load_settings
from ckn_scale.serving.index_routes import PAGE_FOLDER
print(pathlib.Path(ckn_scale.__file__).parent)
print(load_settings("compact").channel_names, list_presets())
print((pathlib.Path(str(PAGE_FOLDER)) / "index.html").stat().st_size > 500)
print((pathlib.Path(ckn_scale.__file__).parent / "py.typed").exists())
"""


def test_wheel_finds_its_files_outside_the_clone(tmp_path):
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(ROOT)], check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("ckn_scale-*.whl")
    target = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    result = subprocess.run(
        [sys.executable, "-c", LOOK], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    place, presets, page, typed = result.stdout.splitlines()
    assert place == str(target / "ckn_scale")
    assert "compact" in presets
    assert "paper" in presets
    assert (page, typed) == ("True", "True")
