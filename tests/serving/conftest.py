"""A small real run, and real servers over it, each started once: most tests need only `local_server`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_visits import axe, browser, collection, page_server, photographs, visit
from running_server import (
    KEY,
    AnsweringServer,
    RunningServer,
    local_server_of,
    start_server,
    stop_server,
)

from ckn_scale.config import Resources, load_settings
from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import DISTRACTORS, PHOTOS, read_photo
from ckn_scale.pipeline import index_images

__all__ = ["axe", "browser", "collection", "page_server", "photographs", "visit"]


@pytest.fixture(scope="session")
def photo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight photographs and as many distractors."""
    folder = tmp_path_factory.mktemp("photos")
    for name in (*PHOTOS[:8], *DISTRACTORS[:8]):
        (folder / f"{name}.jpg").write_bytes(encode_jpeg(read_photo(name), 92))
    return folder


@pytest.fixture(scope="session")
def photo_run(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """They are indexed and published with the tiny preset."""
    run = tmp_path_factory.mktemp("served") / "run"
    settings = load_settings("tiny", None, ["plan.images_per_shard=4"])
    index_images(str(photo_folder), str(run), settings, Resources(workers=0), accept=True)
    return run


@pytest.fixture(scope="session")
def local_server(photo_run: Path) -> Iterator[AnsweringServer]:
    """The whole server without Ray, in this process; two shard groups, keys on, few places and bodies."""
    with local_server_of(photo_run, shard_groups=2, max_in_flight=4, max_bodies=8) as running:
        yield running


@pytest.fixture(scope="session")
def server_run(photo_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy for `server`, in which tests may publish."""
    return shutil.copytree(photo_run, tmp_path_factory.mktemp("server") / "run")


@pytest.fixture(scope="session")
def server(server_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Two shard groups, keys on, few places and bodies, versions looked for often."""
    running = start_server(
        tmp_path_factory.mktemp("home"),
        run_url=str(server_run),
        shard_groups=2,
        api_keys=[KEY],
        max_in_flight=4,
        max_bodies=8,
        version_poll_s=0.5,
        shard_timeout_s=1.0,
    )
    yield running
    assert stop_server(running) == 0
