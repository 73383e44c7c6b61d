from __future__ import annotations

import io
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from synthetic_index import DIM, publish_synthetic, random_units

from ckn_scale.errors import ImageRejected, InputError
from ckn_scale.search.engine import Index
from ckn_scale.search.shard import ShardGroup
from ckn_scale.search.versions import latest_version_number, open_version
from ckn_scale.storage.run_folder import RunFolder


class PixelEncoder:
    """Stands in for the real one: the image's first pixels are its vector."""

    def encode_bytes(self, data, box=None):
        try:
            pixels = np.asarray(Image.open(io.BytesIO(data)).convert("L"), dtype=np.float32)
        except OSError:
            raise ImageRejected("corrupt", "no image") from None
        if box is not None:
            x1, y1, x2, y2 = map(int, box)
            pixels = pixels[y1:y2, x1:x2]
        return SimpleNamespace(vector=pixels.ravel()[:DIM] / np.linalg.norm(pixels.ravel()[:DIM]))


def draw(image_id: int) -> np.ndarray:
    return np.random.default_rng(image_id).integers(1, 255, (8, 8), dtype=np.uint8)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    pixels = np.stack([draw(image_id).ravel()[:DIM] for image_id in range(30)]).astype(np.float32)
    vectors = pixels / np.linalg.norm(pixels, axis=1, keepdims=True)
    made = publish_synthetic(tmp_path_factory.mktemp("engine") / "run", vectors, 3)
    return Index(made.version, PixelEncoder(), ShardGroup(made.run.store, made.manifest))


def png(pixels: np.ndarray) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "PNG")
    return sink.getvalue()


def test_search_takes_bytes_a_path_a_uri_or_pixels(index, tmp_path):
    path = tmp_path / "query.png"
    path.write_bytes(png(draw(7)))
    colour = np.repeat(draw(7)[..., None], 3, axis=2)
    for image in (png(draw(7)), path, str(path), path.as_uri(), draw(7), colour):
        hits = index.search(image, k=2)
        assert hits[0].image_id == 7
        assert hits[0].score == pytest.approx(1.0, abs=1e-4)
        assert len(hits) == 2


def test_search_passes_the_box_on(index):
    framed = np.full((12, 12), 9, dtype=np.uint8)
    framed[2:10, 3:11] = draw(5)
    assert index.search(framed, k=1, box=(3, 2, 11, 10))[0].image_id == 5


def test_an_index_knows_its_size_version_and_thumbnails(index):
    assert (len(index), index.version) == (30, 1)
    assert index.thumbnail(8) == b"jpeg-8"
    np.testing.assert_allclose(np.linalg.norm(index.vector(29)), 1, rtol=1e-5)
    assert index.vector(30) is None


def test_search_refuses_what_is_no_image(index, tmp_path):
    with pytest.raises(ImageRejected, match="corrupt"):
        index.search(b"no image")
    with pytest.raises(ImageRejected, match="missing"):
        index.search(tmp_path / "absent.jpg")
    with pytest.raises(ValueError, match=r"got \(4, 4\) float32"):
        index.search(np.zeros((4, 4), np.float32))
    with pytest.raises(ValueError, match="k must be ≥ 1, got 0"):
        index.search(draw(1), k=0)


def test_the_highest_version_is_current_and_older_ones_open_by_number(tmp_path):
    first = publish_synthetic(tmp_path / "run", random_units(4), 1)
    second = publish_synthetic(tmp_path / "run", random_units(6), 2)
    run = RunFolder.open(str(tmp_path / "run"))
    assert latest_version_number(run) == second.version == 2
    assert open_version(run).manifest == second.manifest
    assert open_version(run, 1).manifest == first.manifest
    with pytest.raises(InputError, match="has no version 7; published are: 1, 2"):
        open_version(run, 7)


def test_a_run_without_a_version_says_what_to_do(tmp_path):
    run = RunFolder.create(str(tmp_path / "run"), {})
    with pytest.raises(InputError, match="no published index yet: run `ckn-scale index`"):
        open_version(run)
