"""The figures: regions, patches, matches, filters, inputs, robustness. Arrays in, one picture out."""

from __future__ import annotations

import cv2
import numpy as np
import torch

from ckn_scale.core.ckn_inputs import InputSubpatches
from ckn_scale.core.ckn_model import Ckn
from ckn_scale.core.geometry import Verification, verify_matches
from ckn_scale.core.images import to_luma
from ckn_scale.core.keypoints import Keypoints
from ckn_scale.core.selective_matching import match_mutually
from ckn_scale.core.specs import CknSpec, LayerSpec
from ckn_scale.evaluate.matching import REGION_SCALES, measure_distances
from ckn_scale.evaluate.pictures.canvas import (
    INK,
    PAPER,
    Colour,
    add_caption,
    colour_by_value,
    draw_dot,
    draw_polygon,
    enlarge_image,
    label_point,
    outline_regions,
    outline_squares,
    place_side_by_side,
    tile_images,
    write_text,
)

RIGHT_COLOUR: Colour = (0, 200, 83)
WRONG_COLOUR: Colour = (229, 57, 53)
MIN_INLIERS = 12  # chance gave up to 11 in 30 unrelated pairs of 800 regions
MAX_LINES = 200  # of either kind, nearest first: more would hide the images
TILE_PX = 48  # of a filter that is drawn by rays
SMALL_PX = 500  # images below this side are drawn at twice their size


def draw_keypoints(image: np.ndarray, keypoints: Keypoints, *, caption: str) -> np.ndarray:
    """Ellipses of 3√3 detection scales, from blue (fine) to red (coarse), with their orientation."""
    factor = 2 if max(image.shape[:2]) < SMALL_PX else 1
    canvas = fade(enlarge_image(image, factor, smooth=True), 0.85)
    frames = scale_frames(keypoints.frames, factor)
    ellipses = outline_regions(frames, REGION_SCALES)
    colours = colour_by_value(keypoints.scales_px)
    for position in np.argsort(-keypoints.scales_px).tolist():  # the large ones below
        draw_polygon(canvas, ellipses[position], colours[position])
        spoke = np.stack([frames[position, :, 2], ellipses[position, 0]])
        draw_polygon(canvas, spoke, colours[position], closed=False)
    return add_caption(canvas, caption)


def draw_patches(
    image: np.ndarray, keypoints: Keypoints, patches: np.ndarray, region: float, *, caption: str
) -> np.ndarray:
    """The regions in the image, numbered, and the square each becomes."""
    factor = 2 if max(image.shape[:2]) < SMALL_PX else 1
    canvas = fade(enlarge_image(image, factor, smooth=True), 0.85)
    frames = scale_frames(keypoints.frames, factor)
    colours = colour_by_value(keypoints.scales_px)
    for position, square in enumerate(outline_squares(frames, region)):
        draw_polygon(canvas, square, colours[position], thickness=2)
    for position, frame in enumerate(frames):
        canvas = label_point(canvas, str(position + 1), frame[:, 2], colours[position])
    tiles = [_frame_patch(patch, position + 1, colours[position]) for position, patch in enumerate(patches)]
    columns = max(4, int(np.ceil(np.sqrt(len(tiles)))))
    sheet, _ = place_side_by_side([canvas, tile_images(tiles, columns)])
    return add_caption(sheet, caption)


def _frame_patch(patch: np.ndarray, number: int, colour: Colour) -> np.ndarray:
    tile = np.full((2 * patch.shape[0] + 24, 2 * patch.shape[1] + 6, 3), PAPER, np.uint8)
    tile[:18] = PAPER
    tile[18:] = colour
    tile[21:-3, 3:-3] = enlarge_image(patch, 2)
    return write_text(tile, str(number), (3, 8), anchor="lm", size_px=13)


def spread_keypoints(keypoints: Keypoints, count: int) -> Keypoints:
    """`count` regions whose centres lie apart: each next is the strongest far enough from the others."""
    centres = keypoints.frames[:, :, 2]
    apart_px = np.ptp(centres, axis=0).max() / max(2.0, np.sqrt(count) + 1)
    chosen: list[int] = []
    while len(chosen) < min(count, len(keypoints)):
        free = [
            position
            for position in range(len(keypoints))
            if all(np.hypot(*(centres[position] - centres[other])) > apart_px for other in chosen)
            and position not in chosen
        ]
        if free:
            chosen.append(free[0])
        apart_px *= 1.0 if free else 0.7
    return Keypoints(keypoints.frames[chosen], keypoints.responses[chosen])


