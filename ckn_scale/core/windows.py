"""Round sample windows laid over many points at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ckn_scale.core.scale_space import Layout

CHUNK = 128  # points at once: larger temporaries cost page faults and fall out of the cache


@dataclass(frozen=True)
class Window:
    """K samples on a disk in the region's own frame: `positions` (2, K) as (x, y), `weights` (K,), sum 1."""

    positions: np.ndarray
    weights: np.ndarray


def disk_window(*, radius: float, weight_sigma: float, side: int) -> Window:
    """The nodes of a `side` × `side` grid over [−radius, radius]² that lie on the disk, Gaussian weights."""
    line = np.linspace(-radius, radius, side, dtype=np.float32)
    y, x = (a.ravel() for a in np.meshgrid(line, line, indexing="ij"))
    distance_sq = x * x + y * y
    inside = distance_sq <= radius**2 * 1.001
    weights = np.exp(-distance_sq[inside] / (2 * weight_sigma**2))
    return Window(np.stack([x[inside], y[inside]]), weights / weights.sum())


def chunks(num_points: int) -> Iterator[slice]:
    """Slices of all points, few enough at a time for the cache."""
    return (slice(start, start + CHUNK) for start in range(0, num_points, CHUNK))


def locate_pixels(
    layout: Layout, planes: np.ndarray, pitch_px: np.ndarray, frames: np.ndarray, window: Window
) -> np.ndarray:
    """(N, K) positions in a flat array of the pixels nearest to the window's samples, clipped to the image.

    Point i with frame (2, 3) in image pixels is looked up in plane `planes[i]` of `layout`, whose
    pixels are `pitch_px[i]` apart.
    """
    scaled = frames / pitch_px[:, None, None]
    scaled[:, :, 2] += 0.5  # so that cutting off the fraction rounds
    x, y = window.positions
    column = scaled[:, 0, 0, None] * x + scaled[:, 0, 1, None] * y + scaled[:, 0, 2, None]
    row = scaled[:, 1, 0, None] * x + scaled[:, 1, 1, None] * y + scaled[:, 1, 2, None]
    width, height = layout.widths[planes, None], layout.heights[planes, None]
    np.clip(column, 0, (width - 1).astype(np.float32), out=column)
    np.clip(row, 0, (height - 1).astype(np.float32), out=row)
    index = row.astype(np.intp)
    index *= width
    index += column.astype(np.intp)
    index += layout.starts[planes, None]
    return index
