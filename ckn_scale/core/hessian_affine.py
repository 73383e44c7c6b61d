"""The Hessian-affine detector: blobs of a scale space, refined, with an affine shape and an orientation.

Extrema of the Hessian's determinant are moved between the pixels of their grid (edges are dropped), get
the ellipse of the gradients around them, and are turned to the dominant direction of these gradients."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from ckn_scale.core.keypoints import Keypoints, empty_keypoints
from ckn_scale.core.sampling import smallest
from ckn_scale.core.scale_space import (
    FIRST_SIGMA_PX,
    LEVEL_SIGMAS_PX,
    NUM_LEVELS,
    SCALES_PER_OCTAVE,
    Buffers,
    Extrema,
    Layout,
    ScaleSpace,
    build_scale_space,
    chunks,
    disk_window,
    locate_pixels,
)
from ckn_scale.core.specs import KeypointSpec

MAX_EDGE_RATIO = 10.0  # of the two curvatures of the response surface
MAX_EDGE_SCORE = (MAX_EDGE_RATIO + 1) ** 2 / MAX_EDGE_RATIO
MAX_OFFSET = 1.5  # a quadratic whose peak is farther away does not describe this extremum
SPARE_FACTOR, SPARE = 1.25, 64  # so many more extrema are refined than asked for, as some are dropped
NUM_ITERATIONS = 2  # the first does nearly all, a third nothing
ISOTROPY = 0.1  # share of the trace added to the diagonal: bounds the ratio of the axes by 3.3
TINY = 1e-6  # a tensor without any gradient gives a circle
BOX = np.full(3, 1 / 3, np.float32)
SHAPE_WINDOW = disk_window(radius=8.0, weight_sigma=4.0, side=9)
ORIENTATION_WINDOW = disk_window(radius=4.0, weight_sigma=2.0, side=13)
NUM_BINS = 72  # samples go to the nearest bin, so a bin's width is the error they may have
SMOOTHING_RAD = 0.8  # wide: a dominant direction is found again, a narrow peak often is not
_buffers = Buffers()


@dataclass(frozen=True)
class Points:
    """N refined points in pixels of the image, strongest first; `octaves` is where they were found."""

    octaves: np.ndarray
    x_px: np.ndarray
    y_px: np.ndarray
    sigma_px: np.ndarray
    responses: np.ndarray

    def __len__(self) -> int:
        return len(self.x_px)

    def select(self, chosen: np.ndarray | slice) -> Points:
        return Points(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


def detect_hessian_affine(luma: np.ndarray, spec: KeypointSpec) -> Keypoints:
    """The `max_keypoints` strongest regions of an (H, W) uint8 or float32 image above `threshold`.

    The threshold is low on purpose: a textured image of poor contrast gets its points too. A flat
    image has none.
    """
    if luma.ndim != 2 or luma.dtype not in (np.uint8, np.float32):
        raise ValueError(f"luma must be (H, W) uint8 or float32, got {luma.shape} {luma.dtype}")
    if luma.size == 0:
        return empty_keypoints()
    space = build_scale_space(luma, threshold=spec.threshold, saddles=spec.saddles)
    points = choose_points(space, spec.max_keypoints, spec.scale_weight)
    if len(points) == 0:
        return empty_keypoints()
    frames = estimate_frames(luma, space.layout, points)
    if spec.orientation == "dominant":
        frames = orient_frames(space, points.octaves, frames)
    return Keypoints(frames, points.responses)


def choose_points(space: ScaleSpace, count: int, scale_weight: float) -> Points:
    """The `count` best refined points by strength · scale^`scale_weight`; that product is their response."""
    extrema = space.extrema
    sigma_px = LEVEL_SIGMAS_PX[extrema.levels] * np.exp2(extrema.octaves)
    ranks = extrema.strengths * sigma_px.astype(np.float32) ** scale_weight
    spare = smallest(-ranks, int(SPARE_FACTOR * count) + SPARE)
    points = refine_extrema(space, extrema.select(spare))
    responses = points.responses * points.sigma_px**scale_weight
    best = smallest(-responses, count)
    return Points(points.octaves, points.x_px, points.y_px, points.sigma_px, responses).select(best)


def refine_extrema(space: ScaleSpace, extrema: Extrema) -> Points:
    """One Newton step on a quadratic through the nearest 19 values; edges and runaways are dropped."""
    values = _gather_neighbours(space, extrema)
    gradient, hessian = fit_quadratic(values)
    offset = solve_symmetric(hessian, -gradient)
    keep = is_blob(hessian) & (np.abs(offset) < MAX_OFFSET).all(axis=0)
    offset = np.clip(offset, -1.0, 1.0)
    strength = values[1, 1, 1] + 0.5 * (gradient * offset).sum(axis=0)
    step_px = np.exp2(extrema.octaves).astype(np.float32)
    sigma_px = FIRST_SIGMA_PX * np.exp2((extrema.levels + offset[2]) / SCALES_PER_OCTAVE) * step_px
    x_px, y_px = (extrema.columns + offset[0]) * step_px, (extrema.rows + offset[1]) * step_px
    columns = (x_px, y_px, sigma_px, strength)
    return Points(extrema.octaves, *(c.astype(np.float32) for c in columns)).select(keep)


def _gather_neighbours(space: ScaleSpace, extrema: Extrema) -> np.ndarray:
    """(3, 3, 3, N) float64 strengths around each extremum."""
    octave = extrema.octaves
    height, width = space.layout.heights[octave], space.layout.widths[octave]
    centre = (extrema.levels * height + extrema.rows) * width + extrema.columns
    centre += NUM_LEVELS * space.layout.starts[octave]
    step = np.arange(-1, 2)[:, None]
    level, row, column = (
        (step * height * width)[:, None, None],
        (step * width)[None, :, None],
        step[None, None],
    )
    neighbours: np.ndarray = space.strengths.take(centre + level + row + column).astype(np.float64)
    return neighbours


def fit_quadratic(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradient (3, N) and Hessian (3, 3, N) in (x, y, level) of values (3, 3, 3, N) at [level, y, x]."""
    v = {(x, y, z): values[z + 1, y + 1, x + 1] for z in (-1, 0, 1) for y in (-1, 0, 1) for x in (-1, 0, 1)}
    axes = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    gradient = np.empty((3, values.shape[-1]), values.dtype)
    hessian = np.empty((3, *gradient.shape), values.dtype)
    for i, (x, y, z) in enumerate(axes):
        ahead, behind = v[x, y, z], v[-x, -y, -z]
        gradient[i] = 0.5 * (ahead - behind)
        hessian[i, i] = ahead + behind - 2 * v[0, 0, 0]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        (ax, ay, az), (bx, by, bz) = axes[i], axes[j]
        same = v[ax + bx, ay + by, az + bz] + v[-ax - bx, -ay - by, -az - bz]
        opposite = v[ax - bx, ay - by, az - bz] + v[bx - ax, by - ay, bz - az]
        hessian[i, j] = hessian[j, i] = 0.25 * (same - opposite)
    return gradient, hessian


