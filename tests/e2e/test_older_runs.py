"""A run that an earlier release made goes on with the settings it has recorded."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from photo_runs import index_here, parse, read_commits

from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import read_photo
from ckn_scale.steps import plan_images
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.storage.run_folder import RunFolder

NEW = ("shrink", "max_gone_share")


def forget(settings: Any) -> Any:
    """Settings as a release wrote them that did not know some of today's."""
    if isinstance(settings, dict):
        return {key: forget(value) for key, value in settings.items() if key not in NEW}
    return [forget(one) for one in settings] if isinstance(settings, list) else settings


@pytest.fixture
def older(photos, reference, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(
            plan_images, "_as_recorded", lambda _, settings: forget(settings.model_dump(mode="json"))
        )
        index_here(photos, tmp_path / "run", models=str(reference), accept=True)
    step = EncodeImages(RunFolder.open(str(tmp_path / "run")))
    recorded = step.run.settings
    assert "shrink" not in str(recorded)
    sections = {name: recorded[name] for name in ("numerics", *step.sections)}  # all that it knew
    payload = {"step": step.label, "version": step.version, "settings": sections, "inputs": step.inputs()}
    made_by = hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()
    assert {one.fingerprint for one in step.log.committed().values()} == {made_by}
    return tmp_path / "run"


def test_it_is_appended_to_searched_and_deleted_from(older, tmp_path, command_line):
    """The default preset is another one, too: without --preset the run's own settings count."""
    before = read_commits(older, "encode_images")
    more = tmp_path / "more"
    more.mkdir()
    (more / "new.jpg").write_bytes(encode_jpeg(read_photo("retina"), 90))
    local = ("--append", "--workers", "0", "--quiet", "--accept")
    refused = command_line("index", more, older, "--preset", "compact", *local)
    assert refused.returncode == 2
    assert "leave --preset, --config, --set and --device out to go on with its own" in refused.stderr
    added = command_line("index", more, older, *local)
    assert added.returncode == 0, added.stderr
    after = read_commits(older, "encode_images")
    assert {one: after[one] for one in before} == before, "nothing was encoded again"
    assert len(after) == len(before) + 1
    found = parse(command_line("search", older, more / "new.jpg", "-k", "1", "--json"))
    hit = found["results"][0]["hits"][0]
    assert hit["uri"].endswith("/new.jpg")
    assert command_line("delete", older, hit["image_id"]).returncode == 0
    assert command_line("verify", older, "--quiet").returncode == 0
