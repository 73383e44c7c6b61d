"""A small real run, and real servers over it, each started once: most tests need only `local_server`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_visits import axe, browser, collection, page_server, photographs, visit
from photo_runs import AFTER_TRAINING, background_photos
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
from ckn_scale.steps.plan_images import record_background
from ckn_scale.storage.run_folder import RunFolder

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
def two_models_run(photo_run: Path, photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1 of the photo run, and version 2 of the same images with a reduction learned elsewhere."""
    run = tmp_path_factory.mktemp("two-models") / "run"
    shutil.copytree(photo_run, run, ignore=shutil.ignore_patterns("events", "nonces"))
    for folder in (run / "commits").iterdir():
        if folder.name.startswith(("sample_vlads", "train_reduction", *AFTER_TRAINING)):
            shutil.rmtree(folder)
    for record in (run / "models").glob("[0-9]*.json"):
        record.unlink()
    settings = load_settings("tiny", None, ["plan.images_per_shard=4"])
    background = background_photos(tmp_path_factory.mktemp("background"))
    record_background(RunFolder.open(str(run)), settings, str(background))
    index_images(str(photo_folder), str(run), settings, Resources(workers=0), accept=True)
    return run


@pytest.fixture(scope="session")
def server_run(two_models_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy for `server`, in which tests may publish: version 2 is made, but not published."""
    run = shutil.copytree(two_models_run, tmp_path_factory.mktemp("server") / "run")
    (run / RunFolder.open(str(run)).versions.path(2)).unlink()
    return run


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
