"""A small photo set, the run that one process makes of it, and the command line as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckn_scale.config import Resources, load_settings
from ckn_scale.core.views import encode_jpeg, render_view
from ckn_scale.demo import DISTRACTORS, PHOTOS, read_photo
from ckn_scale.runners.index_images import index_images
from ckn_scale.steps.run_digest import digest_run
from ckn_scale.storage.run_folder import RunFolder

OVERRIDES = ["plan.images_per_shard=2", "sample.images_per_shard=6", "publish.max_failed_share=0.1"]
CommandLine = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs, a tilted view of each, distractors, and one file that is no image."""
    folder = tmp_path_factory.mktemp("photos")
    for name in PHOTOS:
        photo = read_photo(name)
        (folder / f"{name}.jpg").write_bytes(encode_jpeg(photo, 92))
        (folder / f"{name}-tilt.jpg").write_bytes(encode_jpeg(render_view(photo, "tilt", 1), 90))
    for name in DISTRACTORS[:5]:
        (folder / f"other-{name}.jpg").write_bytes(encode_jpeg(read_photo(name), 90))
    (folder / "broken.jpg").write_bytes(encode_jpeg(read_photo("coffee"), 90)[:2000])
    return folder


@pytest.fixture(scope="session")
def reference(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that this process makes, alone: what all others must equal."""
    run = tmp_path_factory.mktemp("reference") / "run"
    index_images(str(photos), str(run), load_settings("tiny", None, OVERRIDES), Resources(workers=0))
    return run


@pytest.fixture(scope="session")
def reference_digests(reference: Path) -> dict[str, str]:
    return digests_of(reference)


def digests_of(run: Path | str) -> dict[str, str]:
    return digest_run(RunFolder.open(str(run)))


@pytest.fixture(scope="session")
def user_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with a home of its own, so that Ray's files do not land in the developer's."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**env, "HOME": str(tmp_path_factory.mktemp("home")), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def command_line(user_env: dict[str, str]) -> CommandLine:
    """`ckn-scale …` as a process of its own."""

    def call(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        environment = {**user_env, **{k: v for k, v in os.environ.items() if k.startswith("AWS_")}}
        return subprocess.run(
            index_command(*arguments), env=environment, capture_output=True, text=True, timeout=240, **options
        )

    return call


def index_command(*arguments: str | Path) -> list[str]:
    return [str(Path(sys.executable).parent / "ckn-scale"), *map(str, arguments)]


def tiny_options() -> list[str]:
    return ["--preset", "tiny", *(part for override in OVERRIDES for part in ("--set", override))]


def read_events(run: Path | str, kind: str, **wanted: Any) -> list[dict[str, Any]]:
    events = RunFolder.open(str(run)).events.read_all()
    return [
        event
        for event in events
        if event["kind"] == kind and all(event.get(k) == v for k, v in wanted.items())
    ]


def parse(result: subprocess.CompletedProcess[str]) -> Any:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
