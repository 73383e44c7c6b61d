"""Images of a shard, prepared in order; one that kills or hangs its process costs one row."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from web_hosts import WebHost, dead_url

from ckn_scale.core.images import encode_jpeg
from ckn_scale.core.preprocessor import PreparedImage, Preprocessor
from ckn_scale.core.specs import ImageSpec, KeypointSpec, PatchSpec
from ckn_scale.errors import ImageRejected, TransientStoreError
from ckn_scale.failpoints import HANG_VARIABLE, KILL_VARIABLE
from ckn_scale.prepare_images import _work_ahead, prepare_images
from ckn_scale.step import WorkerSettings
from ckn_scale.storage.plans import PlannedImage
from ckn_scale.storage.store import Store


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(0)
    planned = []
    for image_id in range(6):
        noise = cv2.GaussianBlur(rng.integers(0, 255, (96, 128, 3), np.uint8), (0, 0), 2)
        data = encode_jpeg(cv2.normalize(noise, None, 0, 255, cv2.NORM_MINMAX), 90)
        if image_id == 2:
            data = b""
        path = tmp_path / f"{image_id}.jpg"
        path.write_bytes(data)
        planned.append(PlannedImage(image_id, str(path), len(data), ""))
    return planned


@pytest.fixture
def preprocessor():
    return Preprocessor(ImageSpec(), KeypointSpec(max_keypoints=20), PatchSpec())


def _outcomes(outcomes):
    return [(image.image_id, outcome) for image, outcome in outcomes]


def _states(outcomes):
    return [
        (image.image_id, outcome.state if isinstance(outcome, ImageRejected) else "ok")
        for image, outcome in outcomes
    ]


@pytest.mark.parametrize("isolate", [False, True])
def test_prepare_images_yields_every_image_once_in_order(images, preprocessor, isolate):
    worker = WorkerSettings(read_ahead=3, isolate=isolate)
    states = _states(prepare_images(images, preprocessor.prepare, worker, deadline_s=60))
    assert states == [(i, "empty" if i == 2 else "ok") for i in range(6)]


def test_prepare_images_gives_equal_patches_in_threads_and_in_a_subprocess(images, preprocessor):
    ahead = prepare_images(images, preprocessor.prepare, WorkerSettings(isolate=False), 60)
    apart = prepare_images(images, preprocessor.prepare, WorkerSettings(isolate=True), 60)
    for (_, one), (_, other) in zip(ahead, apart, strict=True):
        if isinstance(one, PreparedImage):
            assert np.array_equal(one.patches, other.patches)
            assert np.array_equal(one.keypoints.frames, other.keypoints.frames)


def test_prepare_images_tells_missing_and_changed_files(images, preprocessor, tmp_path):
    (tmp_path / "0.jpg").unlink()
    (tmp_path / "1.jpg").write_bytes(b"longer or shorter than planned")
    states = _states(prepare_images(images, preprocessor.prepare, WorkerSettings(), 60))
    assert states[:2] == [(0, "missing"), (1, "changed")]


@pytest.mark.parametrize("isolate", [False, True])
def test_prepare_images_never_opens_what_is_no_regular_file(images, preprocessor, tmp_path, isolate):
    """Planned as files, and swapped since: a FIFO would wait for a writer, a device never end."""
    for name in ("0", "1", "3"):
        (tmp_path / f"{name}.jpg").unlink()
    os.mkfifo(tmp_path / "0.jpg")
    (tmp_path / "1.jpg").symlink_to("/dev/zero")
    (tmp_path / "3.jpg").symlink_to(tmp_path / "0.jpg")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket.jpg"))
        planned = [*images, PlannedImage(6, str(tmp_path / "socket.jpg"), 0, "")]
        outcomes = dict(
            _outcomes(prepare_images(planned, preprocessor.prepare, WorkerSettings(isolate=isolate), 60))
        )
    assert [outcomes[i].state for i in (0, 1, 3, 6)] == ["unsupported"] * 4
    assert "a FIFO, not a regular file" in outcomes[0].reason
    assert isinstance(outcomes[4], PreparedImage)


def test_prepare_images_fails_the_shard_when_the_store_hangs(images, preprocessor, s3, s3_faults, tmp_path):
    """And never an image: the same shard is well once the store answers again."""
    store = Store(s3.url("hanging"))
    for image in images:
        store.write_new(f"{image.image_id}.jpg", Path(image.uri).read_bytes())
    stored = [replace(image, uri=f"{store.url}/{image.image_id}.jpg") for image in images]
    s3_faults.kinds, s3_faults.rate = ("hang",), 1.0
    for isolate in (False, True):
        worker = WorkerSettings(isolate=isolate, read_deadline_s=0.5)
        with pytest.raises(TransientStoreError, match=r"was not read within 0.5 s"):
            list(prepare_images(stored, preprocessor.prepare, worker, 60))
    s3_faults.rate = 0.0
    states = _states(prepare_images(stored, preprocessor.prepare, WorkerSettings(), 60))
    assert states == [(i, "empty" if i == 2 else "ok") for i in range(6)]


@pytest.mark.parametrize("path", ["together/8", "apart/9"])
def test_prepare_images_fetches_eight_at_once_from_one_host_and_no_more(path):
    with WebHost() as host:
        planned = [PlannedImage(one, f"{host.url}/{path}/{one}.jpg", -1, "") for one in range(16)]
        outcomes = [outcome for _, outcome in prepare_images(planned, len, WorkerSettings(), 60)]
    assert outcomes == [len(b"image")] * 16


def test_prepare_images_asks_a_dead_host_for_one_image_only():
    url = dead_url()
    planned = [PlannedImage(one, f"{url}?{one}", -1, "") for one in range(24)]
    worker = WorkerSettings(read_ahead=1)
    reasons = [outcome.reason for _, outcome in prepare_images(planned, len, worker, 60)]
    # Two are under way at once: whichever is first to have tried gives the host up for the other, too.
    assert any("tried 3 times" in reason for reason in reasons[:2])
    assert "given up before" in reasons[-1]


def test_prepare_images_isolated_survives_an_image_that_kills_its_process(images, preprocessor, monkeypatch):
    monkeypatch.setenv(KILL_VARIABLE, "3.jpg")
    states = _states(prepare_images(images, preprocessor.prepare, WorkerSettings(isolate=True), 60))
    assert states == [(i, {2: "empty", 3: "crashed"}.get(i, "ok")) for i in range(6)]


def test_prepare_images_gives_a_hanging_image_its_row_and_goes_on(images, preprocessor, monkeypatch):
    monkeypatch.setenv(HANG_VARIABLE, "4.jpg")
    states = _states(
        prepare_images(images, preprocessor.prepare, WorkerSettings(isolate=False), deadline_s=4)
    )
    assert states == [(i, {2: "empty", 4: "timeout"}.get(i, "ok")) for i in range(6)]


@pytest.mark.parametrize(("budget_bytes", "most"), [(10, 1), (25, 2), (1000, 4)])
def test_work_ahead_stays_within_its_budget_in_order(budget_bytes, most):
    begun, done = [], []

    def work(item):
        begun.append(item)
        return item

    ahead = _work_ahead(range(12), work, cost=lambda _: 10, width=4, budget_bytes=budget_bytes)
    for item, future in ahead:
        assert future.result(timeout=60) == item
        done.append(item)
        assert len(begun) - len(done) < most
    assert done == list(range(12)) == sorted(begun)


def test_work_ahead_does_alone_what_costs_more_than_the_budget():
    ahead = _work_ahead([5, 500, 5], lambda cost: cost, cost=lambda cost: cost, width=4, budget_bytes=10)
    assert [future.result(timeout=60) for _, future in ahead] == [5, 500, 5]


def test_prepare_images_of_nothing_is_nothing(preprocessor):
    assert list(prepare_images([], preprocessor.prepare, WorkerSettings(), 60)) == []
