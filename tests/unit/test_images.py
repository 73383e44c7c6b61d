"""Decoding: every file ends as pixels or as a state with a reason, never as a crash."""

from __future__ import annotations

import io
import sys
from concurrent.futures import ThreadPoolExecutor

import image_corpus
import numpy as np
import pillow_heif
import pytest
from image_corpus import encode, exif_block, make_photo, png_header
from PIL import Image, ImageOps

from ckn_scale.core import image_files
from ckn_scale.core.image_files import PNG_SIGNATURE, read_exif_orientation
from ckn_scale.core.images import (
    composite_over_white,
    decode_image,
    decode_with_size,
    decoding_bytes,
    encode_thumbnail,
    fit_working_size,
    grey_to_bytes,
    resize_image,
    to_luma,
    turn_upright,
)
from ckn_scale.core.specs import ImageSpec
from ckn_scale.errors import ImageRejected

SPEC = ImageSpec()
AS_IS = ImageSpec(min_side_px=1)
TRUNCATED = dict(image_corpus.truncated_files())
CORRUPT = dict(image_corpus.corrupt_files())
UNSUPPORTED = dict(image_corpus.unsupported_files())
ODD = {name: (data, size) for name, data, size in image_corpus.odd_files()}


def rejection(data: bytes, spec: ImageSpec = SPEC) -> ImageRejected:
    with pytest.raises(ImageRejected) as caught:
        decode_image(data, spec)
    assert caught.value.reason
    return caught.value


def outcome(data: bytes) -> str:
    try:
        decode_image(data, SPEC)
    except ImageRejected as refused:
        return refused.state
    return "decoded"


def test_corpus_is_large() -> None:
    assert len(TRUNCATED) + len(CORRUPT) + len(UNSUPPORTED) + len(ODD) > 100


# Pillow tells of broken TIFF directories by warnings.
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("name", TRUNCATED)
def test_truncated_files(name: str) -> None:
    assert rejection(TRUNCATED[name]).state == "truncated"


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("name", CORRUPT)
def test_corrupt_files(name: str) -> None:
    assert rejection(CORRUPT[name]).state == "corrupt"


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_files(name: str) -> None:
    assert rejection(UNSUPPORTED[name]).state == "unsupported"


def test_no_bytes_are_empty() -> None:
    assert rejection(b"").state == "empty"


@pytest.mark.parametrize("name", ODD)
def test_odd_files_decode(name: str) -> None:
    data, size = ODD[name]
    image = decode_image(data, SPEC)
    assert image.shape == (*size, 3)
    assert image.dtype == np.uint8
    assert image.flags.c_contiguous


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF", "BMP"])
def test_pixels_survive_each_format(file_format: str) -> None:
    photo = make_photo(140, 160)
    options = {"quality": 95} if file_format in ("JPEG", "WEBP") else {}
    decoded = decode_image(encode(photo, file_format, **options), SPEC)
    error = np.abs(decoded.astype(int) - photo)
    assert error.mean() < (8 if options else 0.01)


@pytest.mark.parametrize(
    "name",
    ["16-bit PNG", "16-bit TIFF", "float TIFF", "32-bit TIFF", "animated GIF", "animated PNG", "CMYK TIFF"],
)
def test_odd_files_show_the_first_picture(name: str) -> None:
    photo = make_photo(150, 200)
    expected = photo.mean(axis=2) if name.startswith(("animated", "CMYK")) else photo[..., 1].astype(float)
    decoded = decode_image(ODD[name][0], SPEC).mean(axis=2)
    assert np.abs(decoded - expected).mean() < 6


@pytest.mark.parametrize("size", [(100_000, 100_000), (2**31 - 1, 2**31 - 1), (20_000, 5_001)])
def test_bombs_are_refused_from_the_header(size: tuple[int, int]) -> None:
    refused = rejection(png_header(*size))
    assert refused.state == "too_large"
    assert str(SPEC.pixel_cap) in refused.reason


def test_pixel_cap_is_a_setting() -> None:
    png = encode(make_photo(100, 100), "PNG")
    assert rejection(png, ImageSpec(pixel_cap=9_999)).state == "too_large"
    assert decode_image(png, ImageSpec(pixel_cap=10_000, min_side_px=1)).shape == (100, 100, 3)