def fade(image: np.ndarray, share: float) -> np.ndarray:
    """Towards grey, so that what is drawn on it stands out."""
    grey = cv2.cvtColor(to_luma(image), cv2.COLOR_GRAY2RGB)
    return cv2.addWeighted(grey, share * 0.75, image, 1 - share, 20)


def scale_frames(frames: np.ndarray, factor: int) -> np.ndarray:
    """Frames of an image that was enlarged by a whole factor: pixel centres move by half pixels."""
    scaled = frames.astype(np.float64) * factor
    scaled[:, :, 2] += (factor - 1) / 2
    return scaled


def match_images(
    rows: tuple[np.ndarray, np.ndarray],
    frames: tuple[np.ndarray, np.ndarray],
    sizes_px: tuple[tuple[int, int], tuple[int, int]],
) -> tuple[np.ndarray, np.ndarray, Verification]:
    """Mutual nearest descriptors (i, j), nearest first, and what geometry finds in common to them.

    Nothing when fewer than MIN_INLIERS agree. Sizes are (width, height).
    """
    distances = measure_distances(*rows)
    i, j = match_mutually(distances)
    order = np.argsort(distances[i, j], kind="stable")
    i, j = i[order], j[order]
    verified = verify_matches(frames[0][i], frames[1][j], *sizes_px)
    return i, j, verified if len(verified.inliers) >= MIN_INLIERS else Verification(np.empty(0, np.int64))


def draw_matches(
    images: tuple[np.ndarray, np.ndarray],
    frames: tuple[np.ndarray, np.ndarray],
    matches: tuple[np.ndarray, np.ndarray, Verification],
    *,
    caption: str,
) -> np.ndarray:
    """Lines between matched points: inliers green, with their box, over the others in thin red."""
    canvas, starts = place_side_by_side([fade(image, 0.85) for image in images])
    i, j, verified = matches
    inliers = np.isin(np.arange(len(i)), verified.inliers)
    ends = np.stack([frames[0][i, :, 2], frames[1][j, :, 2] + (starts[1], 0)], axis=1)  # (N, 2, 2)
    for shown, colour, opacity in ((~inliers, WRONG_COLOUR, 0.35), (inliers, RIGHT_COLOUR, 0.5)):
        layer = canvas.copy()
        for line in ends[shown][:MAX_LINES]:
            draw_polygon(layer, line, colour, closed=False)
        canvas = cv2.addWeighted(layer, opacity, canvas, 1 - opacity, 0)
        for point in ends[shown][:MAX_LINES].reshape(-1, 2):
            draw_dot(canvas, point, colour)
    if verified.box is not None:
        x1, y1, x2, y2 = verified.box
        box = np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]])
        box[:, 0] += starts[1]
        draw_polygon(canvas, box, RIGHT_COLOUR, thickness=2)
    return add_caption(canvas, caption)


