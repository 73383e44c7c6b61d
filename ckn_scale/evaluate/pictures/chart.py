"""A small line chart: drawn at three times its size, then shrunk, so that lines are smooth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from PIL import Image, ImageDraw

from ckn_scale.evaluate.pictures.canvas import FAINT, INK, PALETTE, PAPER, Colour, load_font

OVERSIZE = 3
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 40, 48  # margins, px
TEXT_PX, TITLE_PX = 13, 16


@dataclass(frozen=True)
class Axis:
    label: str
    low: float
    high: float
    ticks: Sequence[float]

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def draw_chart(
    title: str,
    x: Axis,
    y: Axis,
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    size_px: tuple[int, int] = (420, 320),
    legend: bool = True,
) -> np.ndarray:
    """(H, W, 3) uint8: one line per curve, each a pair of arrays x and y."""
    panel = _Panel(x, y, size_px)
    panel.draw_axes(title)
    for position, (xs, ys) in enumerate(curves.values()):
        panel.draw_curve(xs, ys, PALETTE[position % len(PALETTE)])
    if legend:
        panel.draw_legend(list(curves))
    return panel.finish()


class _Panel:
    def __init__(self, x: Axis, y: Axis, size_px: tuple[int, int]) -> None:
        self.x, self.y, self.size_px = x, y, size_px
        self.picture = Image.new("RGB", (size_px[0] * OVERSIZE, size_px[1] * OVERSIZE), PAPER)
        self.pen = ImageDraw.Draw(self.picture)

    def place(self, x: float, y: float) -> tuple[float, float]:
        width, height = self.size_px[0] - LEFT - RIGHT, self.size_px[1] - TOP - BOTTOM
        left = LEFT + width * self.x.share(x)
        top = TOP + height * (1 - self.y.share(y))
        return left * OVERSIZE, top * OVERSIZE

    def line(self, points: Sequence[tuple[float, float]], colour: Colour, width_px: float) -> None:
        self.pen.line(list(points), fill=colour, width=round(width_px * OVERSIZE), joint="curve")

    def text(self, text: str, at: tuple[float, float], anchor: str, size_px: int = TEXT_PX) -> None:
        font = load_font(size_px * OVERSIZE)
        self.pen.text(at, text, fill=INK, font=font, anchor=anchor)

    def draw_axes(self, title: str) -> None:
        x, y = self.x, self.y
        for tick in y.ticks:
            self.line([self.place(x.low, tick), self.place(x.high, tick)], FAINT, 1)
            left, top = self.place(x.low, tick)
            self.text(f"{tick:g}", (left - 6 * OVERSIZE, top), "rm")
        for tick in x.ticks:
            self.line([self.place(tick, y.low), self.place(tick, y.high)], FAINT, 1)
            left, top = self.place(tick, y.low)
            self.text(f"{tick:g}", (left, top + 6 * OVERSIZE), "mt")
        self.line([self.place(x.low, y.high), self.place(x.low, y.low), self.place(x.high, y.low)], INK, 1.2)
        middle = (LEFT + (self.size_px[0] - LEFT - RIGHT) / 2) * OVERSIZE
        self.text(x.label, (middle, (self.size_px[1] - 8) * OVERSIZE), "mb")
        self.text(title, (middle, 14 * OVERSIZE), "mm", TITLE_PX)
        self.text(y.label, (6 * OVERSIZE, (TOP - 10) * OVERSIZE), "lb")

    def draw_curve(self, xs: np.ndarray, ys: np.ndarray, colour: Colour) -> None:
        points = [self.place(*point) for point in zip(xs.tolist(), ys.tolist(), strict=True)]
        self.line(points, colour, 2)
        radius = 3 * OVERSIZE
        for left, top in points:
            self.pen.ellipse((left - radius, top - radius, left + radius, top + radius), fill=colour)

    def draw_legend(self, names: Sequence[str]) -> None:
        left, bottom = self.place(self.x.high, self.y.low)
        top = bottom - (len(names) * (TEXT_PX + 6) + 6) * OVERSIZE
        for position, name in enumerate(names):
            middle = top + (position + 0.5) * (TEXT_PX + 6) * OVERSIZE
            self.text(name, (left - 38 * OVERSIZE, middle), "rm")
            ends = [(left - 32 * OVERSIZE, middle), (left - 8 * OVERSIZE, middle)]
            self.line(ends, PALETTE[position % len(PALETTE)], 3)

    def finish(self) -> np.ndarray:
        return cv2.resize(np.array(self.picture), self.size_px, interpolation=cv2.INTER_AREA)
