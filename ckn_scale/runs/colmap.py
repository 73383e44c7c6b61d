"""A database as COLMAP and pycolmap open it: cameras, images, keypoints, matches and two-view geometries.

Coordinates are COLMAP's (the middle of the first pixel is 0.5, 0.5) in upright images of their original size,
where it is known. Keypoints have six columns: x, y and the affine shape. Nothing is known of the cameras: one
of model SIMPLE_RADIAL each, with COLMAP's default focal length. The tables are COLMAP 4.2's, where each
image is a frame of a rig of one camera; older releases read the tables they know.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

SCHEMA_VERSION = 4020100
SIMPLE_RADIAL, FOCAL_FACTOR = 2, 1.2  # COLMAP's number of the model; of the longer side
PLANAR_OR_PANORAMIC = 6  # what one affine map or homography explains
CAMERA_SENSOR = 0
MAX_IMAGE_ID = 2**31 - 1  # by which COLMAP numbers pairs
SCHEMA = """
CREATE TABLE rigs (rig_id INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL, ref_sensor_id INTEGER NOT NULL,
    ref_sensor_type INTEGER NOT NULL);
CREATE UNIQUE INDEX rig_ref_sensor_assignment ON rigs(ref_sensor_id, ref_sensor_type);
CREATE TABLE rig_sensors (rig_id INTEGER NOT NULL, sensor_id INTEGER NOT NULL, sensor_type INTEGER NOT NULL,
    sensor_from_rig BLOB, FOREIGN KEY(rig_id) REFERENCES rigs(rig_id) ON DELETE CASCADE);
CREATE UNIQUE INDEX rig_sensor_assignment ON rig_sensors(sensor_id, sensor_type);
CREATE TABLE cameras (camera_id INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL, model INTEGER NOT NULL,
    width INTEGER NOT NULL, height INTEGER NOT NULL, params BLOB, prior_focal_length INTEGER NOT NULL);
CREATE TABLE frames (frame_id INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL, rig_id INTEGER NOT NULL,
    FOREIGN KEY(rig_id) REFERENCES rigs(rig_id) ON DELETE CASCADE);
CREATE TABLE frame_data (frame_id INTEGER NOT NULL, data_id INTEGER NOT NULL, sensor_id INTEGER NOT NULL,
    sensor_type INTEGER NOT NULL, FOREIGN KEY(frame_id) REFERENCES frames(frame_id) ON DELETE CASCADE);
CREATE UNIQUE INDEX frame_sensor_assignment ON frame_data(data_id, sensor_type);
CREATE TABLE images (image_id INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL, name TEXT NOT NULL UNIQUE,
    camera_id INTEGER NOT NULL, CONSTRAINT image_id_check CHECK(image_id >= 0 and image_id < 2147483647),
    FOREIGN KEY(camera_id) REFERENCES cameras(camera_id));
CREATE UNIQUE INDEX index_name ON images(name);
CREATE TABLE pose_priors (pose_prior_id INTEGER PRIMARY KEY NOT NULL, corr_data_id INTEGER NOT NULL,
    corr_sensor_id INTEGER NOT NULL, corr_sensor_type INTEGER NOT NULL, position BLOB,
    position_covariance BLOB, gravity BLOB, coordinate_system INTEGER NOT NULL);
CREATE UNIQUE INDEX pose_prior_data_assignment ON
    pose_priors(corr_data_id, corr_sensor_id, corr_sensor_type);
CREATE TABLE keypoints (image_id INTEGER PRIMARY KEY NOT NULL, rows INTEGER NOT NULL, cols INTEGER NOT NULL,
    data BLOB, FOREIGN KEY(image_id) REFERENCES images(image_id) ON DELETE CASCADE);
CREATE TABLE descriptors (image_id INTEGER PRIMARY KEY NOT NULL, type INTEGER NOT NULL, rows INTEGER NOT NULL,
    cols INTEGER NOT NULL, data BLOB, FOREIGN KEY(image_id) REFERENCES images(image_id) ON DELETE CASCADE);
