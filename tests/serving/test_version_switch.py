"""Versions with different models are published and taken back while clients search and `gc` runs."""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from photo_runs import AFTER_TRAINING, background_photos
from running_server import local_server_of, query_view, wait_for

from ckn_scale.config import Resources, load_settings
from ckn_scale.pipeline import index_images
from ckn_scale.runs.collect_garbage import find_garbage
from ckn_scale.runs.versions import roll_back
from ckn_scale.search.engine import open_index
from ckn_scale.steps.plan_images import record_background
from ckn_scale.storage.run_folder import RunFolder

PHOTOS = ("coffee", "astronaut")


@pytest.fixture(scope="session")
def two_models_run(photo_run: Path, photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1 of the photo run, and the last of the same images with a reduction learned elsewhere."""
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


def answers_of(run: Path, version: int) -> dict[str, list[tuple[int, float]]]:
    index = open_index(run, version)
    return {
        photo: [(hit.image_id, hit.score) for hit in index.search(query_view(photo), k=5, verify=False)]
        for photo in PHOTOS
    }


def test_switches_and_rollbacks_under_load_mix_nothing_and_fail_nobody(two_models_run):
    run = RunFolder.open(str(two_models_run))
    new = max(run.versions.numbers())
    expected = {number: answers_of(two_models_run, number) for number in (1, new)}
    assert expected[1] != expected[new], "the two have different models"
    contents = {1: 1, new: new}
    seen: set[int] = set()
    ended = threading.Event()

    def ask(photo: str) -> int:
        answered = 0
        while not ended.is_set():
            answer = server.search(query_view(photo), k=5, verify=False, strict=True)
            assert answer.status_code == 200, answer.text
            body = answer.json()
            hits = [(hit["image_id"], hit["score"]) for hit in body["hits"]]
            assert hits == expected[contents[body["version"]]][photo], "of another version's models or index"
            seen.add(body["version"])
            answered += 1
        return answered

    def is_seen(number: int) -> bool:
        return number in seen or any(one.done() for one in clients)

    def collect() -> None:
        while not ended.is_set():
            for path in find_garbage(run, grace_s=5.0):  # as the command does
                run.store.delete(path)
            time.sleep(0.1)

    with (
        local_server_of(two_models_run, shard_groups=2, version_poll_s=0.2) as server,
        ThreadPoolExecutor(5) as pool,
    ):
        clients = [pool.submit(ask, photo) for photo in PHOTOS * 2]
        collecting = pool.submit(collect)
        try:
            for target in (1, new, 1):  # the first loads the other models, the others are back at once
                number = max(run.versions.numbers()) + 1
                contents[number] = target
                assert roll_back(run, target).number == number
                wait_for(partial(is_seen, number), f"an answer of version {number}")
        finally:
            ended.set()
        collecting.result(60)
        assert sum(one.result(60) for one in clients) > 4
    assert seen == {new, new + 1, new + 2, new + 3}
