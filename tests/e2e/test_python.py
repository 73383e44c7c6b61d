"""What a user does from Python: the README's lines, names of the package, arguments that are wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from photo_runs import OVERRIDES

import ckn_scale

README = Path(__file__).resolve().parents[2] / "README.md"
SMALL = f"""
import ckn_scale.api
ckn_scale.api.index.__kwdefaults__.update(preset="tiny", overrides={OVERRIDES!r})
"""


def test_the_readme_runs_as_a_script_without_a_main_guard(photos, user_env, tmp_path):
    """Only the preset is another; workers are spawned, and must not run the script again."""
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "photos").symlink_to(photos)
    for name, photo in (("query", "coffee"), ("other", "rocket")):
        (tmp_path / f"{name}.jpg").write_bytes((photos / f"{photo}-tilt.jpg").read_bytes())
    told = "print([answer[0].uri.rpartition('/')[2] for answer in answers], vectors.shape[0], report, index)"
    (tmp_path / "script.py").write_text(SMALL + block + told)
    result = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=user_env, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    verdict, *hits = result.stdout.splitlines()[:6]
    last = result.stdout.splitlines()[-1]
    assert verdict == "found"
    assert all(re.fullmatch(r"(True|False) \d\S* \d+ \S.* \S+\.jpg {}", line) for line in hits), result.stdout
    assert last.startswith("['coffee-tilt.jpg', 'rocket-tilt.jpg'] 2 IndexReport(run=")
    assert "version=1, states={'ok': 21, 'truncated': 1}, shards_done={'sample_patches': " in last
    assert re.search(r"<Index '\S+/run' version 1: 21 images, \d+ dimensions>$", last)


def test_every_name_of_the_package_is_there_and_documented():
    for name in set(ckn_scale.__all__) - {"__version__"}:
        assert getattr(ckn_scale, name).__doc__, name
        assert name in dir(ckn_scale)
    defined = {name for name, one in vars(ckn_scale.errors).items() if isinstance(one, type)}
    assert defined >= {"CknScaleError", "ImageRejected", "ServerBusy"}
    assert defined <= set(ckn_scale.__all__), "whoever calls us can catch what we raise"
    with pytest.raises(AttributeError, match="has no attribute 'indx'"):
        ckn_scale.indx  # noqa: B018


@pytest.mark.parametrize(
    ("images", "options", "message"),
    [
        (7, {}, "images must be a path, a URI or a list of them, got int"),
        (["a.jpg", 7.5], {}, "got .*float"),
        ([], {}, "no images were named"),
        (Path("nowhere"), {}, "nowhere does not exist"),
        ([Path("nowhere"), "else"], {}, "nowhere does not exist"),
        ("nowhere", {"workers": -1}, "workers: .*greater than or equal to 0"),
        ("nowhere", {"preset": "big"}, "no preset named 'big'"),
    ],
)
def test_wrong_arguments_are_told_in_one_sentence(tmp_path, images, options, message):
    with pytest.raises(ckn_scale.InputError, match=message) as told:
        ckn_scale.index(images, tmp_path / "run", **{"workers": 0, "preset": "tiny", **options})
    assert "\n" not in str(told.value)
    assert not (tmp_path / "run").exists()


def test_paths_and_lists_of_paths_are_indexed(photos, reference, tmp_path):
    chosen = [photos / "coffee.jpg", str(photos / "coffee-tilt.jpg"), photos / "rocket.jpg"]
    options = {"preset": "tiny", "overrides": OVERRIDES, "workers": 0, "accept": True}
    report = ckn_scale.index(chosen, tmp_path / "run", models=reference, **options)
    assert report.states == {"ok": 3}
    index = ckn_scale.open_index(tmp_path / "run")
    assert len(index) == 3
    assert [hits[0].uri for hits in index.search(chosen[::2], k=1)] == [str(chosen[0]), str(chosen[2])]
