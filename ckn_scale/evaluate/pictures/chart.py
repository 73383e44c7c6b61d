"""Line charts by matplotlib, which is an extra: `pip install 'ckn-scale[charts]'`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckn_scale.errors import MissingDependency
from ckn_scale.evaluate.pictures.canvas import FAINT, INK, PALETTE

PANEL_INCHES = (4.2, 3.2)
DOTS_PER_INCH = 100


@dataclass(frozen=True)
class Panel:
    """One chart: `curves[name]` has a value for each of `x`."""

    title: str
    x_label: str
    x: Sequence[float]
    curves: Mapping[str, np.ndarray]
    ticks: Sequence[str] | None = None  # what stands at each of `x`, where that is not the number


def require_matplotlib() -> None:
    """MissingDependency, which names the extra, where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependency("charts need matplotlib: pip install 'ckn-scale[charts]'") from error


def draw_panels(
    panels: Sequence[Panel], *, y_label: str, y_limits: tuple[float, float], columns: int | None = None
) -> np.ndarray:
    """(H, W, 3) uint8: panels, `columns` in a row, with one y axis; the legend is in the first."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ink, grid = _to_unit(INK), _to_unit(FAINT)
    columns = min(columns or len(panels), len(panels))
    rows = -(-len(panels) // columns)
    size = (columns * PANEL_INCHES[0], rows * PANEL_INCHES[1])
    figure = Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")  # no pyplot: it keeps global state
    canvas = FigureCanvasAgg(figure)
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in places[len(panels) :]:
        unused.set_axis_off()
    for panel, axes in zip(panels, places, strict=False):
        for position, (name, values) in enumerate(panel.curves.items()):
            colour = _to_unit(PALETTE[position % len(PALETTE)])
            axes.plot(panel.x, values, color=colour, marker="o", markersize=4, label=name)
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=y_label, xticks=panel.x, ylim=y_limits)
        if panel.ticks is not None:
            axes.set_xticks(panel.x, panel.ticks, rotation=20 if max(map(len, panel.ticks)) > 6 else 0)
        axes.grid(color=grid)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=ink)
        if panel is panels[0]:
            axes.legend(loc="lower right", frameon=False)
    canvas.draw()
    picture: np.ndarray = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    return picture


def _to_unit(colour: tuple[int, int, int]) -> tuple[float, float, float]:
    red, green, blue = colour
    return red / 255, green / 255, blue / 255
