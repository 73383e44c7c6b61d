"""From the bytes of an image file to RGB pixels at working size, or to the reason why not.

Files come from strangers: every failure of a decoder becomes `ImageRejected` with one of the
states corrupt, truncated, unsupported, too_large, empty. Everything here is safe in threads.

Conventions: animations give their first frame, transparency is composited over white, 16-bit
values keep their upper byte, CMYK and palettes become RGB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image

from ckn_scale.core.image_files import open_image_file, orientation_of, rejection_of
from ckn_scale.core.specs import ImageSpec
from ckn_scale.errors import ImageRejected

MAX_UPSCALE = 4.0
MAX_SIDE_PX = 32_000  # OpenCV's warps address pixels with 16-bit integers
THUMBNAIL_QUALITY = 85
BAND_PIXELS = 1 << 20  # converted at a time: what a conversion needs besides is small
BAND_BYTES_PER_PIXEL = 32  # of the one band that is being converted
# At the peak of decoding, measured: Pillow's copy and ours; some decoders hold more of their own.
BYTES_PER_PIXEL = {"1": 4, "L": 4, "P": 4, "I;16": 5, "RGB": 7}
DECODER_BYTES_PER_PIXEL = {"WEBP": 16, "AVIF": 10, "HEIF": 16}

# EXIF orientation → (transpose, flip rows, flip columns), applied in this order.
TURNS: dict[int, tuple[bool, bool, bool]] = {
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}


class DecodedImage(NamedTuple):
    """Pixels at working size, and how large the upright original is, or what the box cuts out of it."""

    pixels: np.ndarray  # (H, W, 3) uint8 RGB
    original_size_px: tuple[int, int]  # width, height


def decode_image(data: bytes, spec: ImageSpec, box: Sequence[float] | None = None) -> np.ndarray:
    """(H, W, 3) uint8 RGB at working size, as `decode_with_size` does."""
    return decode_with_size(data, spec, box).pixels


def decode_with_size(data: bytes, spec: ImageSpec, box: Sequence[float] | None = None) -> DecodedImage:
    """The image at working size; `ImageRejected` says why there is none.

    `box` (x1, y1, x2, y2) in pixels of the upright original is cut out before the resize.
    """
    try:
        return _decode(data, spec) if box is None else _decode_box(data, spec, box)
    except (ImageRejected, MemoryError):  # the latter says something of the machine, not of the image
        raise
    except Exception as error:
        raise rejection_of(data, error) from error


def decoding_bytes(data: bytes, spec: ImageSpec | None = None) -> int:
    """Memory that decoding takes at its peak, from the header alone; 0 for what will be rejected."""
    spec = spec or ImageSpec()
    try:
        with open_image_file(data) as file:
            width_px, height_px = file.size
            _check_header(width_px, height_px, spec)
            pixels: int = width_px * height_px
            if file.format == "JPEG":  # decoded at the next scale above the working size
                coefficients = 2 * len(file.getbands()) * pixels if file.info.get("progressive") else 0
                return coefficients + BYTES_PER_PIXEL["RGB"] * min(pixels, 4 * spec.max_pixels)
            per_pixel = DECODER_BYTES_PER_PIXEL.get(file.format or "", 0)
            per_pixel = max(per_pixel, BYTES_PER_PIXEL.get(file.mode, BYTES_PER_PIXEL["RGB"]))
            return per_pixel * pixels + BAND_BYTES_PER_PIXEL * min(pixels, BAND_PIXELS)
    except Exception:  # decoding will say what is wrong
        return 0


def _decode(data: bytes, spec: ImageSpec) -> DecodedImage:
    with open_image_file(data) as file:
        width_px, height_px = file.size
        _check_header(width_px, height_px, spec)
        working_size = fit_working_size(width_px, height_px, spec)
        # JPEG can be decoded at 1/2, 1/4, 1/8 of its size for much less work; others ignore this.
        file.draft(None, working_size)
        file.load()
        pixels = resize_image(_to_rgb(file), working_size)
        orientation = orientation_of(file) if spec.exif_orientation else 1
    lies_down = TURNS.get(orientation, (False,))[0]
    return DecodedImage(
        turn_upright(pixels, orientation), (height_px, width_px) if lies_down else (width_px, height_px)
    )


def _decode_box(data: bytes, spec: ImageSpec, box: Sequence[float]) -> DecodedImage:
    with open_image_file(data) as file:
        _check_header(file.size[0], file.size[1], spec)
        file.load()
        orientation = orientation_of(file) if spec.exif_orientation else 1
        pixels = crop_box(turn_upright(_to_rgb(file), orientation), box)
    height_px, width_px = pixels.shape[:2]
    working_size = fit_working_size(width_px, height_px, spec)
    return DecodedImage(resize_image(pixels, working_size), (width_px, height_px))


def crop_box(image: np.ndarray, box: Sequence[float]) -> np.ndarray:
    """The pixels inside (x1, y1, x2, y2), cut at the border; `ImageRejected` when none are."""
    height_px, width_px = image.shape[:2]
    left, top = max(0, math.floor(box[0])), max(0, math.floor(box[1]))
    right, bottom = min(width_px, math.ceil(box[2])), min(height_px, math.ceil(box[3]))
    if left >= right or top >= bottom:
        reason = f"the box {tuple(box)} holds no pixel of an image of {width_px} × {height_px}"
        raise ImageRejected("empty", reason)
    return np.ascontiguousarray(image[top:bottom, left:right])


def _check_header(width_px: int, height_px: int, spec: ImageSpec) -> None:
    if width_px < 1 or height_px < 1:
        raise ImageRejected("corrupt", f"the header says {width_px} × {height_px} pixels")
    if width_px * height_px > spec.pixel_cap:
        reason = f"{width_px} × {height_px} pixels are more than pixel_cap = {spec.pixel_cap}"
        raise ImageRejected("too_large", reason)


def fit_working_size(width_px: int, height_px: int, spec: ImageSpec) -> tuple[int, int]:
    """(width, height) of the working image: at most `max_pixels`, enlarged when below `min_side_px`."""
    limit = min(math.sqrt(spec.max_pixels / (width_px * height_px)), MAX_SIDE_PX / max(width_px, height_px))
    wanted = min(max(spec.min_side_px / min(width_px, height_px), 1.0), MAX_UPSCALE)
    factor = min(wanted, limit)
    if factor == 1.0:
        return width_px, height_px
    return max(1, int(width_px * factor)), max(1, int(height_px * factor))


def resize_image(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """`image` at `size` = (width, height): averaged when smaller, cubic when larger."""
    height_px, width_px = image.shape[:2]
    if (width_px, height_px) == size:
        return image
    shrinks = size[0] * size[1] < width_px * height_px
    return cv2.resize(image, size, interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_CUBIC)


def turn_upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """Undo the EXIF orientation 1 … 8; any other number changes nothing."""
    if orientation not in TURNS:
        return image
    transpose, flip_rows, flip_columns = TURNS[orientation]
    if transpose:
        image = image.swapaxes(0, 1)
    if flip_rows:
        image = image[::-1]
    if flip_columns:
        image = image[:, ::-1]
    return np.ascontiguousarray(image)


def to_luma(image: np.ndarray) -> np.ndarray:
    """(H, W) uint8 luma 0.299 R + 0.587 G + 0.114 B of an (H, W, 3) uint8 image; (H, W) stays as it is."""
    if image.ndim == 2:
        return image
    return cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)


def encode_thumbnail(image: np.ndarray, side_px: int) -> bytes:
    """A JPEG whose longer side is at most `side_px`."""
    height_px, width_px = image.shape[:2]
    factor = min(1.0, side_px / max(height_px, width_px))
    size = max(1, round(width_px * factor)), max(1, round(height_px * factor))
    return encode_jpeg(resize_image(image, size), THUMBNAIL_QUALITY)


def make_preview(data: bytes, spec: ImageSpec, side_px: int) -> tuple[bytes, tuple[int, int]]:
    """A JPEG of a file, upright, at most `side_px` on its longer side, and the size of the upright original.

    `ImageRejected` says why there is none.
    """
    decoded = decode_with_size(data, replace(spec, max_pixels=side_px * side_px, min_side_px=1))
    return encode_thumbnail(decoded.pixels, side_px), decoded.original_size_px


def encode_jpeg(image: np.ndarray, quality: int) -> bytes:
    """(H, W, 3) uint8 RGB as a JPEG of `quality` 0 … 100; ValueError for a shape that JPEG cannot hold."""
    done, data = cv2.imencode(".jpg", image[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    if not done:
        raise ValueError(f"an image of shape {image.shape} cannot be written as JPEG")
    return data.tobytes()


def decode_jpeg(data: bytes) -> np.ndarray:
    """(H, W, 3) uint8 RGB of a JPEG that this program wrote; `decode_image` is for files of strangers."""
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    if pixels is None:
        raise ValueError("not a JPEG")
    return np.ascontiguousarray(pixels[:, :, ::-1])


def _to_rgb(file: Image.Image) -> np.ndarray:
    """(H, W, 3) uint8, band by band: a conversion of the whole would hold several copies of it."""
    convert = _conversion_of(file)
    width_px, height_px = file.size
    rows = max(1, BAND_PIXELS // width_px)
    if rows >= height_px:
        return convert(file)
    pixels = np.empty((height_px, width_px, 3), np.uint8)
    for top in range(0, height_px, rows):
        bottom = min(top + rows, height_px)
        pixels[top:bottom] = convert(file.crop((0, top, width_px, bottom)))
    return pixels


def _conversion_of(file: Image.Image) -> Callable[[Image.Image], np.ndarray]:
    """How a band of this image becomes (h, W, 3) uint8; the same for all bands."""
    if file.mode.startswith(("I", "F")):
        white = _white_of(file)
        return lambda band: cv2.cvtColor(grey_to_bytes(np.asarray(band), white), cv2.COLOR_GRAY2RGB)
    if file.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in file.info:
        return lambda band: composite_over_white(np.asarray(band.convert("RGBA")))
    if file.mode in ("RGB", "YCbCr", "CMYK", "HSV", "L", "1", "P", "RGBX"):
        return lambda band: np.asarray(band if band.mode == "RGB" else band.convert("RGB"))
    raise ImageRejected("unsupported", f"its colour mode {file.mode} is not read here")


def _white_of(file: Image.Image) -> float:
    """The value that is shown as white, of the whole image."""
    width_px, height_px = file.size
    rows = max(1, BAND_PIXELS // width_px)
    bands = (
        np.asarray(file.crop((0, top, width_px, min(top + rows, height_px))))
        for top in range(0, height_px, rows)
    )
    return max(white_level(band) for band in bands)


def composite_over_white(rgba: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8 of an (H, W, 4) uint8 image: what a white page would show."""
    alpha = rgba[..., 3:].astype(np.uint16)
    if alpha.min(initial=255) == 255:
        return np.ascontiguousarray(rgba[..., :3])
    blended = rgba[..., :3] * alpha + 255 * (255 - alpha)
    return ((blended + 127) // 255).astype(np.uint8)


def grey_to_bytes(grey: np.ndarray, white: float | None = None) -> np.ndarray:
    """(H, W) uint8 of 16-bit, 32-bit or float grey values; not-a-number and negatives are black."""
    if grey.dtype == np.uint16:
        return (grey >> 8).astype(np.uint8)
    values = np.nan_to_num(grey.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    white = white_level(grey) if white is None else white
    return np.clip(values * (255.0 / white) + 0.5, 0, 255).astype(np.uint8)


def white_level(grey: np.ndarray) -> float:
    """What counts as white: nothing in such a file says it, so the smallest of 1 (floats only), 255 and
    65535 that holds the maximum, else the maximum."""
    if grey.dtype == np.uint16:
        return 65535.0
    maximum = float(np.nan_to_num(grey.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0).max(initial=0.0))
    choices = [1.0] if grey.dtype.kind == "f" else []
    return next((white for white in (*choices, 255.0, 65535.0) if maximum <= white), maximum)