def test_running_out_of_memory_says_nothing_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr("ckn_scale.core.images.open_image_file", fail)
    with pytest.raises(MemoryError):
        decode_image(encode(make_photo(), "PNG"), SPEC)


def scan_bomb(scans: int, side_px: int = 64, tail: bytes = b"") -> bytes:
    """A progressive JPEG whose last scan is sent again and again; Pillow's own has 10."""
    jpeg = encode(make_photo(side_px, side_px), "JPEG", progressive=True)
    last = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    return jpeg[:-2] + last * (scans - 10) + b"\xff\xd9" + tail


def test_a_jpeg_of_many_scans_is_too_large() -> None:
    assert image_files.count_jpeg_scans(scan_bomb(65)) == 65
    assert decode_image(scan_bomb(64), AS_IS).shape == (64, 64, 3)
    refused = rejection(scan_bomb(5000))
    assert (refused.state, refused.reason) == ("too_large", "its 5000 scans are more than 64")


def test_scans_between_other_segments_and_fill_bytes_are_counted() -> None:
    comment = b"\xff\xfe\x00\x06\xff\xd9ab"  # says that the image ends, and is only a comment
    bomb = scan_bomb(100).replace(b"\xff\xda", comment + b"\xff\xff\xff\xda")
    assert image_files.count_jpeg_scans(bomb) == 100
    assert rejection(bomb).state == "too_large"


def test_scans_of_thumbnails_and_of_what_follows_the_image_do_not_count() -> None:
    inside = b"\xff\xda" * 200
    jpeg = scan_bomb(12, tail=inside)
    with_thumbnail = jpeg[:2] + b"\xff\xe1" + (len(inside) + 2).to_bytes(2, "big") + inside + jpeg[2:]
    assert image_files.count_jpeg_scans(with_thumbnail) == 12
    assert decode_image(with_thumbnail, AS_IS).shape == (64, 64, 3)


@pytest.mark.parametrize("name", [name for name in ODD if not name.startswith("animated")])
def test_bands_give_the_pixels_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, _ = ODD[name]
    whole = decode_image(data, SPEC)
    monkeypatch.setattr("ckn_scale.core.images.BAND_PIXELS", 1000)
    np.testing.assert_array_equal(decode_image(data, SPEC), whole)


def test_decoding_bytes_of_what_is_rejected_is_nothing() -> None:
    assert decoding_bytes(b"") == decoding_bytes(b"rubbish") == decoding_bytes(png_header(10**6, 10**6)) == 0
    assert decoding_bytes(encode(make_photo(100, 100), "PNG")) == 390_000


def test_heic_without_the_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    refused = rejection(b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic")
    assert refused.state == "unsupported"
    assert "ckn-scale[heif]" in refused.reason


def encode_heic(image: np.ndarray, **options: object) -> bytes:
    stream = io.BytesIO()
    pillow_heif.from_pillow(Image.fromarray(image)).save(stream, quality=95, **options)
    return stream.getvalue()


def test_heic_with_the_extra_is_decoded() -> None:
    photo = make_photo()
    decoded = decode_image(encode_heic(photo), AS_IS)
    assert decoded.shape == photo.shape
    assert np.abs(decoded.astype(int) - photo).mean() < 6


def test_heic_stands_upright_once() -> None:
    turned = encode_heic(make_photo(), exif=exif_block(6))
    assert decode_image(turned, AS_IS).shape == (128, 96, 3)


@pytest.mark.parametrize("cut", [10, 400, 5000])
def test_cut_heic_is_truncated(cut: int) -> None:
    assert rejection(encode_heic(make_photo())[:-cut]).state == "truncated"


def test_avif_without_libavif_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files.features, "check", lambda _: False)
    assert "AVIF" in rejection(ODD["AVIF"][0]).reason
    assert rejection(ODD["AVIF"][0]).state == "unsupported"


def test_avif_behind_a_general_brand_is_avif() -> None:
    data, size = ODD["AVIF"]
    assert data[8:12] == b"avif"
    general = data[:8] + b"mif1" + data[12:]
    assert decode_image(general, SPEC).shape[:2] == size


def test_reasons_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: bytes) -> None:
        raise ValueError("two\n  lines\n")

    monkeypatch.setattr("ckn_scale.core.images.open_image_file", fail)
    assert rejection(encode(make_photo(), "PNG")).reason == "PNG: two lines"


