"""Gaussian scale space of an image and the extrema of its Hessian's determinant.

Octave o holds the image at 1/2^o of its size; level k of it is blurred to LEVEL_SIGMAS_PX[k] pixels
of that octave. The planes of all octaves lie one behind the other in flat arrays (`Layout` tells
where), so that the points of all octaves are handled in one numpy call.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from ckn_scale.core.buffers import Buffers

SCALES_PER_OCTAVE = 3
NUM_LEVELS = SCALES_PER_OCTAVE + 2  # extrema are sought at the inner ones
INPUT_SIGMA_PX = 0.5  # the blur a camera image is assumed to have
FIRST_SIGMA_PX = 1.6
LEVEL_SIGMAS_PX = FIRST_SIGMA_PX * 2.0 ** (np.arange(NUM_LEVELS) / SCALES_PER_OCTAVE)
MIN_SIDE_PX = 12  # of the smallest octave
BORDER_PX = 2  # extrema nearer to the border of their octave are artefacts of it
WINDOW_SIGMAS = 3.0  # where the Gaussian window is cut off; 2.0 costs two points of repeatability

SECOND_DIFFERENCE = np.array([1.0, -2.0, 1.0], np.float32)
FIRST_DIFFERENCE = np.array([-0.5, 0.0, 0.5], np.float32)
IDENTITY = np.array([1.0], np.float32)
NEIGHBOURS = np.ones((3, 3), np.uint8)

_buffers = Buffers()


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


def build_scale_space(luma: np.ndarray, *, threshold: float, saddles: bool) -> ScaleSpace:
    """Scale space of an (H, W) uint8 or float32 image with its extrema above `threshold`.

    Without `saddles` the strength is σ⁴ det H, so that only its positive maxima are found.
    """
    layout = plan_octaves(*luma.shape)
    bases = _buffers.take("bases", layout.num_pixels)
    strengths = _buffers.take("strengths", NUM_LEVELS * layout.num_pixels)
    blurred = luma
    found = []
    for octave in range(len(layout.heights)):
        base = layout.plane(bases, octave)[0]
        if octave == 0:
            _blur(luma, float(np.sqrt(FIRST_SIGMA_PX**2 - INPUT_SIGMA_PX**2)), base)
        else:
            np.copyto(base, blurred[::2, ::2])
        blurred, columns = _fill_octave(base, layout.plane(strengths, octave), threshold, saddles)
        found.append((np.full(len(columns[0]), octave), *columns))
    return ScaleSpace(layout, bases, strengths, Extrema(*_join_columns(found)))


def _fill_octave(
    base: np.ndarray, strengths: np.ndarray, threshold: float, saddles: bool
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Fill the (NUM_LEVELS, h, w) strengths; return the level of twice the base's blur, and the extrema.

    Each level is blurred, measured and searched before the next: its planes are still in the cache.
    """
    levels = [base]
    peaks = _buffers.take("peaks", *strengths.shape)
    candidates = {}
    for k, sigma_px in enumerate(LEVEL_SIGMAS_PX):
        if k:
            increment_px = float(np.sqrt(sigma_px**2 - LEVEL_SIGMAS_PX[k - 1] ** 2))
            levels.append(_blur(levels[-1], increment_px, _buffers.take(f"level {k % 3}", *base.shape)))
        measure_hessian(levels[k], float(sigma_px), saddles, strengths[k])
        cv2.dilate(strengths[k], NEIGHBOURS, peaks[k])
        if 0 < k < NUM_LEVELS - 1:
            candidates[k] = _find_candidates(strengths[k], peaks[k], threshold)
    found = [_confirm_candidates(k, index, strengths[k], peaks) for k, index in candidates.items()]
    return levels[SCALES_PER_OCTAVE], _join_columns(found)


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


def _find_candidates(strength: np.ndarray, peak: np.ndarray, threshold: float) -> np.ndarray:
    """Flat positions of the maxima over 3 × 3 neighbours above `threshold`, to which `peak` is raised."""
    is_peak = _buffers.take("is peak", *strength.shape, dtype=np.bool_)
    np.maximum(peak, np.float32(threshold), out=peak)
    np.greater_equal(strength, peak, out=is_peak)
    return np.flatnonzero(is_peak)


def _confirm_candidates(
    k: int, index: np.ndarray, strength: np.ndarray, peaks: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Level, row, column, strength of those that are maxima over the neighbouring levels too."""
    flat = strength.reshape(-1)
    for neighbour in (k - 1, k + 1):
        index = index[flat.take(index) > peaks[neighbour].reshape(-1).take(index)]
    height, width = strength.shape
    row, column = np.divmod(index, width)
    inside = (row >= BORDER_PX) & (row < height - BORDER_PX)
    inside &= (column >= BORDER_PX) & (column < width - BORDER_PX)
    index, row, column = index[inside], row[inside], column[inside]
    return np.full(len(index), k), row, column, flat.take(index)


def _join_columns(tables: list[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    return tuple(np.concatenate(parts) for parts in zip(*tables, strict=True))


def _blur(image: np.ndarray, sigma_px: float, out: np.ndarray) -> np.ndarray:
    side = 2 * int(np.ceil(WINDOW_SIGMAS * sigma_px)) + 1
    kernel = cv2.getGaussianKernel(side, sigma_px, cv2.CV_32F)
    return cv2.sepFilter2D(image, cv2.CV_32F, kernel, kernel, out, borderType=cv2.BORDER_REPLICATE)
