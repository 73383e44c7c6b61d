"""Scenes of known geometry: a textured plane seen by cameras around it, as files of COLMAP and Bundler."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from small_sets import photo, save

from ckn_scale.evaluate.builders.cameras import Camera, View
from ckn_scale.evaluate.builders.reconstructions import DOWN_AND_FORWARD

CAMERA = Camera(240, 220, (270.0, 270.0), (120.0, 110.0))
DISTANCE = 1.15  # of a camera to the plane, whose texture is one wide


@dataclass(frozen=True)
class RenderedScene:
    name: str
    views: tuple[View, ...]
    texture_from_plane: np.ndarray  # (3, 3): (X, Y, 1) of the plane Z = 0 → pixels of its texture


def render_scene(folder: Path, name: str, texture_name: str, count: int) -> RenderedScene:
    texture = photo(texture_name, 260)
    height, width = texture.shape[:2]
    plane = np.array([[1, 0, (1 - width) / 2], [0, 1, (1 - height) / 2], [0, 0, width]]) / width
    rng, views = np.random.default_rng(len(name) + count), []
    for number in range(count):
        rotation = cv2.Rodrigues(rng.uniform(-0.3, 0.3, 3))[0]
        centre = rotation.T @ np.array([0, 0, -DISTANCE * rng.uniform(0.9, 1.1)])
        path = folder / name / f"{number:02d}.png"
        view = View(path, CAMERA, rotation, -rotation @ centre)
        image_from_plane = np.array([[1, 0, -0.5], [0, 1, -0.5], [0, 0, 1]]) @ view.projection[:, [0, 1, 3]]
        size = (CAMERA.width_px, CAMERA.height_px)
        image = cv2.warpPerspective(texture, image_from_plane @ plane, size, borderMode=cv2.BORDER_REPLICATE)
        save(path, np.clip(image * rng.uniform(0.7, 1.1), 0, 255).astype(np.uint8))
        views.append(view)
    return RenderedScene(name, tuple(views), np.linalg.inv(plane))


def to_quaternion(rotation: np.ndarray) -> list[float]:
    w = np.sqrt(max(0.0, 1 + np.trace(rotation))) / 2
    x, y, z = (rotation - rotation.T)[[2, 0, 1], [1, 2, 0]]
    return [float(w), *(float(one / (4 * w)) for one in (x, y, z))]


def write_colmap_text(folder: Path, scene: RenderedScene) -> None:
    folder.mkdir(parents=True)
    focal, centre = CAMERA.focal_px[0], CAMERA.centre_px
    camera = f"7 SIMPLE_RADIAL 240 220 {focal} {centre[0]} {centre[1]} 0"
    (folder / "cameras.txt").write_text(f"# a comment\n{camera}\n")
    lines = ["# a comment"]
    for number, view in enumerate(scene.views, 1):
        pose = [*to_quaternion(view.rotation), *view.translation.tolist()]
        lines.append(f"{number} {' '.join(map(str, pose))} 7 {scene.name}/{view.path.name}")
        lines.append("" if number % 2 else "1 2 -1")
    (folder / "images.txt").write_text("\n".join(lines) + "\n")


def write_colmap_binary(folder: Path, scene: RenderedScene) -> None:
    folder.mkdir(parents=True)
    camera = struct.pack("<QiiQQ4d", 1, 7, 1, 240, 220, *CAMERA.focal_px, *CAMERA.centre_px)
    (folder / "cameras.bin").write_bytes(camera)
    data = struct.pack("<Q", len(scene.views))
    for number, view in enumerate(scene.views, 1):
        data += struct.pack("<i7di", number, *to_quaternion(view.rotation), *view.translation, 7)
        data += f"{scene.name}/{view.path.name}".encode() + b"\0"
        data += struct.pack("<Q", 2) + 2 * struct.pack("<ddq", 1.0, 2.0, -1)
    (folder / "images.bin").write_bytes(data)


def write_bundler(folder: Path, scene: RenderedScene) -> None:
    folder.mkdir(parents=True)
    names = [f"{scene.name}/{view.path.name} 0 270" for view in scene.views]
    (folder / "list.txt").write_text("\n".join([*names, f"{scene.name}/00.png"]) + "\n")
    lines = ["# Bundle file v0.3", f"{len(scene.views) + 1} 0"]
    for view in scene.views:
        rotation, translation = DOWN_AND_FORWARD @ view.rotation, DOWN_AND_FORWARD @ view.translation
        lines.append(f"{CAMERA.focal_px[0]} 0 0")
        lines += [" ".join(map(str, row)) for row in [*rotation.tolist(), translation.tolist()]]
    lines += ["0 0 0"] * 5  # one that was not registered
    (folder / "bundle.out").write_text("\n".join(lines) + "\n")
