"""Pairs of images with known homographies: scenes on disk, and tilted photos."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

TILTS = (1.25, 1.5, 2.0, 2.5)


@dataclass(frozen=True)
class Pair:
    group: str
    first: np.ndarray
    second: np.ndarray
    homography: np.ndarray


def read_grey(path: Path) -> np.ndarray:
    image = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
    if image is None:
        raise SystemExit(f"{path} is no image that can be read")
    return image


def read_scenes(folder: Path) -> Iterator[Pair]:
    for scene in sorted(p for p in folder.iterdir() if p.is_dir()):
        images = {p.stem: p for p in scene.glob("img*.*")}
        first = read_grey(images["img1"])
        for k in range(2, 7):
            second = read_grey(images[f"img{k}"])
            yield Pair(scene.name, first, second, np.loadtxt(scene / f"H1to{k}p"))


def read_photos(folder: Path | None, count: int) -> list[np.ndarray]:
    if folder is None or not folder.is_dir():
        return [make_dead_leaves(seed) for seed in range(count)]
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg", ".png"))
    step = max(1, len(paths) // count)
    return [read_grey(p) for p in paths[step // 2 :: step][:count]]


def make_dead_leaves(seed: int) -> np.ndarray:
    """Overlapping discs with the size statistics of natural images."""
    rng = np.random.default_rng(seed)
    image = np.full((480, 640), 128, np.uint8)
    for _ in range(6000):
        centre = (int(rng.integers(-50, 690)), int(rng.integers(-50, 530)))
        radius = int(3 / np.sqrt(rng.uniform(0.0005, 1)))
        cv2.circle(image, centre, radius, int(rng.integers(0, 256)), -1, cv2.LINE_AA)
    return image


def tilt_photos(photos: list[np.ndarray]) -> Iterator[Pair]:
    """Each photo as seen by a camera that is tilted, turned and moved back at random."""
    rng = np.random.default_rng(0)
    for photo in photos:
        for tilt in TILTS:
            longitude_rad, roll_rad = rng.uniform(0, np.pi), rng.uniform(-np.pi, np.pi)
            shape = (
                rng.uniform(0.8, 1.1)
                * _rotation(roll_rad)
                @ np.diag([1 / tilt, 1])
                @ _rotation(longitude_rad)
            )
            yield Pair(f"tilt {tilt}", photo, *_warp_whole(photo, shape))


def _rotation(angle_rad: float) -> np.ndarray:
    cos, sin = np.cos(angle_rad), np.sin(angle_rad)
    return np.array([[cos, -sin], [sin, cos]])


def _warp_whole(image: np.ndarray, shape: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The whole image under a linear map, and the homography; three times too large first, then averaged."""
    height, width = image.shape
    corners = np.array([[0, 0], [width - 1, 0], [0, height - 1], [width - 1, height - 1]]) @ shape.T
    size = np.ceil(np.ptp(corners, axis=0) + 1).astype(int)
    homography = np.eye(3)
    homography[:2, :2], homography[:2, 2] = shape, -corners.min(axis=0)
    enlarge = np.array([[3.0, 0, 1], [0, 3, 1], [0, 0, 1]])
    large = cv2.warpAffine(
        image,
        (enlarge @ homography)[:2],
        tuple(int(3 * s) for s in size),
        flags=cv2.INTER_CUBIC,
        borderMode=cv2.BORDER_REPLICATE,
    )
    return cv2.resize(large, tuple(int(s) for s in size), interpolation=cv2.INTER_AREA), homography
