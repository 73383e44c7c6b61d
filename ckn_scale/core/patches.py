"""Affine-rectified patches, read from an image pyramid so that nothing aliases."""

from __future__ import annotations

import cv2
import numpy as np

from ckn_scale.core.keypoints import Keypoints
from ckn_scale.core.specs import PatchSpec

WARP = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
MIN_SIDE_PX = 4  # of the smallest pyramid level
CHUNK = 128  # patches at once: their four channels stay in the cache until one is dropped


def extract_patches(image: np.ndarray, keypoints: Keypoints, spec: PatchSpec) -> np.ndarray:
    """One patch per keypoint: (N, S, S) uint8 of a grey image, (N, S, S, 3) of an RGB image.

    A patch is the square of half side `spec.region` in the keypoint's frame; outside the image the
    nearest pixel is repeated.
    """
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != 3):
        raise ValueError(f"image must be (H, W) or (H, W, 3) uint8, got {image.shape} {image.dtype}")
    transforms = _patch_transforms(keypoints.frames, spec)  # patch pixel → image pixel
    levels = choose_levels(transforms)
    pyramid = _build_pyramid(image, int(levels.max(initial=0)))
    levels = np.minimum(levels, len(pyramid) - 1)
    # Pixel x of the image is x / 2^level there: pyrDown keeps the pixels with even coordinates.
    matrices = transforms / np.exp2(levels)[:, None, None]
    patches = np.empty((len(keypoints), spec.size_px, spec.size_px, *image.shape[2:]), np.uint8)
    for start in range(0, len(patches), CHUNK):
        part = slice(start, start + CHUNK)
        _warp_patches(pyramid, levels[part], matrices[part], patches[part])
    return patches


def _warp_patches(
    pyramid: list[np.ndarray], levels: np.ndarray, matrices: np.ndarray, patches: np.ndarray
) -> None:
    """Fill `patches` (N, S, S) or (N, S, S, 3) from the pyramid's grey or four-channel images."""
    in_colour = patches.ndim == 4
    num, side = patches.shape[:2]
    out = np.empty((num, side, side, 4), np.uint8) if in_colour else patches
    for patch, matrix, level in zip(out, matrices, levels.tolist(), strict=True):
        cv2.warpAffine(pyramid[level], matrix, (side, side), patch, WARP, cv2.BORDER_REPLICATE)
    if in_colour:
        rows = (num * side, side)
        cv2.cvtColor(out.reshape(*rows, 4), cv2.COLOR_RGBA2RGB, patches.reshape(*rows, 3))


def choose_levels(transforms: np.ndarray) -> np.ndarray:
    """The pyramid level (N,) at which the coarser axis of the patch has a pitch of 0.7 to 1.4 pixels."""
    a, b, c, d = transforms[:, :, :2].reshape(-1, 4).T
    square_sum, determinant = a * a + b * b + c * c + d * d, a * d - b * c
    # The square of the larger singular value; `np.linalg.svd` takes ten times as long.
    pitch_sq = 0.5 * (square_sum + np.sqrt(np.maximum(square_sum**2 - 4 * determinant**2, 0.0)))
    levels: np.ndarray = np.rint(0.5 * np.log2(np.maximum(pitch_sq, 1.0))).astype(np.int64)
    return levels


def _patch_transforms(frames: np.ndarray, spec: PatchSpec) -> np.ndarray:
    """(N, 2, 3): patch pixel (column, row) → image pixel; the patch's side is 2 region, cut into S pixels."""
    pitch = 2.0 * spec.region / spec.size_px
    centre = (spec.size_px - 1) / 2.0
    transforms = frames.astype(np.float64)
    transforms[:, :, :2] *= pitch
    transforms[:, :, 2] -= centre * (transforms[:, :, 0] + transforms[:, :, 1])
    return transforms


def _build_pyramid(image: np.ndarray, num_halvings: int) -> list[np.ndarray]:
    # Four channels warp faster than three: they fill a vector register.
    base = image if image.ndim == 2 else cv2.cvtColor(image, cv2.COLOR_RGB2RGBA)
    pyramid = [base]
    while len(pyramid) <= num_halvings and min(pyramid[-1].shape[:2]) >= 2 * MIN_SIDE_PX:
        pyramid.append(cv2.pyrDown(pyramid[-1]))
    return pyramid