CREATE TABLE matches (pair_id INTEGER PRIMARY KEY NOT NULL, rows INTEGER NOT NULL, cols INTEGER NOT NULL,
    data BLOB);
CREATE TABLE two_view_geometries (pair_id INTEGER PRIMARY KEY NOT NULL, rows INTEGER NOT NULL,
    cols INTEGER NOT NULL, data BLOB, config INTEGER NOT NULL, F BLOB, E BLOB, H BLOB, qvec BLOB, tvec BLOB,
    camera1 BLOB, camera2 BLOB);
"""


@dataclass(frozen=True)
class Pixels:
    """How an image's pixels, as it was described, become COLMAP's of its original size."""

    described_px: tuple[int, int]
    original_px: tuple[int, int]  # (0, 0): not known; then as it was described

    @property
    def size_px(self) -> tuple[int, int]:
        return self.original_px if all(self.original_px) else self.described_px

    @property
    def matrix(self) -> np.ndarray:
        """(3, 3)"""
        x, y = (new / old for new, old in zip(self.size_px, self.described_px, strict=True))
        return np.array([[x, 0, x / 2], [0, y, y / 2], [0, 0, 1]])


class ColmapDatabase:
    """Written within a `with` block; committed when it ends well. Ids count from 1."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path)
        self._connection.executescript(SCHEMA)
        self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def __enter__(self) -> ColmapDatabase:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with closing(self._connection):
            if kind is None:
                self._connection.commit()

    def add_image(self, image_id: int, name: str, pixels: Pixels, frames: np.ndarray) -> None:
        """An image with its camera and keypoints: `frames` (N, 2, 3) in pixels of the described size."""
        width, height = pixels.size_px
        params = np.array([FOCAL_FACTOR * max(width, height), width / 2, height / 2, 0])
        scaled = pixels.matrix[:2, :2] @ frames.astype(np.float64)
        scaled[:, :, 2] += pixels.matrix[:2, 2]
        keypoints = np.concatenate([scaled[:, :, 2], scaled[:, :, :2].reshape(-1, 4)], axis=1)
        camera = (image_id, SIMPLE_RADIAL, width, height, params.astype("<f8").tobytes(), 0)
        rows = (
            ("cameras", camera),
            ("rigs", (image_id, image_id, CAMERA_SENSOR)),
            ("images", (image_id, name, image_id)),
            ("frames", (image_id, image_id)),
            ("frame_data", (image_id, image_id, image_id, CAMERA_SENSOR)),
            ("keypoints", (image_id, len(keypoints), 6, keypoints.astype("<f4").tobytes())),
        )
        for table, row in rows:
            self._insert(table, row)

    def add_pair(
        self, first: int, second: int, matches: np.ndarray, inliers: np.ndarray, homography: np.ndarray
    ) -> None:
        """Matches (T, 2) of keypoints of two images, first < second, and those (K, 2) that are verified."""
        if not 0 < first < second < MAX_IMAGE_ID:
            raise ValueError(f"a pair needs 0 < first < second < {MAX_IMAGE_ID}, got {first} and {second}")
        pair = MAX_IMAGE_ID * first + second
        nothing = np.zeros(9).tobytes()
        self._insert("matches", (pair, len(matches), 2, matches.astype("<u4").tobytes()))
        geometry = (nothing, nothing, np.ascontiguousarray(homography, "<f8").tobytes())
        pose = (np.array([1.0, 0, 0, 0]).tobytes(), np.zeros(3).tobytes())
        verified = (pair, len(inliers), 2, inliers.astype("<u4").tobytes(), PLANAR_OR_PANORAMIC)
        self._insert("two_view_geometries", (*verified, *geometry, *pose, None, None))

    def _insert(self, table: str, row: Sequence[object]) -> None:
        places = ", ".join("?" * len(row))
        self._connection.execute(f"INSERT INTO {table} VALUES ({places})", row)
