"""How far a descriptor moves when its patch is turned, zoomed or shifted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckn_scale.core.keypoints import Keypoints
from ckn_scale.core.patches import extract_patches
from ckn_scale.core.specs import PatchSpec
from ckn_scale.evaluate.pictures.canvas import add_caption
from ckn_scale.evaluate.pictures.chart import Panel, draw_panels

ANGLES_DEG = (0, 5, 10, 15, 20, 30, 40)
ZOOMS = (0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4)
SHIFTS = (0, 2, 4, 6, 8, 10, 12)  # per cent of the patch's side


@dataclass(frozen=True)
class Disturbance:
    """`move(amount, region)` is the (2, 3) map of region coordinates that disturbs a frame."""

    title: str
    label: str
    amounts: Sequence[float]
    move: Callable[[float, float], np.ndarray]


def _turn(angle_deg: float, region: float) -> np.ndarray:
    angle = np.deg2rad(angle_deg)
    return np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0]])


def _zoom(factor: float, region: float) -> np.ndarray:
    return np.array([[factor, 0, 0], [0, factor, 0]])


def _shift(percent: float, region: float) -> np.ndarray:
    return np.array([[1, 0, 2 * region * percent / 100], [0, 1, 0]])


DISTURBANCES = (
    Disturbance("rotation", "degrees", ANGLES_DEG, _turn),
    Disturbance("zoom", "factor", ZOOMS, _zoom),
    Disturbance("translation", "% of the patch", SHIFTS, _shift),
)


def disturb(frames: np.ndarray, move: np.ndarray) -> np.ndarray:
    """Frames (N, 2, 3) after `move` (2, 3) in their own coordinates."""
    linear, centre = frames[:, :, :2].astype(np.float64), frames[:, :, 2:]
    return np.concatenate([linear @ move[:, :2], linear @ move[:, 2:] + centre], axis=2)


def measure_robustness(
    image: np.ndarray,
    keypoints: Keypoints,
    describe: Callable[[np.ndarray], np.ndarray],
    spec: PatchSpec,
    disturbance: Disturbance,
) -> np.ndarray:
    """Mean distance to the undisturbed patch's descriptor, 1 being that between two different patches."""
    rows = describe(extract_patches(image, keypoints, spec))
    apart = np.linalg.norm(rows - np.roll(rows, len(rows) // 2, axis=0), axis=1).mean()
    distances = []
    for amount in disturbance.amounts:
        frames = disturb(keypoints.frames, disturbance.move(amount, spec.region))
        moved = Keypoints(frames.astype(np.float32), keypoints.responses)
        there = describe(extract_patches(image, moved, spec))
        distances.append(np.linalg.norm(there - rows, axis=1).mean() / max(apart, 1e-12))
    return np.array(distances)


def draw_robustness(curves: Mapping[str, Mapping[str, np.ndarray]], *, caption: str) -> np.ndarray:
    """(H, W, 3) uint8: a panel for each disturbance; `curves[disturbance title][descriptor name]`."""
    panels = [Panel(one.title, one.label, one.amounts, curves[one.title]) for one in DISTURBANCES]
    return add_caption(draw_panels(panels, y_label="distance", y_limits=(0.0, 1.0)), caption)