def draw_filters(ckn: Ckn, *, caption: str) -> np.ndarray:
    """First-layer filters of `raw` or `white` as small colour images, each at full brightness.

    Sorted by how much they vary, so that plain colours come first.
    """
    layer = ckn.layers[0]
    side = layer.spec.patch_px
    filters = layer.weights.reshape(len(layer.weights), side, side, 3)
    order = np.argsort((filters - filters.mean(axis=(1, 2), keepdims=True)).std(axis=(1, 2, 3)))
    signed = ckn.spec.channel == "white"
    tiles = [enlarge_image(show_filter(filters[one], signed=signed), 40 // side) for one in order]
    sheet = tile_images(tiles, int(np.ceil(np.sqrt(len(tiles) * 1.6))))
    return add_caption(sheet, caption)


def draw_orientation_filters(ckn: Ckn, *, caption: str, limit: int = 64) -> np.ndarray:
    """Second-layer filters of `grad`, those of the largest contrast: a ray for each orientation of a cell."""
    layer, orientations = ckn.layers[1], ckn.layers[0].spec.num_filters
    side = layer.spec.patch_px
    filters = layer.weights.reshape(len(layer.weights), side, side, orientations)
    order = np.argsort(-filters.std(axis=(1, 2, 3)), kind="stable")[:limit]
    tiles = [_draw_rays(np.maximum(filters[one], 0)) for one in order]
    return add_caption(tile_images(tiles, int(np.ceil(np.sqrt(len(tiles) * 1.6)))), caption)


def _draw_rays(cells: np.ndarray) -> np.ndarray:
    """(side, side, orientations) ≥ 0 → a tile; the longest ray reaches the border of its cell."""
    side, _, count = cells.shape
    tile = np.full((TILE_PX, TILE_PX, 3), INK, np.uint8)
    cell_px = TILE_PX / side
    angles = 2 * np.pi * np.arange(count) / count
    directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    lengths = cells / max(cells.max(), 1e-12) * cell_px / 2
    for row, column in np.ndindex(side, side):
        centre = cell_px * (np.array([column, row]) + 0.5) - 0.5
        for direction, length in zip(directions, lengths[row, column], strict=True):
            draw_polygon(tile, np.stack([centre, centre + length * direction]), PAPER, closed=False)
    return tile


def show_filter(values: np.ndarray, *, signed: bool) -> np.ndarray:
    """As colours of full brightness; signed values around grey."""
    unit = values / max(np.abs(values).max(), 1e-12)
    colours: np.ndarray = np.round(127.5 * (1 + unit) if signed else 255 * np.maximum(unit, 0)).astype(
        np.uint8
    )
    return colours


def draw_inputs(patches: np.ndarray, *, caption: str) -> np.ndarray:
    """For each patch a column: what raw, white and grad look at."""
    white, gradients = whiten_patches(patches), differentiate_patches(patches)
    rows = []
    for label, maps in (("raw", patches), ("white", white), ("grad", gradients)):
        tiles = tile_images([enlarge_image(one, 2) for one in maps], len(maps), gap_px=4)
        strip = np.full((len(tiles), 64, 3), PAPER, np.uint8)
        strip = write_text(strip, label, (8, len(tiles) / 2), anchor="lm", size_px=16)
        rows.append(np.concatenate([strip, tiles], axis=1))
    return add_caption(np.concatenate(rows), caption)


def whiten_patches(patches: np.ndarray) -> np.ndarray:
    """(N, S, S, 3) uint8: overlapping whitened 3 × 3 sub-patches, averaged where they overlap."""
    kernel, size_px = 3, patches.shape[1]
    spec = CknSpec("white", (LayerSpec(kernel, 1, 1),))
    inputs = InputSubpatches(spec, size_px, len(patches), torch.device("cpu"))
    side = size_px - kernel + 1
    assert inputs.basis is not None  # whitened sub-patches come in its coordinates
    columns = (inputs.basis.mT @ inputs(patches)[:, :, : side * side]).numpy()
    grid = columns.reshape(len(patches), kernel * kernel, 3, side, side)
    total, count = np.zeros((len(patches), size_px, size_px, 3)), np.zeros((size_px, size_px, 1))
    for tap in range(kernel * kernel):
        dy, dx = divmod(tap, kernel)
        total[:, dy : dy + side, dx : dx + side] += grid[:, tap].transpose(0, 2, 3, 1)
        count[dy : dy + side, dx : dx + side] += 1
    maps = total / count
    reach = 2.5 * maps.std(axis=(1, 2, 3), keepdims=True)
    shown: np.ndarray = np.clip(127.5 + 127.5 * maps / np.maximum(reach, 1e-12), 0, 255).astype(np.uint8)
    return shown


def differentiate_patches(patches: np.ndarray) -> np.ndarray:
    """(N, S, S, 3) uint8: the hue is the gradient's direction, the brightness its length."""
    spec = CknSpec("grad", (LayerSpec(1, 8, 1),))
    inputs, size_px = (
        InputSubpatches(spec, patches.shape[1], len(patches), torch.device("cpu")),
        patches.shape[1],
    )
    maps = inputs(patches)[:, :, : size_px**2].numpy().reshape(len(patches), 2, size_px, size_px)
    angle = np.arctan2(maps[:, 1], maps[:, 0]) % (2 * np.pi)
    length = np.sqrt(np.hypot(maps[:, 0], maps[:, 1]))
    bright = length / np.maximum(np.percentile(length, 99, axis=(1, 2), keepdims=True), 1e-12)
    hsv = np.stack([angle / np.pi * 90, np.full_like(angle, 220), 255 * np.minimum(bright, 1)], axis=3)
    return np.stack([cv2.cvtColor(one.astype(np.uint8), cv2.COLOR_HSV2RGB) for one in hsv])
