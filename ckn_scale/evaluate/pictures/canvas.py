"""Drawing on arrays (H, W, 3) uint8 RGB: text, tiles, ellipses, lines. OpenCV and Pillow only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

INK, PAPER, FAINT = (32, 33, 36), (255, 255, 255), (218, 220, 224)
# Most colour-blind readers can distinguish them; in order of use.
PALETTE = (
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
    (86, 180, 233),
    (90, 90, 90),
)
SUBPIXEL_BITS = 4  # OpenCV draws at sixteenths of a pixel
CAPTION_PX = 16

Colour = tuple[int, int, int]


@cache
def load_font(size_px: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size_px)


def write_text(
    image: np.ndarray,
    text: str,
    at: tuple[float, float],
    *,
    size_px: int = 14,
    anchor: str = "lt",
    ink: Colour = INK,
) -> np.ndarray:
    """A copy with the text; `anchor` as Pillow has it (lt: at the left and top of the text)."""
    picture = Image.fromarray(image)
    ImageDraw.Draw(picture).text(at, text, fill=ink, font=load_font(size_px), anchor=anchor)
    return np.array(picture)


def add_caption(image: np.ndarray, text: str) -> np.ndarray:
    """The image below a strip with one line of text, cut to fit nothing: the strip grows with the text."""
    font = load_font(CAPTION_PX)
    left, _, right, _ = font.getbbox(text)
    width = max(image.shape[1], int(right - left) + 16)
    canvas = np.full((image.shape[0] + 2 * CAPTION_PX, width, 3), PAPER, np.uint8)
    canvas[2 * CAPTION_PX :, : image.shape[1]] = image
    return write_text(canvas, text, (8, CAPTION_PX), size_px=CAPTION_PX, anchor="lm")


def enlarge_image(image: np.ndarray, factor: int, *, smooth: bool = False) -> np.ndarray:
    """Whole pixels, unless `smooth`."""
    how = cv2.INTER_CUBIC if smooth else cv2.INTER_NEAREST
    return cv2.resize(image, None, fx=factor, fy=factor, interpolation=how)


def tile_images(images: Sequence[np.ndarray], columns: int, *, gap_px: int = 3) -> np.ndarray:
    """Images of one size, row by row, on white."""
    height, width = images[0].shape[:2]
    rows = math.ceil(len(images) / columns)
    shape = (rows * (height + gap_px) + gap_px, columns * (width + gap_px) + gap_px, 3)
    canvas = np.full(shape, PAPER, np.uint8)
    for position, image in enumerate(images):
        row, column = divmod(position, columns)
        top, left = gap_px + row * (height + gap_px), gap_px + column * (width + gap_px)
        canvas[top : top + height, left : left + width] = image
    return canvas


def place_side_by_side(images: Sequence[np.ndarray], *, gap_px: int = 8) -> tuple[np.ndarray, list[int]]:
    """On one canvas, tops aligned; and the x at which each begins."""
    height = max(image.shape[0] for image in images)
    starts = np.cumsum([0, *(image.shape[1] + gap_px for image in images)]).tolist()
    canvas = np.full((height, starts[-1] - gap_px, 3), PAPER, np.uint8)
    for image, left in zip(images, starts, strict=False):
        canvas[: image.shape[0], left : left + image.shape[1]] = image
    return canvas, starts[:-1]


def colour_by_value(values: np.ndarray) -> list[Colour]:
    """Small values blue, large ones red, by rank: a few large values do not eat the range."""
    ranks = np.argsort(np.argsort(values)) / max(1, len(values) - 1)
    levels = np.round(30 + 215 * ranks).astype(np.uint8)[:, None]
    table = cv2.applyColorMap(levels, cv2.COLORMAP_TURBO)[:, 0, ::-1]
    return [(int(r), int(g), int(b)) for r, g, b in table]


def draw_polygon(
    image: np.ndarray, corners: np.ndarray, colour: Colour, *, thickness: int = 1, closed: bool = True
) -> None:
    """In place; `corners` (N, 2) in pixels, fractions count."""
    fixed = np.round(corners * 2**SUBPIXEL_BITS).astype(np.int32)
    cv2.polylines(image, [fixed[:, None]], closed, colour, thickness, cv2.LINE_AA, SUBPIXEL_BITS)


def draw_dot(image: np.ndarray, at: np.ndarray, colour: Colour, *, radius_px: float = 2.5) -> None:
    """In place, with a thin dark rim."""
    centre = tuple(np.round(at * 2**SUBPIXEL_BITS).astype(int).tolist())
    for radius, ink in ((radius_px + 1, INK), (radius_px, colour)):
        size = round(radius * 2**SUBPIXEL_BITS)
        cv2.circle(image, centre, size, ink, cv2.FILLED, cv2.LINE_AA, SUBPIXEL_BITS)


def label_point(image: np.ndarray, text: str, at: np.ndarray, colour: Colour) -> np.ndarray:
    """A copy with the text on a small plate about the point."""
    half = np.array([5 + 4 * len(text), 9])
    left, top = np.clip(np.round(at) - half, 0, np.array(image.shape[1::-1]) - 2 * half).astype(int).tolist()
    canvas = image.copy()
    cv2.rectangle(canvas, (left, top), (left + 2 * half[0], top + 2 * half[1]), colour, cv2.FILLED)
    ink = INK if np.dot(colour, (0.3, 0.59, 0.11)) > 120 else PAPER
    middle = (left + float(half[0]), top + float(half[1]))
    return write_text(canvas, text, middle, size_px=13, anchor="mm", ink=ink)


def outline_regions(frames: np.ndarray, scale: float, *, num_corners: int = 48) -> np.ndarray:
    """(N, num_corners, 2): the ellipses of `scale` detection scales."""
    angles = np.arange(num_corners) * 2 * np.pi / num_corners
    circle = scale * np.stack([np.cos(angles), np.sin(angles)])  # (2, C)
    outlines: np.ndarray = (frames[:, :, :2] @ circle + frames[:, :, 2:]).transpose(0, 2, 1)
    return outlines


def outline_squares(frames: np.ndarray, half_side: float) -> np.ndarray:
    """(N, 4, 2): the squares that become patches."""
    corners = half_side * np.array([[-1.0, 1, 1, -1], [-1, -1, 1, 1]])
    outlines: np.ndarray = (frames[:, :, :2] @ corners + frames[:, :, 2:]).transpose(0, 2, 1)
    return outlines
