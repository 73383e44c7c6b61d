"""Points of made-up images, of which some show a part of a query, turned and shrunk."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ckn_scale.core.evidence import QueryPoints
from ckn_scale.core.keypoints import Keypoints
from ckn_scale.core.packed_points import pack_frames, unpack_frames
from ckn_scale.core.selective_matching import PointSets
from ckn_scale.schemas import DESCRIPTORS
from ckn_scale.storage.point_files import serialise_points

SIZE, OTHER_SIZE = (640, 480), (500, 400)
TRANSFORM = np.array([[0.5, -0.2, 90.0], [0.2, 0.5, 40.0], [0, 0, 1]])


def make_frames(rng: np.random.Generator, count: int, size_px: tuple[int, int]) -> np.ndarray:
    frames = np.empty((count, 2, 3), np.float32)
    angles = rng.uniform(0, 2 * np.pi, count)
    turns = np.stack([np.cos(angles), -np.sin(angles), np.sin(angles), np.cos(angles)], axis=1)
    frames[:, :, :2] = rng.uniform(4, 12, (count, 1, 1)) * turns.reshape(-1, 2, 2)
    frames[:, :, 2] = rng.uniform(10, np.array(size_px) - 10, (count, 2))
    return frames


def pack(frames: np.ndarray, size_px: tuple[int, int]) -> np.ndarray:
    return pack_frames(Keypoints(frames, np.ones(len(frames), np.float32)), *size_px)


def make_query(count: int = 200, seed: int = 0) -> QueryPoints:
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 100, (count, 1)).astype(np.uint16)
    codes = rng.integers(0, 256, (count, 1, 16), np.uint8)
    frames = unpack_frames(pack(make_frames(rng, count, SIZE), SIZE), *SIZE).frames
    return QueryPoints(words, codes, frames, SIZE)


def make_candidates(
    query: QueryPoints, shared: list[int], others: int = 150
) -> tuple[PointSets, np.ndarray, np.ndarray]:
    """Candidates that share so many points with the query, where `TRANSFORM` puts them, and have others."""
    words, codes, frames = [], [], []
    for number, count in enumerate(shared):
        rng = np.random.default_rng(number + 1)
        there = np.empty((count, 2, 3), np.float32)
        there[:, :, :2] = TRANSFORM[:2, :2] @ query.frames[:count, :, :2]
        there[:, :, 2] = query.frames[:count, :, 2] @ TRANSFORM[:2, :2].T + TRANSFORM[:2, 2]
        word = np.concatenate([query.words[:count, 0], rng.integers(0, 100, others).astype(np.uint16)])
        code = np.concatenate([query.codes[:count, 0], rng.integers(0, 256, (others, 16), np.uint8)])
        frame = np.concatenate([there, make_frames(rng, others, OTHER_SIZE)])
        order = np.argsort(word, kind="stable")
        words.append(word[order])
        codes.append(code[order])
        frames.append(pack(frame[order], OTHER_SIZE))
    offsets = np.cumsum([0, *(len(one) for one in words)])
    sizes = np.tile(OTHER_SIZE, (len(shared), 1))
    return PointSets(np.concatenate(words), np.concatenate(codes), offsets), np.concatenate(frames), sizes


def serialise_candidates(
    ids: np.ndarray, points: PointSets, frames: np.ndarray, rows: np.ndarray | None = None
) -> bytes:
    """The file of points of an index shard that holds these rows of the candidates under these ids."""
    rows = np.arange(len(points)) if rows is None else rows
    parts = [slice(*points.offsets[row : row + 2]) for row in rows.tolist()]
    columns = [
        ids.tolist(),
        [part.stop - part.start for part in parts],
        *([one[part].tobytes() for part in parts] for one in (frames, points.words, points.codes)),
    ]
    images = {
        "image_id": ids,
        "width_px": [OTHER_SIZE[0]] * len(ids),
        "height_px": [OTHER_SIZE[1]] * len(ids),
    }
    return serialise_points(pa.table(images), pa.table(columns, schema=DESCRIPTORS))
