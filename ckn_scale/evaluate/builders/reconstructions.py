"""Reconstructions as COLMAP (text, binary) and Bundler write them: cameras and poses, nothing else.

A folder with `cameras` and `images` (.bin or .txt) is one scene of COLMAP, a folder with a bundle file and a
list of images (there or one above) one of Bundler; every such folder below the one given is a scene.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from ckn_scale.errors import InputError
from ckn_scale.evaluate.builders.cameras import Camera, View

# Of COLMAP by number: name, and how many parameters.
MODELS = {
    0: ("SIMPLE_PINHOLE", 3),
    1: ("PINHOLE", 4),
    2: ("SIMPLE_RADIAL", 4),
    3: ("RADIAL", 5),
    4: ("OPENCV", 8),
}
BUNDLE_FILES = ("bundle.out", "bundle.rd.out")
LIST_FILES = ("list.txt", "list.orig.txt", "list.db.txt")
DOWN_AND_FORWARD = np.diag([1.0, -1.0, -1.0])  # Bundler looks along −z, its y goes up


@dataclass(frozen=True)
class Reconstruction:
    """One scene."""

    name: str
    views: tuple[View, ...]  # by name of the image


def read_reconstructions(folder: Path, images: Path | None) -> list[Reconstruction]:
    """Every scene in a folder, sorted by name; `images` is what names of images are relative to."""
    if not folder.is_dir():
        raise InputError(f"no such folder: {folder}")
    scenes = []
    for root, folders, _ in os.walk(folder):
        folders.sort()
        views = _read_views(Path(root), images)
        if views is not None:
            name = "-".join(Path(root).relative_to(folder).parts) or folder.resolve().name
            scenes.append(Reconstruction(name, tuple(sorted(views, key=lambda view: str(view.path)))))
    if not scenes:
        raise InputError(
            f"there is no reconstruction in {folder}: neither cameras and images (.bin or .txt) of COLMAP "
            "nor a bundle.out of Bundler"
        )
    return scenes


def _read_views(folder: Path, images: Path | None) -> list[View] | None:
    for suffix, read_cameras, read_poses in (
        (".bin", _read_binary_cameras, _read_binary_poses),
        (".txt", _read_text_cameras, _read_text_poses),
    ):
        files = [folder / f"{name}{suffix}" for name in ("cameras", "images")]
        if all(file.is_file() for file in files):
            try:
                cameras, poses = read_cameras(files[0]), list(read_poses(files[1]))
            except (struct.error, ValueError, IndexError, UnicodeDecodeError) as error:
                raise InputError(f"{folder} is not what COLMAP writes: {error}") from None
            return [_place(pose, cameras, images or folder, files[1]) for pose in poses]
    bundle = next((folder / name for name in BUNDLE_FILES if (folder / name).is_file()), None)
    return None if bundle is None else list(_read_bundle(bundle, images))


@dataclass(frozen=True)
class Pose:
    name: str
    camera_id: int
    quaternion: Sequence[float]  # w, x, y, z
    translation: Sequence[float]


def _place(pose: Pose, cameras: dict[int, Camera], images: Path, file: Path) -> View:
    if pose.camera_id not in cameras:
        raise InputError(f"{file} names camera {pose.camera_id} of {pose.name}, which there is not")
    path = images / pose.name
    if not path.is_file():
        raise InputError(f"{path} does not exist: --images names the folder that {file} means")
    return View(path, cameras[pose.camera_id], turn_by(pose.quaternion), np.array(pose.translation))


def turn_by(quaternion: Sequence[float]) -> np.ndarray:
    """(3, 3) of w, x, y, z, which need not have unit length."""
    length = np.linalg.norm(quaternion)
    if not np.isfinite(length) or length < 1e-9:
        raise InputError(f"a pose has the quaternion {list(quaternion)}")
    w, x, y, z = np.array(quaternion) / length
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def _make_camera(model: str, width: int, height: int, params: Sequence[float]) -> Camera:
    counts = dict(MODELS.values())
    if model not in counts:
        raise InputError(
            f"cameras of the model {model} are not read: undistort the images (`colmap image_undistorter`), "
            f"or use one of {', '.join(counts)}"
        )
    if len(params) != counts[model] or not all(np.isfinite(params)):
        raise ValueError(f"a camera {model} with {len(params)} parameters")
    two = model in ("PINHOLE", "OPENCV")
    focal = (params[0], params[1]) if two else (params[0], params[0])
    cx, cy, *rest = params[2 if two else 1 :]
    k1, k2, p1, p2 = (*rest, 0.0, 0.0, 0.0, 0.0)[:4]
    return Camera(width, height, focal, (cx, cy), (k1, k2), (p1, p2))


def _read_binary_cameras(file: Path) -> dict[int, Camera]:
    data, offset, cameras = file.read_bytes(), 8, {}
    for _ in range(*struct.unpack_from("<Q", data)):
        camera_id, model, width, height = struct.unpack_from("<iiQQ", data, offset)
        if model not in MODELS:
            _make_camera(f"number {model}", width, height, ())
        name, count = MODELS[model]
        params = struct.unpack_from(f"<{count}d", data, offset + 24)
        cameras[camera_id] = _make_camera(name, width, height, params)
        offset += 24 + 8 * count
    return cameras


def _read_binary_poses(file: Path) -> Iterator[Pose]:
    data, offset = file.read_bytes(), 8
    for _ in range(*struct.unpack_from("<Q", data)):
        _, *numbers, camera_id = struct.unpack_from("<i7di", data, offset)
        end = data.index(b"\0", offset + 64)
        (num_points,) = struct.unpack_from("<Q", data, end + 1)
        yield Pose(data[offset + 64 : end].decode(), camera_id, numbers[:4], numbers[4:])
        offset = end + 9 + 24 * num_points


def _read_lines(file: Path) -> list[str]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def _read_text_cameras(file: Path) -> dict[int, Camera]:
    rows = [line.split() for line in _read_lines(file) if line.strip()]
    return {
        int(row[0]): _make_camera(row[1], int(row[2]), int(row[3]), [float(one) for one in row[4:]])
        for row in rows
    }


def _read_text_poses(file: Path) -> Iterator[Pose]:
    """Two lines an image; the second has its points, and may be empty."""
    for line in _read_lines(file)[::2]:
        if line.strip():
            _, *numbers, camera_id, name = line.split(maxsplit=9)
            values = [float(one) for one in numbers]
            yield Pose(name.strip(), int(camera_id), values[:4], values[4:])


def _read_bundle(bundle: Path, images: Path | None) -> Iterator[View]:
    """Names of images are relative to where they are listed, unless `images` says otherwise."""
    folders = (bundle.parent, bundle.parent.parent)
    lists = [folder / name for folder in folders for name in LIST_FILES if (folder / name).is_file()]
    if not lists:
        raise InputError(f"{bundle} has none of {', '.join(LIST_FILES)} beside it")
    listed = lists[0]
    try:
        names = [line.split()[0] for line in _read_lines(listed) if line.strip()]
        numbers = np.array(" ".join(_read_lines(bundle)[: 1 + 5 * len(names)]).split(), np.float64)
        cameras = numbers[2 : 2 + 15 * int(numbers[0])].reshape(-1, 15)
        if not int(numbers[0]) == len(cameras) == len(names) or not np.isfinite(cameras).all():
            raise ValueError(f"{int(numbers[0])} cameras for {len(names)} images")
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise InputError(f"{bundle} and {listed.name} are not what Bundler writes: {error}") from None
    for name, (focal, k1, k2, *pose) in zip(names, cameras.tolist(), strict=True):
        if focal <= 0:
            continue  # not registered
        path = (images or listed.parent) / name
        mode = cv2.IMREAD_GRAYSCALE | cv2.IMREAD_IGNORE_ORIENTATION
        pixels = cv2.imread(str(path), mode) if path.is_file() else None
        if pixels is None:
            raise InputError(f"{path} is missing or no image: --images names the folder that {listed} means")
        height, width = pixels.shape
        camera = Camera(width, height, (focal, focal), (width / 2, height / 2), (k1, k2))
        rotation, translation = np.reshape(pose[:9], (3, 3)), np.array(pose[9:])
        yield View(path, camera, DOWN_AND_FORWARD @ rotation, DOWN_AND_FORWARD @ translation)
