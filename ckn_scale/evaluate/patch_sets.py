"""Sets of ready-cut patches: pairs that match or do not, and folders of views of one point each.

pairs   a file of pairs beside the patches. Brown's PhotoTour layout (`patches0000.bmp …`, rows of
        `patch point _ patch point _ …`), or rows of `file file 0|1`, tab, comma or space apart
rome    one folder per point, at least two views in each: the first (by name) is the query, the
        others are to be found among the others of all points
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from ckn_scale.errors import InputError
from ckn_scale.evaluate.training_images import find_images

MOSAIC_SIDE_PX = 64  # a patch in PhotoTour's mosaics


@dataclass(frozen=True)
class PatchPairs:
    """Patches, and pairs of them that show the same point or do not."""

    patches: np.ndarray  # (N, S, S, 3) or (N, S, S) uint8
    first: np.ndarray  # (P,) rows of `patches`
    second: np.ndarray
    matches: np.ndarray  # (P,) bool


@dataclass(frozen=True)
class PatchViews:
    """Patches of several views of each point; one view of each is the query."""

    patches: np.ndarray  # (N, S, S, 3) uint8
    points: np.ndarray  # (N,) the point each shows
    is_query: np.ndarray  # (N,) bool


def read_pairs(folder: Path, pair_file: Path) -> PatchPairs:
    """Pairs of patches in either layout; InputError for a missing folder or a file that is neither."""
    if not folder.is_dir():
        raise InputError(f"no such folder: {folder}")
    rows = _read_rows(pair_file)
    if (folder / "patches0000.bmp").is_file():
        return _read_phototour(folder, pair_file, rows)
    return _read_named_pairs(folder, pair_file, rows)


def read_views(folder: Path) -> PatchViews:
    """One folder per point; InputError for fewer than two folders, or a folder of fewer than two patches."""
    paths = find_images(folder)
    names = [path.parent.relative_to(folder).as_posix() for path in paths]
    points, counts = np.unique(names, return_counts=True)
    if len(points) < 2 or counts.min() < 2:
        raise InputError(f"{folder} must hold two folders or more, of two patches or more each")
    is_query = np.array([position == names.index(name) for position, name in enumerate(names)])
    return PatchViews(_stack_patches(paths), np.searchsorted(points, names), is_query)


def _read_rows(pair_file: Path) -> list[list[str]]:
    try:
        lines = pair_file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise InputError(f"the file of pairs {pair_file} cannot be read") from None
    rows = [re.split(r"[\s,;]+", line.strip()) for line in lines if line.strip()]
    if not rows:
        raise InputError(f"the file of pairs {pair_file} is empty")
    return rows


def _read_phototour(folder: Path, pair_file: Path, rows: Sequence[Sequence[str]]) -> PatchPairs:
    try:
        numbers = np.array([[int(text) for text in row[:5]] for row in rows])
        first, points_1, second, points_2 = numbers[:, [0, 1, 3, 4]].T
    except (ValueError, IndexError):
        raise InputError(f"{pair_file} must have rows of at least five integers") from None
    used, where = np.unique(np.concatenate([first, second]), return_inverse=True)
    patches = _cut_mosaics(folder, used)
    return PatchPairs(patches, where[: len(first)], where[len(first) :], points_1 == points_2)


def _cut_mosaics(folder: Path, used: np.ndarray) -> np.ndarray:
    """(N, 64, 64) of the patches numbered `used`, sorted; 256 of them per mosaic."""
    per_row = 1024 // MOSAIC_SIDE_PX
    patches = np.empty((len(used), MOSAIC_SIDE_PX, MOSAIC_SIDE_PX), np.uint8)
    for mosaic in np.unique(used // per_row**2).tolist():
        image = _read_pixels(folder / f"patches{mosaic:04d}.bmp", cv2.IMREAD_GRAYSCALE)
        tiles = image.reshape(per_row, MOSAIC_SIDE_PX, per_row, MOSAIC_SIDE_PX).swapaxes(1, 2)
        inside = np.flatnonzero(used // per_row**2 == mosaic)
        patches[inside] = tiles.reshape(-1, MOSAIC_SIDE_PX, MOSAIC_SIDE_PX)[used[inside] % per_row**2]
    return patches


def _read_named_pairs(folder: Path, pair_file: Path, rows: Sequence[Sequence[str]]) -> PatchPairs:
    for number, row in enumerate(rows, 1):
        if len(row) != 3 or row[2] not in ("0", "1"):
            raise InputError(
                f"row {number} of {pair_file} must be two files and 0 or 1, got {' '.join(row)!r}"
            )
    names = sorted({name for row in rows for name in row[:2]})
    positions = {name: position for position, name in enumerate(names)}
    first, second = ([positions[row[side]] for row in rows] for side in (0, 1))
    matches = np.array([row[2] == "1" for row in rows])
    patches = _stack_patches([folder / name for name in names])
    return PatchPairs(patches, np.array(first), np.array(second), matches)


def _stack_patches(paths: Sequence[Path]) -> np.ndarray:
    patches = [_read_pixels(path, cv2.IMREAD_COLOR_RGB) for path in paths]
    shape = patches[0].shape
    for path, patch in zip(paths, patches, strict=True):
        if patch.shape != shape or shape[0] != shape[1]:
            raise InputError(f"patches must be squares of one size: {path} is {patch.shape[:2]}")
    return np.stack(patches)


def _read_pixels(path: Path, mode: int) -> np.ndarray:
    pixels = cv2.imread(str(path), mode) if path.is_file() else None
    if pixels is None:
        raise InputError(f"{path} is missing or no image")
    return pixels
