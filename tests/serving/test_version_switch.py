"""Versions with different models are published and taken back while clients search and `gc` runs."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from running_server import AnsweringServer, local_server_of, query_view, wait_for

from ckn_scale.runs.collect_garbage import find_garbage
from ckn_scale.runs.versions import roll_back
from ckn_scale.search.engine import open_index
from ckn_scale.storage.run_folder import RunFolder

PHOTOS = ("coffee", "astronaut")


def answers_of(run: Path, version: int) -> dict[str, list[tuple[int, float]]]:
    index = open_index(run, version)
    return {
        photo: [(hit.image_id, hit.score) for hit in index.search(query_view(photo), k=5, verify=False)]
        for photo in PHOTOS
    }


class Switching:
    """Clients that search while versions change, each answer compared with that of its version's models."""

    def __init__(self, server: AnsweringServer, path: Path, models: Path) -> None:
        self.server, self.run = server, RunFolder.open(str(path))
        self.expected = {number: answers_of(models, number) for number in (1, 2)}
        assert self.expected[1] != self.expected[2], "the two have different models"
        self.contents = {number: number for number in self.run.versions.numbers()}
        self.seen: set[int] = set()
        self.switched_s: list[float] = []
        self.ended = threading.Event()

    def ask(self, photo: str) -> int:
        answered = 0
        while not self.ended.is_set():
            answer = self.server.search(query_view(photo), k=5, verify=False, strict=True)
            assert answer.status_code == 200, answer.text
            body = answer.json()
            hits = [(hit["image_id"], hit["score"]) for hit in body["hits"]]
            expected = self.expected[self.contents[body["version"]]][photo]
            assert [one for one, _ in hits] == [one for one, _ in expected], "of another version's models"
            assert [score for _, score in hits] == pytest.approx([score for _, score in expected], abs=1e-3)
            self.seen.add(body["version"])
            answered += 1
        return answered

    def collect_garbage(self) -> None:
        while not self.ended.is_set():
            for path in find_garbage(self.run, grace_s=5.0):  # as the command does
                self.run.store.delete(path)
            assert len(self.server.client.get("/v1/versions").json()["resident"]) <= 2
            time.sleep(0.1)

    @contextlib.contextmanager
    def under_load(self) -> Iterator[None]:
        with ThreadPoolExecutor(4) as pool:
            self.workers = [pool.submit(self.ask, photo) for photo in (*PHOTOS, PHOTOS[0])]
            self.workers.append(pool.submit(self.collect_garbage))
            try:
                yield
            finally:
                self.ended.set()
            *clients, collecting = self.workers
            collecting.result(60)
            assert sum(one.result(60) for one in clients) > 4

    def switch(self, content: int, publish: Callable[[], int]) -> None:
        number = max(self.run.versions.numbers()) + 1
        self.contents[number] = content
        began_s = time.monotonic()
        assert publish() == number
        wait_for(partial(self.is_answered, number), f"an answer of version {number}")
        self.switched_s.append(time.monotonic() - began_s)

    def is_answered(self, number: int) -> bool:
        return number in self.seen or any(one.done() for one in self.workers)

    def roll_back(self, content: int) -> None:
        self.switch(content, lambda: roll_back(self.run, content).number)


def test_switches_and_rollbacks_under_load_mix_nothing_and_fail_nobody(two_models_run, tmp_path):
    path = shutil.copytree(two_models_run, tmp_path / "run")
    with local_server_of(path, shard_groups=2, version_poll_s=0.2) as server:
        switching = Switching(server, path, two_models_run)
        with switching.under_load():
            for target in (1, 2, 1):  # the first loads the other models, the others are back at once
                switching.roll_back(target)
    assert switching.seen == {2, 3, 4, 5}


def test_the_same_on_ray(server, server_run, two_models_run):
    switching = Switching(server, server_run, two_models_run)
    new = RunFolder.open(str(two_models_run)).versions.read(2)
    with switching.under_load():
        switching.switch(2, lambda: switching.run.versions.append(new))
        for target in (1, 2, 1):
            switching.roll_back(target)
    assert switching.seen == {1, 2, 3, 4, 5}
