"""Images of a shard, prepared in order; one that kills or hangs its process costs one row."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from ckn_scale.core.encoder import Front, PreparedImage
from ckn_scale.core.specs import ImageSpec, KeypointSpec, PatchSpec
from ckn_scale.core.views import encode_jpeg
from ckn_scale.errors import ImageRejected
from ckn_scale.steps.base import WorkerSettings
from ckn_scale.steps.failpoints import HANG_VARIABLE, KILL_VARIABLE
from ckn_scale.steps.plan import PlannedImage
from ckn_scale.steps.prepare_images import prepare_images


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
def front():
    return Front(ImageSpec(), KeypointSpec(max_keypoints=20), PatchSpec())


def _states(outcomes):
    return [
        (image.image_id, outcome.state if isinstance(outcome, ImageRejected) else "ok")
        for image, outcome in outcomes
    ]


@pytest.mark.parametrize("isolate", [False, True])
def test_prepare_images_yields_every_image_once_in_order(images, front, isolate):
    worker = WorkerSettings(read_ahead=3, isolate=isolate)
    states = _states(prepare_images(images, front, worker, deadline_s=60))
    assert states == [(i, "empty" if i == 2 else "ok") for i in range(6)]


def test_prepare_images_gives_equal_patches_in_threads_and_in_a_subprocess(images, front):
    ahead = prepare_images(images, front, WorkerSettings(isolate=False), 60)
    apart = prepare_images(images, front, WorkerSettings(isolate=True), 60)
    for (_, one), (_, other) in zip(ahead, apart, strict=True):
        if isinstance(one, PreparedImage):
            assert np.array_equal(one.patches, other.patches)
            assert np.array_equal(one.keypoints.frames, other.keypoints.frames)


def test_prepare_images_tells_missing_and_changed_files(images, front, tmp_path):
    (tmp_path / "0.jpg").unlink()
    (tmp_path / "1.jpg").write_bytes(b"longer or shorter than planned")
    states = _states(prepare_images(images, front, WorkerSettings(), 60))
    assert states[:2] == [(0, "missing"), (1, "changed")]


def test_prepare_images_isolated_survives_an_image_that_kills_its_process(images, front, monkeypatch):
    monkeypatch.setenv(KILL_VARIABLE, "3.jpg")
    states = _states(prepare_images(images, front, WorkerSettings(isolate=True), 60))
    assert states == [(i, {2: "empty", 3: "crashed"}.get(i, "ok")) for i in range(6)]


def test_prepare_images_gives_a_hanging_image_its_row_and_goes_on(images, front, monkeypatch):
    monkeypatch.setenv(HANG_VARIABLE, "4.jpg")
    states = _states(prepare_images(images, front, WorkerSettings(isolate=False), deadline_s=8))
    assert states == [(i, {2: "empty", 4: "timeout"}.get(i, "ok")) for i in range(6)]


def test_prepare_images_of_nothing_is_nothing(front):
    assert list(prepare_images([], front, WorkerSettings(), 60)) == []
