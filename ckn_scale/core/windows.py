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
    layout: Layout,
    octaves: np.ndarray,
    pitch_px: np.ndarray,
    frames: np.ndarray,
    window: Window,
    *,
    margin_px: int = 0,
) -> np.ndarray:
    """(N, K) positions in a flat array of the pixels nearest to the window's samples.

    Point i with frame (2, 3) in image pixels is looked up in plane `octaves[i]` of `layout`, whose
    pixels are `pitch_px[i]` apart; samples beyond all but `margin_px` of it move to the nearest pixel.
    """
    scaled = frames / pitch_px[:, None, None]
    scaled[:, :, 2] += 0.5  # so that cutting off the fraction rounds
    width, height = layout.widths[octaves, None], layout.heights[octaves, None]
    column = _clipped_line(scaled[:, 0, :, None], window.positions, margin_px, width)
    row = _clipped_line(scaled[:, 1, :, None], window.positions, margin_px, height)
    row *= width
    row += column
    row += layout.starts[octaves, None]
    return row


def _clipped_line(
    frame_row: np.ndarray, positions: np.ndarray, margin_px: int, length: np.ndarray
) -> np.ndarray:
    """(N, K) one coordinate of all samples as whole pixels in [margin_px, length − margin_px)."""
    values = frame_row[:, 0] * positions[0]
    values += frame_row[:, 1] * positions[1]
    values += frame_row[:, 2]
    np.clip(values, np.float32(margin_px), (length - 1 - margin_px).astype(np.float32), out=values)
    return values.astype(np.intp)