@pytest.mark.parametrize("cut", [40, 200, 400])
def test_cut_avif_is_truncated(cut: int) -> None:
    assert rejection(ODD["AVIF"][0][:-cut]).state == "truncated"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_undone_as_pillow_does(orientation: int) -> None:
    jpeg = encode(make_photo(60, 90), "JPEG", exif=exif_block(orientation))
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(jpeg))))
    np.testing.assert_array_equal(decode_image(jpeg, AS_IS), expected)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
def test_decode_with_size_says_how_large_the_upright_original_is(file_format) -> None:
    options = {"exif": exif_block(6)} if file_format == "JPEG" else {}
    data = encode(make_photo(600, 900), file_format, **options)
    decoded = decode_with_size(data, ImageSpec(max_pixels=60_000))
    width_px, height_px = decoded.original_size_px
    assert sorted((width_px, height_px)) == [600, 900]
    shape = decoded.pixels.shape
    assert shape[1] / shape[0] == pytest.approx(width_px / height_px, rel=0.02), "both are upright"
    boxed = decode_with_size(data, ImageSpec(max_pixels=60_000), (10, 20, 410, 520))
    assert boxed.original_size_px == (400, 500)


def test_orientation_can_be_left_alone() -> None:
    jpeg = encode(make_photo(60, 90), "JPEG", exif=exif_block(6))
    assert decode_image(jpeg, ImageSpec(exif_orientation=False, min_side_px=1)).shape == (60, 90, 3)


def test_orientation_of_a_tiff_is_undone() -> None:
    tiff = encode(make_photo(60, 90), "TIFF", tiffinfo={0x0112: 6})
    assert decode_image(tiff, AS_IS).shape == (90, 60, 3)


@pytest.mark.parametrize(
    "exif",
    [
        b"",
        b"Exif\0\0",
        b"II",
        b"rubbish" * 9,
        exif_block(9),
        exif_block(0),
        exif_block(6)[:-8],
        b"II*\0\xff\xff\xff\xff",
        b"MM\0*\0\0\0\x08\xff\xff",
    ],
)
def test_read_exif_orientation_of_broken_blocks_is_upright(exif: bytes) -> None:
    assert read_exif_orientation(exif) == 1


def test_read_exif_orientation_in_both_byte_orders() -> None:
    assert read_exif_orientation(exif_block(6, "<")) == 6
    assert read_exif_orientation(exif_block(5, ">")) == 5
    assert read_exif_orientation(exif_block(3).removeprefix(b"Exif\0\0")) == 3


def test_turn_upright_ignores_unknown_numbers() -> None:
    photo = make_photo(4, 6)
    assert turn_upright(photo, 42) is photo


@pytest.mark.parametrize(
    ("size", "spec", "expected"),
    [
        ((640, 480), SPEC, (640, 480)),
        ((4000, 3000), SPEC, (1024, 768)),
        ((100, 50), SPEC, (256, 128)),
        ((10, 20), SPEC, (40, 80)),  # at most four times
        ((127, 3000), SPEC, (128, 3023)),
        ((40_000, 100), SPEC, (17_736, 44)),
        ((5, 30_000), SPEC, (5, 32_000)),
        ((1, 1), AS_IS, (1, 1)),
    ],
)
def test_fit_working_size_by_hand(size: tuple[int, int], spec: ImageSpec, expected: tuple[int, int]) -> None:
    assert fit_working_size(*size, spec) == expected


@pytest.mark.parametrize("size", [(4001, 2999), (1, 90_000_000), (777, 12_345), (1025, 769)])
def test_fit_working_size_never_exceeds_max_pixels(size: tuple[int, int]) -> None:
    width, height = fit_working_size(*size, SPEC)
    assert 1 <= width * height <= SPEC.max_pixels


@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
def test_large_images_shrink_without_aliasing(file_format: str) -> None:
    stripes = np.zeros((1600, 2400, 3), np.uint8)
    stripes[::2] = 200
    decoded = decode_image(encode(stripes, file_format), ImageSpec(max_pixels=60_000))
    assert decoded.shape == (200, 300, 3)
    assert np.abs(decoded.astype(int) - 100).max() <= 4


def test_box_is_cut_from_the_upright_original() -> None:
    photo = make_photo(60, 90)
    png = encode(np.rot90(photo).copy(), "PNG", exif=exif_block(6))  # the camera was turned; 6 turns it back
    np.testing.assert_array_equal(decode_image(png, AS_IS, (10.2, 5, 40, 29.5)), photo[5:30, 10:40])