def solve_symmetric(matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
    """x (3, N) of matrix (3, 3, N) · x = right (3, N) by the adjugate; huge where the matrix is singular."""
    (a, b, c), (_, d, e), (_, _, f) = matrix
    p, q, r, s, t, u = (
        d * f - e * e,
        c * e - b * f,
        b * e - c * d,
        a * f - c * c,
        b * c - a * e,
        a * d - b * b,
    )
    determinant = a * p + b * q + c * r
    determinant = np.where(np.abs(determinant) < 1e-30, 1e-30, determinant)
    x, y, z = right
    return np.stack([p * x + q * y + r * z, q * x + s * y + t * z, r * x + t * y + u * z]) / determinant


def is_blob(hessian: np.ndarray) -> np.ndarray:
    """(N,) bool: the two curvatures in the image plane have the same sign and similar size."""
    trace = hessian[0, 0] + hessian[1, 1]
    determinant = hessian[0, 0] * hessian[1, 1] - hessian[0, 1] ** 2
    is_round: np.ndarray = (determinant > 0) & (trace * trace < MAX_EDGE_SCORE * determinant)
    return is_round


def estimate_frames(luma: np.ndarray, layout: Layout, points: Points) -> np.ndarray:
    """(N, 2, 3) float32 upright frames: determinant sigma_px², the vertical axis stays vertical."""
    halved = layout.halved()
    tensors = structure_tensors(luma, layout, halved)
    frames = np.zeros((len(points), 2, 3), np.float32)
    frames[:, 0, 0] = frames[:, 1, 1] = points.sigma_px
    frames[:, 0, 2], frames[:, 1, 2] = points.x_px, points.y_px
    for part in chunks(len(points)):
        _adapt_frames(tensors, halved, points.octaves[part], frames[part])
    return frames


def _adapt_frames(tensors: np.ndarray, halved: Layout, octaves: np.ndarray, frames: np.ndarray) -> None:
    """Replace the shapes of round `frames` by those of the gradients around them."""
    pitch_px = np.exp2(octaves + 1).astype(np.float32)
    scale_px = frames[:, 0, 0].copy()
    for _ in range(NUM_ITERATIONS):
        samples = tensors.take(
            locate_pixels(halved, octaves, pitch_px, frames, SHAPE_WINDOW), axis=0
        )  # (N, K, 4)
        frames[:, :, :2] = upright_shapes(SHAPE_WINDOW.weights @ samples) * scale_px[:, None, None]


def structure_tensors(luma: np.ndarray, layout: Layout, halved: Layout) -> np.ndarray:
    """(P, 4) float32 in the `halved` layout: xx, xy, yy of the gradient, averaged, and a filler.

    Gradients are taken at the resolution of each octave, their products at half of it: the samples
    of a window are farther apart still.
    """
    tensors = _buffers.take("tensors", halved.num_pixels, 4)
    image = luma
    for octave, shape in enumerate(zip(layout.heights, layout.widths, strict=True)):
        if octave:
            image = cv2.pyrDown(
                image.astype(np.float32, copy=False), _buffers.take(f"image {octave % 2}", *shape)
            )
        _write_tensors(image, tensors[halved.starts[octave] :])
    return tensors


def _write_tensors(image: np.ndarray, out: np.ndarray) -> None:
    """Tensors of one octave into the first rows of `out`."""
    height, width = (image.shape[0] + 1) // 2, (image.shape[1] + 1) // 2
    planes = []
    for name, product in zip(("xx", "xy", "yy"), _gradient_products(image), strict=True):
        half = cv2.pyrDown(product, _buffers.take("half", height, width))
        planes.append(cv2.sepFilter2D(half, cv2.CV_32F, BOX, BOX, _buffers.take(name, height, width)))
    cv2.merge([*planes, planes[0]], out[: height * width].reshape(height, width, 4))


def _gradient_products(image: np.ndarray) -> tuple[np.ndarray, ...]:
    """xx, xy, yy of the gradient of an (H, W) image."""
    dx, dy, dx_dy = (_buffers.take(name, *image.shape) for name in ("dx", "dy", "dx dy"))
    cv2.Sobel(image, cv2.CV_32F, 1, 0, dx, ksize=1)
    cv2.Sobel(image, cv2.CV_32F, 0, 1, dy, ksize=1)
    np.multiply(dx, dy, out=dx_dy)
    return np.multiply(dx, dx, out=dx), dx_dy, np.multiply(dy, dy, out=dy)


def upright_shapes(moments: np.ndarray) -> np.ndarray:
    """(N, 2, 2) lower triangular A with A Aᵀ ∝ M⁻¹ and determinant 1; moments (N, ≥ 3) are M's xx, xy, yy.

    Lower triangular keeps the vertical axis vertical: "up is up" at no cost.
    """
    xx, xy, yy = moments[:, 0], moments[:, 1], moments[:, 2]
    more = ISOTROPY * (xx + yy) + TINY
    xx, yy = xx + more, yy + more
    fourth_root = np.sqrt(np.sqrt(xx * yy - xy * xy))
    shapes = np.zeros((len(moments), 2, 2), moments.dtype)
    shapes[:, 0, 0] = np.sqrt(yy) / fourth_root
    shapes[:, 1, 0] = -xy / (np.sqrt(yy) * fourth_root)
    shapes[:, 1, 1] = fourth_root / np.sqrt(yy)
    return shapes


def orient_frames(space: ScaleSpace, octaves: np.ndarray, frames: np.ndarray) -> np.ndarray:
    """`frames` (N, 2, 3) turned so that the first axis points along the dominant gradient of the region."""
    parts = chunks(len(frames))
    angles_rad = [_dominant_angles(space, octaves[part], frames[part]) for part in parts]
    return turn_frames(frames, np.concatenate(angles_rad))


def turn_frames(frames: np.ndarray, angles_rad: np.ndarray) -> np.ndarray:
    """Frames whose first axis is where the direction (cos, sin) of the old frame was."""
    cos, sin = np.cos(angles_rad)[:, None], np.sin(angles_rad)[:, None]
    first, second = frames[:, :, 0], frames[:, :, 1]
    return np.stack([first * cos + second * sin, second * cos - first * sin, frames[:, :, 2]], axis=2)


def _dominant_angles(space: ScaleSpace, octaves: np.ndarray, frames: np.ndarray) -> np.ndarray:
    dx, dy = _sample_gradients(space, octaves, frames)
    shape = frames[:, :, :2, None]
    along_first = shape[:, 0, 0] * dx + shape[:, 1, 0] * dy  # the gradient in the region's own frame
    along_second = shape[:, 0, 1] * dx + shape[:, 1, 1] * dy
    magnitude, angle = cv2.cartToPolar(along_first, along_second)
    bins = (angle * (NUM_BINS / (2 * np.pi)) + 0.5).astype(np.intp)  # 0 … NUM_BINS, the last is the first
    bins += (np.arange(len(frames)) * (NUM_BINS + 1))[:, None]
    counts = np.bincount(
        bins.ravel(), (magnitude * ORIENTATION_WINDOW.weights).ravel(), len(frames) * (NUM_BINS + 1)
    )
    histograms = counts.reshape(-1, NUM_BINS + 1)
    histograms[:, 0] += histograms[:, NUM_BINS]
    return peak_angles(histograms[:, :NUM_BINS])


def _sample_gradients(
    space: ScaleSpace, octaves: np.ndarray, frames: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(N, K) dx and dy of level 0 at the window's samples: cheaper there than everywhere."""
    pitch_px = np.exp2(octaves).astype(np.float32)
    pixels = locate_pixels(space.layout, octaves, pitch_px, frames, ORIENTATION_WINDOW, margin_px=1)
    row = space.layout.widths[octaves, None]
    take = space.bases.take
    return take(pixels + 1) - take(pixels - 1), take(pixels + row) - take(pixels - row)


def _smoothing_matrix(sigma_rad: float) -> np.ndarray:
    """(NUM_BINS, NUM_BINS): Gaussian of the circular distance between two bins."""
    distance = np.abs(np.subtract.outer(np.arange(NUM_BINS), np.arange(NUM_BINS)))
    distance_rad = np.minimum(distance, NUM_BINS - distance) * (2 * np.pi / NUM_BINS)
    weights: np.ndarray = np.exp(-0.5 * (distance_rad / sigma_rad) ** 2)
    return weights


SMOOTHING = _smoothing_matrix(SMOOTHING_RAD)


def peak_angles(histograms: np.ndarray) -> np.ndarray:
    """(N,) float32 radians of the highest peak of (N, NUM_BINS) histograms, between bins by a parabola.

    Bin b is centred at b · 2π / NUM_BINS.
    """
    smooth = histograms @ SMOOTHING
    peak = smooth.argmax(axis=1)
    rows = np.arange(len(smooth))
    left, centre, right = (smooth[rows, (peak + step) % NUM_BINS] for step in (-1, 0, 1))
    curvature = np.minimum(left - 2 * centre + right, -1e-12)
    shift = np.clip(0.5 * (left - right) / curvature, -0.5, 0.5)
    angles_rad: np.ndarray = ((peak + shift) * (2 * np.pi / NUM_BINS)).astype(np.float32)
    return angles_rad
