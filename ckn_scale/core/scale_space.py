"""Gaussian scale space of an image and the extrema of its Hessian's determinant.

Octave o holds the image at 1/2^o of its size, blurred to LEVEL_SIGMAS_PX pixels of that octave.
The arrays of all octaves lie one behind the other in flat buffers, so that the points of all
octaves are handled in one numpy call (`Layout` tells where each octave starts).
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

SCALES_PER_OCTAVE = 3
NUM_LEVELS = SCALES_PER_OCTAVE + 2  # extrema are sought at the inner ones
INPUT_SIGMA_PX = 0.5  # the blur a camera image is assumed to have
FIRST_SIGMA_PX = 1.6
LEVEL_SIGMAS_PX = FIRST_SIGMA_PX * 2.0 ** (np.arange(NUM_LEVELS) / SCALES_PER_OCTAVE)
MIN_SIDE_PX = 12  # of the smallest octave
BORDER_PX = 5  # extrema nearer to the border of their octave are artefacts of it
WINDOW_SIGMAS = 3.0  # where the Gaussian window is cut off

SECOND_DIFFERENCE = np.array([1.0, -2.0, 1.0], np.float32)
FIRST_DIFFERENCE = np.array([-0.5, 0.0, 0.5], np.float32)
IDENTITY = np.array([1.0], np.float32)


@dataclass(frozen=True)
class Layout:
    """Sizes of the octaves and the position of each one's first pixel among all pixels."""

    heights: np.ndarray
    widths: np.ndarray
    starts: np.ndarray

    @property
    def num_pixels(self) -> int:
        return int((self.heights * self.widths).sum())


@dataclass(frozen=True)
class ScaleSpace:
    """`bases` (P,): level 0 of each octave; `responses` (NUM_LEVELS · P,): σ⁴ det H, octave by octave."""

    layout: Layout
    bases: list[np.ndarray]
    responses: list[np.ndarray]  # per octave (NUM_LEVELS, h, w)


@dataclass(frozen=True)
class Extrema:
    """Positions of N extrema on the grid: octave, level, row, column, and |response| there."""

    octaves: np.ndarray
    levels: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    strengths: np.ndarray

    def __len__(self) -> int:
        return len(self.strengths)

    def strongest(self, count: int) -> Extrema:
        """The `count` strongest, strongest first; ties in the order of the scan."""
        order = np.argsort(-self.strengths, kind="stable")[:count]
        return Extrema(*(getattr(self, name)[order] for name in self.__dataclass_fields__))


def plan_octaves(height_px: int, width_px: int) -> Layout:
    heights, widths = [height_px], [width_px]
    while min(heights[-1], widths[-1]) // 2 > MIN_SIDE_PX:
        heights.append((heights[-1] + 1) // 2)
        widths.append((widths[-1] + 1) // 2)
    sizes = np.array(heights) * np.array(widths)
    return Layout(np.array(heights), np.array(widths), np.cumsum(sizes) - sizes)


def build_scale_space(luma: np.ndarray, layout: Layout) -> ScaleSpace:
    base = _blur(luma, float(np.sqrt(FIRST_SIGMA_PX**2 - INPUT_SIGMA_PX**2)))
    bases, responses = [], []
    for height, width in zip(layout.heights, layout.widths, strict=True):
        stack = np.empty((NUM_LEVELS, height, width), np.float32)
        level = base
        for k in range(NUM_LEVELS):
            if k:
                increment = np.sqrt(LEVEL_SIGMAS_PX[k] ** 2 - LEVEL_SIGMAS_PX[k - 1] ** 2)
                level = _blur(level, float(increment))
            hessian_response(level, float(LEVEL_SIGMAS_PX[k]), stack[k])
            if k == SCALES_PER_OCTAVE:
                next_base = np.ascontiguousarray(level[::2, ::2])
        bases.append(base)
        responses.append(stack)
        base = next_base
    return ScaleSpace(layout, bases, responses)


def hessian_response(level: np.ndarray, sigma_px: float, out: np.ndarray) -> None:
    """σ⁴ det H of one level, by 3 × 3 differences."""
    xx = cv2.sepFilter2D(level, cv2.CV_32F, SECOND_DIFFERENCE, IDENTITY)
    yy = cv2.sepFilter2D(level, cv2.CV_32F, IDENTITY, SECOND_DIFFERENCE)
    xy = cv2.sepFilter2D(level, cv2.CV_32F, FIRST_DIFFERENCE, FIRST_DIFFERENCE)
    cv2.multiply(xx, yy, xx, sigma_px**4)
    cv2.multiply(xy, xy, xy, sigma_px**4)
    cv2.subtract(xx, xy, out)


def find_extrema(space: ScaleSpace, threshold: float, saddles: bool) -> Extrema:
    """Maxima of |response| (or of the response alone) over the 3 × 3 × 3 neighbourhood."""
    found = [_octave_extrema(stack, threshold, saddles) for stack in space.responses]
    octaves = np.concatenate([np.full(len(f[0]), o) for o, f in enumerate(found)])
    return Extrema(octaves, *(np.concatenate(parts) for parts in zip(*found, strict=True)))


def _octave_extrema(stack: np.ndarray, threshold: float, saddles: bool) -> tuple[np.ndarray, ...]:
    strength = np.abs(stack) if saddles else stack
    kernel = np.ones((3, 3), np.uint8)
    peaks = [cv2.dilate(level, kernel).ravel() for level in strength]
    height, width = stack.shape[1:]
    parts = []
    for k in range(1, NUM_LEVELS - 1):
        flat = strength[k].ravel()
        index = np.flatnonzero((flat >= peaks[k]) & (flat > threshold))
        value = flat[index]
        row, column = np.divmod(index, width)
        keep = (value > peaks[k - 1][index]) & (value > peaks[k + 1][index])
        keep &= (row >= BORDER_PX) & (row < height - BORDER_PX)
        keep &= (column >= BORDER_PX) & (column < width - BORDER_PX)
        parts.append((np.full(keep.sum(), k), row[keep], column[keep], value[keep]))
    return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))


def _blur(image: np.ndarray, sigma_px: float) -> np.ndarray:
    side = 2 * int(np.ceil(WINDOW_SIGMAS * sigma_px)) + 1
    return cv2.GaussianBlur(image, (side, side), sigma_px, borderType=cv2.BORDER_REPLICATE)
