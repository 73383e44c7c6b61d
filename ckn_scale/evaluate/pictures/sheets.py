"""Contact sheets: rows of small images with captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np

from ckn_scale.core.images import decode_jpeg
from ckn_scale.evaluate.pictures.canvas import (
    CAPTION_PX,
    FAINT,
    INK,
    PAPER,
    Colour,
    add_caption,
    draw_dot,
    draw_polygon,
    load_font,
    place_side_by_side,
    tile_images,
    write_text,
)

TILE_PX, HIT_PX = 160, 240
MATCH_COLOUR = (0, 158, 115)
MAX_LINES = 100
GAP_PX = 8
TEXT_PX = 13


@dataclass(frozen=True)
class Tile:
    """One image of a sheet: its JPEG, where there is one, and a line below it."""

    jpeg: bytes | None
    caption: str
    frame: Colour | None = None


def draw_sheet(rows: Sequence[tuple[str, Sequence[Tile]]], *, caption: str) -> np.ndarray:
    """A title and a row of tiles each, one below the other."""
    strips = [_draw_row(title, tiles) for title, tiles in rows]
    width = max([TILE_PX, *(strip.shape[1] for strip in strips)])
    sheet = [np.full((GAP_PX, width, 3), PAPER, np.uint8)]
    for strip in strips:
        padded = np.full((strip.shape[0] + GAP_PX, width, 3), PAPER, np.uint8)
        padded[: strip.shape[0], : strip.shape[1]] = strip
        sheet.append(padded)
    return add_caption(np.concatenate(sheet), caption)


def _draw_row(title: str, tiles: Sequence[Tile]) -> np.ndarray:
    row, _ = place_side_by_side([draw_tile(tile) for tile in tiles], gap_px=GAP_PX)
    return add_caption(row, title)


def draw_tile(tile: Tile) -> np.ndarray:
    """The image fitted into a square, with its line; without one an empty square."""
    canvas = np.full((TILE_PX + 2 * TEXT_PX, TILE_PX, 3), PAPER, np.uint8)
    cv2.rectangle(canvas, (0, 0), (TILE_PX - 1, TILE_PX - 1), FAINT)
    if tile.jpeg is None:
        canvas = write_text(canvas, "no thumbnail", (TILE_PX / 2, TILE_PX / 2), anchor="mm", size_px=TEXT_PX)
    else:
        image = fit_image(decode_jpeg(tile.jpeg), TILE_PX)
        height, width = image.shape[:2]
        top, left = (TILE_PX - height) // 2, (TILE_PX - width) // 2
        canvas[top : top + height, left : left + width] = image
    if tile.frame is not None:
        cv2.rectangle(canvas, (0, 0), (TILE_PX - 1, TILE_PX - 1), tile.frame, 3)
    text = shorten_text(tile.caption, TILE_PX)
    return write_text(canvas, text, (0, TILE_PX + TEXT_PX), size_px=TEXT_PX, anchor="lm", ink=INK)


def fit_image(image: np.ndarray, side_px: int) -> np.ndarray:
    """The whole image with `side_px` as its longer side."""
    factor = side_px / max(image.shape[:2])
    size = [max(1, round(side * factor)) for side in image.shape[1::-1]]
    how = cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR
    return cv2.resize(image, size, interpolation=how)


def shorten_text(text: str, width_px: int, size_px: int = TEXT_PX) -> str:
    """The text, or as much of its beginning and end as fits: names of files differ in both."""
    font, kept = load_font(size_px), len(text)
    short = text
    while kept > 4 and font.getlength(short) > width_px:
        kept -= 1
        short = f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"
    return short


@dataclass(frozen=True)
class MatchedTile:
    """A hit beside the query: where points match, from 0 to 1 across each image, and the box likewise."""

    image: np.ndarray
    query_points: np.ndarray  # (N, 2)
    hit_points: np.ndarray  # (N, 2)
    box: tuple[float, float, float, float] | None
    caption: str


def draw_hits(query: np.ndarray, hits: Sequence[MatchedTile], *, columns: int, caption: str) -> np.ndarray:
    """The query beside each hit, with a line for each pair of points that agree, and the hit's box."""
    cells = [_draw_hit(query, hit) for hit in hits]
    if not cells:
        return add_caption(fit_image(query, HIT_PX), caption)
    height, width = (max(cell.shape[axis] for cell in cells) for axis in (0, 1))
    padded = []
    for cell in cells:
        canvas = np.full((height, width, 3), PAPER, np.uint8)
        canvas[: cell.shape[0], : cell.shape[1]] = cell
        padded.append(canvas)
    return add_caption(tile_images(padded, min(columns, len(padded)), gap_px=2 * GAP_PX), caption)


def _draw_hit(query: np.ndarray, hit: MatchedTile) -> np.ndarray:
    left, right = fit_image(query, HIT_PX), fit_image(hit.image, HIT_PX)
    canvas, starts = place_side_by_side([left, right], gap_px=GAP_PX)
    sizes = [np.array(one.shape[1::-1]) for one in (left, right)]
    first = hit.query_points * sizes[0]
    second = hit.hit_points * sizes[1] + (starts[1], 0)
    lines = canvas.copy()
    for start, end in zip(first[:MAX_LINES], second[:MAX_LINES], strict=True):
        draw_polygon(lines, np.stack([start, end]), MATCH_COLOUR, closed=False)
    canvas = cv2.addWeighted(lines, 0.5, canvas, 0.5, 0)
    for point in np.concatenate([first[:MAX_LINES], second[:MAX_LINES]]):
        draw_dot(canvas, point, MATCH_COLOUR, radius_px=1.5)
    if hit.box is not None:
        x1, y1, x2, y2 = np.array(hit.box) * np.tile(sizes[1], 2) + (starts[1], 0, starts[1], 0)
        draw_polygon(canvas, np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]]), MATCH_COLOUR, thickness=2)
    return add_caption(canvas, shorten_text(hit.caption, canvas.shape[1] - 16, CAPTION_PX))
