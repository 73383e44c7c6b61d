from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from synthetic_index import DIM, publish_synthetic, random_units

from ckn_scale.core.images import decode_image
from ckn_scale.core.specs import ImageSpec
from ckn_scale.errors import ImageRejected, InputError
from ckn_scale.search.engine import Index
from ckn_scale.search.query_images import image_bytes
from ckn_scale.search.shard import Hit, ShardGroup
from ckn_scale.search.versions import latest_version_number, open_version
from ckn_scale.storage.run_folder import RunFolder

NO_POINTS = {
    "frames": np.empty((0, 9), np.uint8),
    "words": np.empty(0, np.uint16),
    "codes": np.empty((0, 16), np.uint8),
}


class PixelEncoder:
    """Stands in for the real one: the image's first pixels are its vector."""

    def __init__(self):
        self.preprocessor = self
        self.points = None
        self.groups = []

    def prepare(self, data, box=None):
        try:
            pixels = np.asarray(Image.open(io.BytesIO(data)).convert("L"), dtype=np.float32)
        except OSError:
            raise ImageRejected("corrupt", "no image") from None
        if box is not None:
            x1, y1, x2, y2 = map(int, box)
            pixels = pixels[y1:y2, x1:x2]
        return pixels.ravel()[:DIM]

    def encode_prepared(self, prepared):
        self.groups.append(len(prepared))
        return [
            SimpleNamespace(vector=pixels / np.linalg.norm(pixels), width_px=8, height_px=8, **NO_POINTS)
            for pixels in prepared
        ]


def draw(image_id: int) -> np.ndarray:
    return np.random.default_rng(image_id).integers(1, 255, (8, 8), dtype=np.uint8)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    pixels = np.stack([draw(image_id).ravel()[:DIM] for image_id in range(30)]).astype(np.float32)
    vectors = pixels / np.linalg.norm(pixels, axis=1, keepdims=True)
    made = publish_synthetic(tmp_path_factory.mktemp("engine") / "run", vectors, 3)
    shards = ShardGroup(made.run.store, made.manifest)
    return Index(made.version, PixelEncoder(), shards, run_url=made.run.url)


def png(pixels: np.ndarray) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "PNG")
    return sink.getvalue()


@pytest.fixture
def forms(tmp_path):
    """One image in every form that a user may have it in."""
    path = tmp_path / "query.png"
    path.write_bytes(png(draw(7)))
    colour = np.repeat(draw(7)[..., None], 3, axis=2)
    return {
        "path": path,
        "str": str(path),
        "uri": path.as_uri(),
        "bytes": png(draw(7)),
        "bytearray": bytearray(png(draw(7))),
        "memoryview": memoryview(png(draw(7))),
        "file": io.BytesIO(png(draw(7))),
        "grey": draw(7),
        "rgb": colour,
        "strided": colour[::-1][::-1],
        "pil": Image.open(io.BytesIO(png(draw(7)))),
        "pil rgba": Image.fromarray(draw(7)).convert("RGBA"),
        "pil palette": Image.fromarray(draw(7)).convert("P"),
        "pil cmyk": Image.fromarray(colour).convert("CMYK"),
    }


def test_search_takes_an_image_in_any_form(index, forms):
    for form, image in forms.items():
        hits = index.search(image, k=2)
        assert [hits[0].image_id, len(hits)] == [7, 2], form
        assert hits[0].score == pytest.approx(1.0, abs=1e-4), form
        if form != "file":  # which is read by now
            np.testing.assert_allclose(index.encode(image), index.vector(7), atol=0.02, err_msg=form)


def test_an_opened_file_is_read(index, forms):
    with forms["path"].open("rb") as file:
        assert index.search(file, k=1)[0].image_id == 7
    with forms["path"].open("rt", encoding="latin-1") as file, pytest.raises(TypeError, match="binary mode"):
        index.search(file)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I", "F", "CMYK"])