def test_box_outside_the_image_is_empty() -> None:
    png = encode(make_photo(60, 90), "PNG")
    with pytest.raises(ImageRejected, match="holds no pixel"):
        decode_image(png, AS_IS, (90, 0, 100, 60))
    assert decode_image(png, AS_IS, (-50, -50, 500, 500)).shape == (60, 90, 3)


def test_resize_image_of_the_same_size_is_the_same() -> None:
    photo = make_photo(10, 20)
    assert resize_image(photo, (20, 10)) is photo


def test_composite_over_white_by_hand() -> None:
    rgba = np.array([[[100, 0, 50, 255], [100, 0, 50, 0], [100, 0, 50, 51]]], np.uint8)
    assert composite_over_white(rgba).tolist() == [[[100, 0, 50], [255, 255, 255], [224, 204, 214]]]


def test_transparent_png_shows_white() -> None:
    rgba = np.dstack([make_photo(130, 130), np.zeros((130, 130), np.uint8)])
    assert (decode_image(encode(rgba, "PNG"), SPEC) == 255).all()


@pytest.mark.parametrize(
    ("grey", "expected"),
    [
        (np.array([[0, 256, 65535]], np.uint16), [0, 1, 255]),
        (np.array([[0.0, 0.5, 1.0]], np.float32), [0, 128, 255]),
        (np.array([[0, 100, 255]], np.float32), [0, 100, 255]),
        (np.array([[0, 257, 65535]], np.int32), [0, 1, 255]),
        (np.array([[-5, 0, 1_000_000]], np.int32), [0, 0, 255]),
        (np.array([[np.nan, -np.inf, 1.0]], np.float32), [0, 0, 255]),
    ],
)
def test_grey_to_bytes_by_hand(grey: np.ndarray, expected: list[int]) -> None:
    assert grey_to_bytes(grey)[0].tolist() == expected


def test_to_luma_by_hand_and_of_grey() -> None:
    colours = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255], [9, 9, 9]]], np.uint8)
    assert to_luma(colours).tolist() == [[76, 150, 29, 9]]
    assert to_luma(colours[..., 0]).tolist() == [[255, 0, 0, 9]]


def test_encode_thumbnail_fits_and_keeps_colour() -> None:
    photo = make_photo(300, 400)
    jpeg = encode_thumbnail(photo, 100)
    small = np.asarray(Image.open(io.BytesIO(jpeg)))
    assert small.shape == (75, 100, 3)
    np.testing.assert_allclose(small.mean(axis=(0, 1)), photo.mean(axis=(0, 1)), atol=3)
    assert encode_thumbnail(photo, 100) == jpeg


def test_encode_thumbnail_never_enlarges() -> None:
    assert Image.open(io.BytesIO(encode_thumbnail(make_photo(20, 30), 200))).size == (30, 20)
    assert Image.open(io.BytesIO(encode_thumbnail(make_photo(1, 900), 100))).size == (100, 1)


def test_decode_image_in_threads_gives_the_same() -> None:
    names = [*ODD][:12]
    alone = [decode_image(ODD[name][0], SPEC) for name in names]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda k: decode_image(ODD[names[k % 12]][0], SPEC), range(48)))
    for k, image in enumerate(together):
        np.testing.assert_array_equal(image, alone[k % 12])


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_random_damage_never_crashes() -> None:
    rng = np.random.default_rng(0)
    files = [encode(make_photo(40, 50), f) for f in ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF")]
    for k in range(240):
        data = bytearray(files[k % len(files)])
        for position in rng.integers(0, len(data), 1 + k % 7):
            data[position] = rng.integers(0, 256)
        assert outcome(bytes(data)) in ("decoded", "corrupt", "truncated", "unsupported", "too_large")


def test_reasons_hold_no_bytes_of_the_file() -> None:
    """A reason is shown to others, and a list may name any file."""
    chunk = b"\0\0\0\x04" + b"SECR" + b"ETET" + b"\0\0\0\0"
    for data in (
        b"root:SECRET:0:0",
        PNG_SIGNATURE + chunk,
        b"\xff\xd8SECRET",
        b"GIF89aSECRET",
        b"II*\0SECRET",
    ):
        reason = rejection(data).reason
        assert "SECR" not in reason
        assert b"SECR".hex(" ") not in reason
