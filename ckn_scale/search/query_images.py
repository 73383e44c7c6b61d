"""What an image may be given as from Python: all of it becomes the bytes of an image file.

One way in, so that an array is cropped, resized and refused exactly like a file of the same pixels.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TypeAlias

import numpy as np
from PIL import Image

from ckn_scale.errors import ImageRejected
from ckn_scale.storage.image_sources import read_image

ImageLike: TypeAlias = (
    "str | os.PathLike[str] | bytes | bytearray | memoryview | np.ndarray | Image.Image | IO[bytes]"
)
Box: TypeAlias = Sequence[float]  # x1, y1, x2, y2 in pixels of the upright image

ORIENTATION_TAG = 0x0112
WITH_ALPHA = ("LA", "La", "PA", "RGBa")
AS_THEY_ARE = ("1", "L", "I", "I;16", "F", "RGB", "RGBA")


def image_bytes(image: ImageLike, *, compress: bool = False) -> bytes:
    """The bytes of an image file; of pixels a TIFF, which is smaller with `compress`, and lossless.

    `image`: a path or URI, the bytes of a file, a binary file object, a PIL image, or an array (H, W, 3) RGB
    or (H, W) grey, uint8. Raises ImageRejected when a file is missing or a PIL image cannot be loaded,
    TypeError and ValueError when it is none of these.
    """
    if isinstance(image, str | os.PathLike):
        return read_image(os.fspath(image))
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, np.ndarray):
        return _array_bytes(image, compress)
    if isinstance(image, Image.Image):
        return _pil_bytes(image, compress)
    if hasattr(image, "read"):
        return _file_bytes(image)
    raise TypeError(
        "an image is a path, URI, bytes, file object, PIL image or uint8 array, "
        f"or a list of these; got {type(image).__name__}"
    )


def check_box(box: Box) -> None:
    """ValueError unless it is four numbers that hold an area."""
    if len(box) != 4 or not all(map(math.isfinite, box)) or not (box[0] < box[2] and box[1] < box[3]):
        raise ValueError(f"a box is x1, y1, x2, y2 with x1 < x2 and y1 < y2, got {tuple(box)}")


def name_image(image: ImageLike) -> str:
    """What to call it in an error."""
    if isinstance(image, str | os.PathLike):
        return os.fspath(image)
    return str(getattr(image, "name", None) or getattr(image, "filename", None) or type(image).__name__)


@contextmanager
def naming_image(images: Sequence[ImageLike], place: int) -> Iterator[None]:
    """An error about one image of a list says which it is."""
    where = f"image {place + 1} of {len(images)}"
    try:
        yield
    except ImageRejected as error:
        if len(images) == 1:
            raise
        reason = f"{where}, {name_image(images[place])}: {error.reason}"
        raise ImageRejected(error.state, reason) from error
    except (TypeError, ValueError) as error:
        if len(images) == 1:
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{where}: {error}") from error


def _file_bytes(file: IO[bytes]) -> bytes:
    data = file.read()
    if not isinstance(data, bytes):
        raise TypeError(f"{name_image(file)} gives text: open it in binary mode, open(path, 'rb')")
    return data


def _array_bytes(pixels: np.ndarray, compress: bool) -> bytes:
    if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or pixels.shape[2:] == (3,)):
        raise ValueError(
            "an array of pixels must be (H, W, 3) RGB or (H, W) grey, uint8 from 0 to 255; "
            f"got {pixels.shape} {pixels.dtype}"
        )
    if pixels.size == 0:
        raise ImageRejected("empty", f"the array {pixels.shape} holds no pixel")
    return _tiff(Image.fromarray(np.ascontiguousarray(pixels)), compress=compress)


def _pil_bytes(image: Image.Image, compress: bool) -> bytes:
    try:
        image.load()
        orientation = image.getexif().get(ORIENTATION_TAG, 1)
        if image.mode in WITH_ALPHA or "transparency" in image.info:
            image = image.convert("RGBA")
        elif image.mode not in AS_THEY_ARE:
            image = image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise ImageRejected("corrupt", f"{name_image(image)}: PIL says {error}") from error
    return _tiff(image, orientation, compress=compress)


def _tiff(image: Image.Image, orientation: int = 1, *, compress: bool) -> bytes:
    """Nothing is lost; uncompressed it takes no longer than a copy."""
    sink = io.BytesIO()
    options = {"compression": "tiff_adobe_deflate"} if compress else {}
    image.save(sink, "TIFF", tiffinfo={ORIENTATION_TAG: orientation}, **options)
    return sink.getvalue()
