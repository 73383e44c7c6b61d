"""Line and bar charts as SVG: sharp on paper, their text is text, and no library has to be installed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckn_scale.report.html import Element, make

# Most colour-blind readers can distinguish them; beyond them, and on grey paper, dashes and marks do.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5a5a5a")
DASHES = ("none", "6 3", "2 2")
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 12, 40
PLOT_WIDTH, PLOT_HEIGHT, LEGEND_WIDTH = 440, 220, 170
BESIDE_PX = 9  # how far apart points of one kind are
CHARACTER_PX, SLANT_DEG = 6.5, 45  # of a tick's label
BAR_PX, NAME_PX, VALUE_PX = 18, 190, 150


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, ticks at round numbers."""

    low: float
    high: float
    step: float

    @property
    def ticks(self) -> list[float]:
        count = round((self.high - self.low) / self.step)
        return [self.low + k * self.step for k in range(count + 1)]

    def place(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        return (value - self.low) / (self.high - self.low)


def choose_axis(values: Sequence[float], *, ticks: int = 5) -> Axis:
    """Round numbers around all values."""
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / ticks))
    step = next(one for one in (power, 2 * power, 5 * power, 10 * power) if span / one <= ticks)
    first = math.floor(low / step) * step
    last = max(math.ceil(high / step) * step, first + step)
    return Axis(first, last, step)


def draw_lines(
    x: Sequence[float | str],
    curves: Mapping[str, Sequence[float | None]],
    *,
    x_label: str,
    y_label: str,
    among: Sequence[float] = (),
) -> Element:
    """A curve each, a value (or none) for each of `x`, which are evenly spaced whatever they are.

    Where they are kinds, between which there is nothing, no line joins them. The axis has room for the
    values `among` which these are, so that charts can be compared.
    """
    values = [value for curve in curves.values() for value in curve if value is not None] + list(among)
    axis, with_legend = choose_axis(values), len(curves) > 1
    width = LEFT + PLOT_WIDTH + RIGHT + (LEGEND_WIDTH if with_legend else 0)
    columns = [LEFT + PLOT_WIDTH * (k + 0.5) / len(x) for k in range(len(x))]
    names = [one if isinstance(one, str) else f"{one:g}" for one in x]
    ticks, ticks_height = _draw_ticks(columns, names, x_label)
    height, joined = TOP + max(PLOT_HEIGHT + ticks_height, 18 * len(curves)), names != list(x)
    parts = [*_draw_grid(axis, y_label), *ticks]
    for number, (name, curve) in enumerate(curves.items()):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
        aside = 0 if joined else BESIDE_PX * (number - (len(curves) - 1) / 2)
        points = [
            (at + aside, TOP + PLOT_HEIGHT * (1 - axis.place(one)))
            for at, one in zip(columns, curve, strict=True)
            if one is not None
        ]
        path = " ".join(f"{left:.1f},{top:.1f}" for left, top in points)
        line = {"stroke": colour, "stroke_width": 2, "stroke_dasharray": dash}
        if joined:
            parts.append(make("polyline", points=path, fill="none", **line))
        parts += [make("circle", cx=f"{left:.1f}", cy=f"{top:.1f}", r=3, fill=colour) for left, top in points]
        if with_legend:
            parts += _draw_legend(number, name, line if joined else {"stroke": colour, "stroke_width": 6})
    return _make_svg(parts, width, height, f"{y_label} by {x_label}: {', '.join(curves)}")


def _draw_legend(number: int, name: str, line: Mapping[str, object]) -> list[Element]:
    row, start = TOP + 10 + 18 * number, LEFT + PLOT_WIDTH + RIGHT
    return [
        make("line", x1=start, x2=start + 22, y1=row, y2=row, **line),
        make("text", name, x=start + 28, y=row + 4),
    ]


def _draw_grid(axis: Axis, label: str) -> list[Element]:
    parts = []
    for tick in axis.ticks:
        top = TOP + PLOT_HEIGHT * (1 - axis.place(tick))
        parts.append(make("line", x1=LEFT, x2=LEFT + PLOT_WIDTH, y1=f"{top:.1f}", y2=f"{top:.1f}", **GRID))
        parts.append(make("text", f"{tick:.10g}", x=LEFT - 6, y=f"{top + 4:.1f}", text_anchor="end"))
    middle = TOP + PLOT_HEIGHT / 2
    parts.append(
        make("text", label, transform=f"rotate(-90 12 {middle:g})", x=12, y=middle, text_anchor="middle")
    )
    return parts


GRID = {"stroke": "#dadce0", "stroke_width": 1}


def _draw_ticks(columns: Sequence[float], labels: Sequence[str], label: str) -> tuple[list[Element], float]:
    """Slanted where they have no room side by side; with the height that they and the axis' label take."""
    below, longest = TOP + PLOT_HEIGHT, CHARACTER_PX * max(map(len, labels))
    slanted = longest > PLOT_WIDTH / len(columns)
    depth = 16 + (longest * math.sin(math.radians(SLANT_DEG)) if slanted else 0.0)
    parts = []
    for at, text in zip(columns, labels, strict=True):
        place = {"x": f"{at:.1f}", "y": below + 16, "text_anchor": "end" if slanted else "middle"}
        turn = {"transform": f"rotate(-{SLANT_DEG} {at:.1f} {below + 12})"} if slanted else {}
        parts.append(make("text", text, **place, **turn))
    end = below + depth + 18
    parts.append(make("text", label, x=LEFT + PLOT_WIDTH / 2, y=f"{end:.0f}", text_anchor="middle"))
    return parts, depth + BOTTOM - 16


@dataclass(frozen=True)
class Bar:
    """A value with what is written beside it; `other` is a second one to compare it with."""

    name: str
    value: float
    label: str
    other: float | None = None


def draw_bars(bars: Sequence[Bar], *, title: str) -> Element:
    """One below the other from zero; `other` is a thin outline around where it would end."""
    longest = max([*(bar.value for bar in bars), *(bar.other or 0.0 for bar in bars)]) or 1.0
    plot = LEFT + PLOT_WIDTH + LEGEND_WIDTH - NAME_PX - VALUE_PX + 60
    parts = []
    for number, bar in enumerate(bars):
        top = 4 + number * (BAR_PX + 8)
        parts.append(make("text", bar.name, x=NAME_PX - 8, y=top + 13, text_anchor="end"))
        length = plot * bar.value / longest
        parts.append(make("rect", x=NAME_PX, y=top, width=f"{length:.1f}", height=BAR_PX, fill=COLOURS[0]))
        if bar.other is not None:
            reach = f"{plot * bar.other / longest:.1f}"
            outline = {"fill": "none", "stroke": COLOURS[1], "stroke_width": 2}
            parts.append(make("rect", x=NAME_PX, y=top - 2, width=reach, height=BAR_PX + 4, **outline))
        end = NAME_PX + plot * max(bar.value, bar.other or 0.0) / longest
        parts.append(make("text", bar.label, x=f"{end + 6:.1f}", y=top + 13))
    height = 8 + len(bars) * (BAR_PX + 8)
    return _make_svg(parts, NAME_PX + plot + VALUE_PX, height, title)


def _make_svg(parts: Sequence[Element], width: float, height: float, title: str) -> Element:
    box = f"0 0 {width:g} {height:g}"
    sizes = {"viewBox": box, "width": f"{width:g}", "height": f"{height:g}"}
    return make("svg", make("title", title), *parts, role="img", **sizes)
