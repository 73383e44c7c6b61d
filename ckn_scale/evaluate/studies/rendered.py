"""Pairs of a photograph and a changed copy of it, as scenes whose homography is known."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import numpy as np

from ckn_scale.core.images import decode_image
from ckn_scale.core.sampling import hash_priorities, smallest
from ckn_scale.core.specs import ImageSpec
from ckn_scale.errors import ImageRejected, InputError
from ckn_scale.evaluate.regions import ImageFile

CHANGES: dict[str, tuple[float, ...]] = {
    "blur in pixels": (0.5, 1, 2, 3, 4),
    "light, gamma": (0.3, 0.5, 0.75, 1.5, 2, 3),
    "turn in degrees": (5, 10, 20, 45, 90, 180),
    "scale, a factor": (0.35, 0.5, 0.7, 1.4),
}
Changed = tuple[np.ndarray, np.ndarray]  # pixels, and the homography that leads to them


def render_pairs(folder: Path, photos: Sequence[Path], kind: str, amount: float, spec: ImageSpec) -> Path:
    """Scenes of two images each in a folder of their own, made again where one is missing."""
    place = folder / f"{kind.split()[0].rstrip(',')}-{amount:g}"
    for path in photos:
        scene = place / f"{path.stem}-{zlib.crc32(str(path).encode()):08x}"
        if (scene / "H1to2p").is_file():
            continue
        try:
            pixels = decode_image(ImageFile(path).read(), spec)
        except ImageRejected as rejected:
            raise InputError(f"{path} cannot be used: {rejected}") from None
        changed, homography = change_photo(pixels, kind, amount)
        scene.mkdir(parents=True, exist_ok=True)
        for name, image in (("img1.png", pixels), ("img2.png", changed)):
            (scene / name).write_bytes(cv2.imencode(".png", image[..., ::-1])[1].tobytes())
        np.savetxt(scene / "H1to2p", homography)  # last: it says that the scene is complete
    return place


def choose_photos(paths: Sequence[Path], count: int) -> list[Path]:
    """Drawn by hash, in their order."""
    chosen = smallest(hash_priorities(0, np.arange(len(paths))), count)
    return [paths[one] for one in sorted(chosen.tolist())]


def change_photo(pixels: np.ndarray, kind: str, amount: float) -> Changed:
    makers: dict[str, Callable[[np.ndarray, float], Changed]] = dict(
        zip(CHANGES, (_blur, _relight, _turn, _scale), strict=True)
    )
    return makers[kind](pixels, amount)


def _blur(pixels: np.ndarray, sigma_px: float) -> Changed:
    return cv2.GaussianBlur(pixels, (0, 0), sigma_px), np.eye(3)


def _relight(pixels: np.ndarray, power: float) -> Changed:
    table = np.round(255 * (np.arange(256) / 255) ** power).astype(np.uint8)
    return table[pixels], np.eye(3)


def _turn(pixels: np.ndarray, angle_deg: float) -> Changed:
    """On a canvas that holds all of it."""
    height, width = pixels.shape[:2]
    turn = cv2.getRotationMatrix2D(((width - 1) / 2, (height - 1) / 2), angle_deg, 1.0)
    cos, sin = abs(turn[0, 0]), abs(turn[0, 1])
    size = (round(width * cos + height * sin), round(width * sin + height * cos))
    turn[:, 2] += ((size[0] - width) / 2, (size[1] - height) / 2)
    return cv2.warpAffine(pixels, turn, size, borderMode=cv2.BORDER_REPLICATE), np.vstack([turn, [0, 0, 1]])


def _scale(pixels: np.ndarray, factor: float) -> Changed:
    height, width = pixels.shape[:2]
    size = (max(1, round(width * factor)), max(1, round(height * factor)))
    how = cv2.INTER_AREA if factor < 1 else cv2.INTER_CUBIC
    x, y = size[0] / width, size[1] / height
    return cv2.resize(pixels, size, interpolation=how), np.array(
        [[x, 0, (x - 1) / 2], [0, y, (y - 1) / 2], [0, 0, 1]]
    )