def test_a_pil_image_is_read_like_its_file(tmp_path, mode):
    sixteen = Image.fromarray(draw(3).astype(np.uint16) * 256)
    wide = {"I;16": sixteen, "I": sixteen.convert("I"), "F": Image.fromarray(draw(3) / np.float32(255))}
    image = wide.get(mode) or Image.fromarray(np.dstack([draw(seed) for seed in range(4)])).convert(mode)
    path = tmp_path / ("image.tif" if mode in ("I", "F", "CMYK") else "image.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    image.save(path, exif=exif)
    file = path.read_bytes()
    given = image_bytes(Image.open(io.BytesIO(file)))
    np.testing.assert_array_equal(decode_image(given, ImageSpec()), decode_image(file, ImageSpec()))


def test_a_list_of_images_gives_a_list_of_answers(index, forms):
    images = [draw(number % 30) for number in range(40)]
    index._encoder.groups.clear()
    answers = index.search(images, k=3)
    assert index._encoder.groups == [16, 16, 8], "a long list does not lie in memory at once"
    assert answers == [index.search(image, k=3) for image in images]
    assert [hits[0].image_id for hits in index.search((forms["path"], draw(9)), k=1)] == [7, 9]
    assert index.encode(images[:3]).shape == (3, DIM)
    assert index.encode(images[:1]).shape == (1, DIM)
    assert index.encode(images[0]).shape == (DIM,)


def test_vectors_are_searched_alone_and_together(index):
    vectors = index.encode([draw(4), draw(5)])
    assert index.search_vectors(vectors, k=2) == [index.search(draw(4), k=2), index.search(draw(5), k=2)]
    assert index.search_vector(vectors[1].tolist(), k=2) == index.search(draw(5), k=2)
    for wrong in (vectors[:, :5], vectors[0]):
        with pytest.raises(ValueError, match=f"has {DIM} numbers, got an array"):
            index.search_vectors(wrong)


def test_any_number_of_hits_may_be_asked_for(index):
    assert len(index.search(draw(1), k=10**9)) == 30


def test_search_passes_the_box_on(index):
    framed = np.full((12, 12), 9, dtype=np.uint8)
    framed[2:10, 3:11] = draw(5)
    assert index.search(framed, k=1, box=(3, 2, 11, 10))[0].image_id == 5


def test_an_index_knows_its_size_version_and_thumbnails(index):
    assert (len(index), index.version) == (30, 1)
    assert index.thumbnail(8) == b"jpeg-8"
    np.testing.assert_allclose(np.linalg.norm(index.vector(29)), 1, rtol=1e-5)
    assert index.vector(30) is None


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        (b"no image", ImageRejected, "corrupt"),
        (b"", ImageRejected, "corrupt"),
        ("absent.jpg", ImageRejected, "missing: absent.jpg does not exist"),
        (Path("absent.jpg"), ImageRejected, "missing: absent.jpg does not exist"),
        (np.zeros((4, 4), np.float32), ValueError, r"uint8 from 0 to 255; got \(4, 4\) float32"),
        (np.zeros((2, 4, 4, 3), np.uint8), ValueError, r"got \(2, 4, 4, 3\) uint8"),
        (np.zeros((0, 4), np.uint8), ImageRejected, r"empty: the array \(0, 4\) holds no pixel"),
        (7, TypeError, "a path, URI, bytes, file object, .* got int"),
        (None, TypeError, "got NoneType"),
        ({"a.jpg"}, TypeError, "got set"),
        ([], ValueError, "the list of images is empty"),
        ([draw(1), 7], TypeError, "image 2 of 2: an image is a path"),
        (
            [draw(1), "absent.jpg"],
            ImageRejected,
            "missing: image 2 of 2, absent.jpg: absent",
        ),
        ([b"", draw(1)], ImageRejected, "corrupt: image 1 of 2, bytes: no image"),
    ],
)
def test_search_and_encode_refuse_what_is_no_image(index, image, error, message):
    for method in (index.search, index.encode):
        with pytest.raises(error, match=message):
            method(image)


def test_a_pil_image_of_a_broken_file_is_refused(index):
    broken = Image.open(io.BytesIO(png(np.tile(draw(1), (40, 40)))[:300]))
    with pytest.raises(ImageRejected, match=r"corrupt: .*PIL says"):
        index.search(broken)


@pytest.mark.parametrize("box", [(1, 2, 3), (5, 1, 5, 9), (0, 4, 9, 2), (0, 0, float("nan"), 5)])
def test_a_box_without_area_is_refused(index, box):
    with pytest.raises(ValueError, match="a box is x1, y1, x2, y2 with x1 < x2 and y1 < y2, got"):
        index.search(draw(1), box=box)


def test_search_refuses_bad_counts_and_a_box_for_a_list(index):
    with pytest.raises(ValueError, match="k must be ≥ 1, got 0"):
        index.search(draw(1), k=0)
    with pytest.raises(TypeError, match="float"):
        index.search(draw(1), k=2.5)
    with pytest.raises(ValueError, match="a box goes with one image, got a list of 2"):
        index.search([draw(1), draw(2)], box=(0, 0, 4, 4))


def test_repr_tells_what_one_wants_to_know(index):
    assert repr(index) == f"<Index {index.run_url!r} version 1: 30 images, {DIM} dimensions>"
    hit = index.search(draw(7), k=1)[0]
    assert repr(hit) == ("Hit(score=1.0000, uri='photos/0007.jpg', image_id=7, columns={'label': 'label 7'})")
    assert repr(Hit(1, "a.jpg", 0.5)) == "Hit(score=0.5000, uri='a.jpg', image_id=1)"


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
