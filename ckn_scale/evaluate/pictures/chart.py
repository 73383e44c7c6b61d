"""Charts by matplotlib, which is an extra: `pip install 'ckn-scale[charts]'`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ckn_scale.errors import MissingDependency
from ckn_scale.evaluate.pictures.canvas import FAINT, INK, PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL_INCHES = (4.2, 3.2)
DOTS_PER_INCH = 100
LEAST_COLUMNS = 1.6  # a chart alone is as wide
LONG_TICK = 10  # characters
BESIDE = 0.12  # how far apart points of one kind are
MARKS = "os^Dv<>"  # on grey paper they tell curves apart


@dataclass(frozen=True)
class Panel:
    """One chart: `curves[name]` has a value for each of `x`, `spreads[name]` how far it varies."""

    title: str
    x_label: str
    x: Sequence[float]
    curves: Mapping[str, np.ndarray]
    ticks: Sequence[str] | None = None  # what stands at each of `x`, where that is not the number
    spreads: Mapping[str, np.ndarray] = field(default_factory=dict)
    joined: bool = True  # by lines: not where `x` are kinds, between which there is nothing


def require_matplotlib() -> None:
    """MissingDependency, which names the extra, where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependency("charts need matplotlib: pip install 'ckn-scale[charts]'") from error


def draw_panels(
    panels: Sequence[Panel], *, y_label: str, y_limits: tuple[float, float], columns: int | None = None
) -> np.ndarray:
    """(H, W, 3) uint8: panels, `columns` in a row, with one y axis; the first's legend is beside all."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns or len(panels), len(panels))
    rows = -(-len(panels) // columns)
    size = (max(columns, LEAST_COLUMNS) * PANEL_INCHES[0], rows * PANEL_INCHES[1])
    figure = Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")  # no pyplot: it keeps global state
    canvas = FigureCanvasAgg(figure)
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in places[len(panels) :]:
        unused.set_axis_off()
    for panel, axes in zip(panels, places, strict=False):
        _draw_curves(axes, panel)
        _draw_axes(axes, panel)
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=y_label, ylim=y_limits)
    if len(panels[0].curves) > 1:
        figure.legend(*places[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    canvas.draw()
    picture: np.ndarray = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    return picture


def _draw_curves(axes: Axes, panel: Panel) -> None:
    for position, (name, values) in enumerate(panel.curves.items()):
        style: dict[str, Any] = {"color": _to_unit(PALETTE[position % len(PALETTE)]), "markersize": 5}
        style |= {"marker": MARKS[position % len(MARKS)], "linestyle": "-" if panel.joined else "none"}
        aside = 0.0 if panel.joined else BESIDE * (position - (len(panel.curves) - 1) / 2)
        at = np.asarray(panel.x, float) + aside
        axes.errorbar(at, values, panel.spreads.get(name), label=name, capsize=3, **style)


def _draw_axes(axes: Axes, panel: Panel) -> None:
    axes.set_xticks(panel.x)
    if panel.ticks is not None:
        slanted: dict[str, Any] = {"rotation": 20, "ha": "right"}
        axes.set_xticks(panel.x, panel.ticks, **(slanted if max(map(len, panel.ticks)) > LONG_TICK else {}))
        axes.set_xlim(panel.x[0] - 0.4, panel.x[-1] + 0.4)
    axes.grid(color=_to_unit(FAINT))
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_to_unit(INK))


def _to_unit(colour: tuple[int, int, int]) -> tuple[float, float, float]:
    red, green, blue = colour
    return red / 255, green / 255, blue / 255
