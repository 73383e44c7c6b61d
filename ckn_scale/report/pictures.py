"""Photographs and figures for a page: small JPEGs and PNGs inside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from ckn_scale.core.images import decode_image, encode_jpeg
from ckn_scale.core.specs import ImageSpec
from ckn_scale.errors import ImageRejected, InputError
from ckn_scale.evaluate.regions import ImageFile
from ckn_scale.report.html import Element, make, make_picture

SMALL = ImageSpec(max_pixels=36_000, min_side_px=1)
JPEG_QUALITY = 80


def show_photo(path: Path, box: tuple[float, float, float, float] | None = None) -> Element | None:
    """A thumbnail of the file as it is now, or of a box of it; None when it cannot be read."""
    try:
        return show_pixels(decode_image(ImageFile(path).read(), SMALL, box=box), path.name)
    except (InputError, ImageRejected, ValueError):
        return None


def show_pixels(pixels: np.ndarray, text: str) -> Element:
    """(H, W, 3) uint8 as a small JPEG."""
    height, width = pixels.shape[:2]
    factor = min(1.0, (SMALL.max_pixels / (height * width)) ** 0.5)
    size = (max(1, round(width * factor)), max(1, round(height * factor)))
    small = pixels if factor == 1 else cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    return make_picture(encode_jpeg(small, JPEG_QUALITY), text, kind="image/jpeg")


def show_drawing(picture: np.ndarray, text: str) -> Element:
    """(H, W, 3) uint8 as a PNG: lines stay sharp."""
    return make_picture(cv2.imencode(".png", picture[..., ::-1])[1].tobytes(), text)


def show_answer(
    query: Element | None,
    title: str,
    answer: Sequence[tuple[Element | None, str, bool]],
    *,
    words: tuple[str, str] = ("right", "wrong"),
) -> Element:
    """The query beside images with a caption each, right or wrong; None is a picture that is not there."""
    tiles = [make("figure", _or_blank(query), make("figcaption", title), class_="query")]
    for picture, caption, right in answer:
        verdict = make("span", words[0] if right else words[1], class_="note")
        below = make("figcaption", caption, ", ", verdict)
        tiles.append(make("figure", _or_blank(picture), below, class_="right" if right else "wrong"))
    return make("div", *tiles, class_="answers")


def _or_blank(picture: Element | None) -> Element:
    return make("div", "not at hand", class_="blank") if picture is None else picture
