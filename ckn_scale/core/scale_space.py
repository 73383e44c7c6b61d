"""The scale space of an image: blurred octaves, the determinant of the Hessian at each level, its extrema.

All octaves lie in one flat array (`Layout`), so that points of all scales are looked up at once
(`Window`, `locate_pixels`). Arrays are reused from image to image, one set per thread (`Buffers`): a fresh
one of some megabytes costs more in page faults than the filters take to fill it."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import cv2
import numpy as np

SCALES_PER_OCTAVE = 3
NUM_LEVELS = SCALES_PER_OCTAVE + 2  # extrema are sought at the inner ones
INPUT_SIGMA_PX = 0.5  # the blur a camera image is assumed to have
FIRST_SIGMA_PX = 1.6
LEVEL_SIGMAS_PX = FIRST_SIGMA_PX * 2.0 ** (np.arange(NUM_LEVELS) / SCALES_PER_OCTAVE)
MIN_SIDE_PX = 12  # of the smallest octave
BORDER_PX = 2  # extrema nearer to the border of their octave are artefacts of it
WINDOW_SIGMAS = 2.5  # where the Gaussian window is cut off; 2.0 costs two points of repeatability
SECOND_DIFFERENCE = np.array([1.0, -2.0, 1.0], np.float32)
FIRST_DIFFERENCE = np.array([-0.5, 0.0, 0.5], np.float32)
IDENTITY = np.array([1.0], np.float32)
NEIGHBOURS = np.ones((3, 3), np.uint8)
CHUNK = 128  # points at once: larger temporaries cost page faults and fall out of the cache


@dataclass(frozen=True)
class Layout:
    """Sizes (O,) of the octaves and the position of each one's first pixel among all pixels."""

    heights: np.ndarray
    widths: np.ndarray
    starts: np.ndarray

    @property
    def num_pixels(self) -> int:
        return int((self.heights * self.widths).sum())

    def halved(self) -> Layout:
        """The layout of the same octaves at half their resolution."""
        return _lay_out((self.heights + 1) // 2, (self.widths + 1) // 2)

    def plane(self, flat: np.ndarray, octave: int) -> np.ndarray:
        """(m, h, w): the planes of `octave` in `flat`, which holds m planes per octave, octave by octave."""
        depth = flat.size // self.num_pixels
        height, width, start = self.heights[octave], self.widths[octave], self.starts[octave]
        part = flat[depth * start : depth * (start + height * width)]
        return part.reshape(depth, height, width)


@dataclass(frozen=True)
class Extrema:
    """Grid positions of N extrema of the strength σ⁴ |det H|, in the order of a scan."""

    octaves: np.ndarray
    levels: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    strengths: np.ndarray

    def __len__(self) -> int:
        return len(self.strengths)

    def select(self, chosen: np.ndarray) -> Extrema:
        return Extrema(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class ScaleSpace:
    """Flat arrays over all octaves: `bases` (P,) is level 0, `strengths` (NUM_LEVELS · P,) is σ⁴ |det H|.

    They are buffers of the calling thread and live until it builds its next scale space.
    """

    layout: Layout
    bases: np.ndarray
    strengths: np.ndarray
    extrema: Extrema


def build_scale_space(luma: np.ndarray, *, threshold: float, saddles: bool) -> ScaleSpace:
    """Scale space of an (H, W) uint8 or float32 image with its extrema above `threshold`.

    Without `saddles` the strength is σ⁴ det H, so that only its positive maxima are found.
    """
    layout = plan_octaves(*luma.shape)
    bases = _buffers.take("bases", layout.num_pixels)
    strengths = _buffers.take("strengths", NUM_LEVELS * layout.num_pixels)
    octaves = [layout.plane(strengths, octave) for octave in range(len(layout.heights))]
    blurred = luma
    for octave, planes in enumerate(octaves):
        base = layout.plane(bases, octave)[0]
        if octave == 0:
            _blur(luma, BLUR_KERNELS[0], base)
        else:
            np.copyto(base, blurred[::2, ::2])
        blurred = _fill_octave(base, planes, saddles, is_last=octave == len(octaves) - 1)
    _fill_top_levels(octaves)
    found = [_find_extrema(octave, planes, threshold) for octave, planes in enumerate(octaves)]
    return ScaleSpace(layout, bases, strengths, Extrema(*_join_columns(found)))


def plan_octaves(height_px: int, width_px: int) -> Layout:
    """Octaves from the image's size down to a shorter side of about MIN_SIDE_PX."""
    heights, widths = [height_px], [width_px]
    while min(heights[-1], widths[-1]) > 2 * MIN_SIDE_PX:
        heights.append((heights[-1] + 1) // 2)
        widths.append((widths[-1] + 1) // 2)
    return _lay_out(np.array(heights), np.array(widths))


def _lay_out(heights: np.ndarray, widths: np.ndarray) -> Layout:
    sizes = heights * widths
    return Layout(heights, widths, np.cumsum(sizes) - sizes)


def _fill_octave(base: np.ndarray, planes: np.ndarray, saddles: bool, *, is_last: bool) -> np.ndarray:
    """Measure the levels of one octave (the top one only if `is_last`); return the one of twice the blur."""
    level = twice = base
    for k in range(NUM_LEVELS if is_last else NUM_LEVELS - 1):
        if k:
            level = _blur(level, BLUR_KERNELS[k], _buffers.take(f"level {k % 3}", *base.shape))
        measure_hessian(level, float(LEVEL_SIGMAS_PX[k]), saddles, planes[k])
        twice = level if k == SCALES_PER_OCTAVE else twice
    return twice


def _fill_top_levels(octaves: list[np.ndarray]) -> None:
    """Enlarge the top level of each octave from level 1 of the next, which has the same scale.

    A third of the work of measuring it, and no less repeatable.
    """
    for finer, coarser in pairwise(octaves):
        height, width = finer.shape[1:]
        cv2.pyrUp(coarser[NUM_LEVELS - 1 - SCALES_PER_OCTAVE], finer[NUM_LEVELS - 1], (width, height))


def measure_hessian(level: np.ndarray, sigma_px: float, saddles: bool, out: np.ndarray) -> None:
    """σ⁴ det H of one level by 3 × 3 differences; its absolute value if `saddles` count as much as blobs."""
    second, first = SECOND_DIFFERENCE * sigma_px**2, FIRST_DIFFERENCE * sigma_px
    other = _buffers.take("other", *level.shape)
    cv2.sepFilter2D(level, cv2.CV_32F, second, IDENTITY, out)
    cv2.sepFilter2D(level, cv2.CV_32F, IDENTITY, second, other)
    np.multiply(out, other, out=out)
    cv2.sepFilter2D(level, cv2.CV_32F, first, first, other)
    np.multiply(other, other, out=other)
    (cv2.absdiff if saddles else cv2.subtract)(out, other, out)


def _blur(image: np.ndarray, kernel: np.ndarray, out: np.ndarray) -> np.ndarray:
    return cv2.sepFilter2D(image, cv2.CV_32F, kernel, kernel, out, borderType=cv2.BORDER_REPLICATE)


def _blur_kernel(from_sigma_px: float, to_sigma_px: float) -> np.ndarray:
    sigma_px = float(np.sqrt(to_sigma_px**2 - from_sigma_px**2))
    return cv2.getGaussianKernel(2 * int(np.ceil(WINDOW_SIGMAS * sigma_px)) + 1, sigma_px, cv2.CV_32F)


# Kernel k makes level k out of level k − 1; kernel 0 makes level 0 out of the image.
BLUR_KERNELS = [_blur_kernel(a, b) for a, b in pairwise([INPUT_SIGMA_PX, *LEVEL_SIGMAS_PX])]


def _find_extrema(octave: int, planes: np.ndarray, threshold: float) -> tuple[np.ndarray, ...]:
    """Octave, level, row, column, strength of the maxima over 3 × 3 × 3 neighbours of (NUM_LEVELS, h, w)."""
    peaks = _buffers.take("peaks", *planes.shape)
    for plane, peak in zip(planes, peaks, strict=True):
        cv2.dilate(plane, NEIGHBOURS, peak)
    found = []
    for k in range(1, NUM_LEVELS - 1):
        index = _find_in_level(planes[k], peaks[k - 1 : k + 2], threshold)
        row, column = np.divmod(index, planes.shape[2])
        found.append(
            (np.full(len(index), octave), np.full(len(index), k), row, column, planes[k].ravel()[index])
        )
    return _join_columns(found)


def _find_in_level(plane: np.ndarray, peaks: np.ndarray, threshold: float) -> np.ndarray:
    """Flat positions of the maxima of a level; the levels beside it are looked at only where it has one."""
    below, same, above = peaks
    is_peak = _buffers.take("is peak", *plane.shape, dtype=np.bool_)
    np.greater_equal(plane, same, out=is_peak)
    for edge in (np.s_[:BORDER_PX], np.s_[-BORDER_PX:], np.s_[:, :BORDER_PX], np.s_[:, -BORDER_PX:]):
        is_peak[edge] = False
    index = np.flatnonzero(is_peak)
    index = index[plane.ravel().take(index) > threshold]
    for neighbour in (below, above):
        index = index[plane.ravel().take(index) > neighbour.ravel().take(index)]
    return index


def _join_columns(tables: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    return tuple(np.concatenate(parts) for parts in zip(*tables, strict=True))


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
    pixels: np.ndarray = values.astype(np.intp)
    return pixels


class Buffers(threading.local):
    """`take` hands out uninitialised arrays; the next `take` of the same name reuses the memory.

    So nothing that outlives the call it was taken for may be a view of one.
    """

    def __init__(self) -> None:
        self._flat: dict[str, np.ndarray] = {}

    def take(self, name: str, *shape: int, dtype: type = np.float32) -> np.ndarray:
        """An array of `shape` under `name`; a name always goes with the same dtype."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.size < size:
            flat = self._flat[name] = np.empty(size, dtype)
        return flat[:size].reshape(shape)


_buffers = Buffers()
