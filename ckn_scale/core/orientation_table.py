"""Layer one of `grad` by table: 8-bit luma has few distinct gradients, so every response is known beforehand.

Exact, and several times faster on a CPU than computing exponentials: one gather of rows per pixel.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.ckn_inputs import convert_to_luma
from ckn_scale.core.ckn_layers import Pooling
from ckn_scale.core.ckn_model import CknLayer, input_positions, input_window, make_pooling_taps
from ckn_scale.core.specs import CknSpec

_REACH = 510  # twice the gradient of 8-bit pixels is an integer in −510 … 510 (one-sided at the border)
_WIDTH = 2 * _REACH + 1


class TabulatedOrientations:
    """Does what FirstLayer does for `grad`, on a CPU, when patches are not blurred first."""

    def __init__(self, spec: CknSpec, layer: CknLayer, patch_size_px: int, group: int) -> None:
        self.step = spec.position_step
        self.table = tabulate_responses(layer, spec.norm_power)
        taps = make_pooling_taps(patch_size_px, layer.spec.subsampling, self.step)
        self.pooling = Pooling(taps, layer, torch.empty(0))
        window = input_window(spec, patch_size_px)
        self.window = None if window is None else torch.from_numpy(window)[:, :, None]
        side = len(input_positions(spec, patch_size_px))
        self.padded = np.empty((group, patch_size_px + 2, patch_size_px + 2), np.int16)
        self.differences = np.empty((2, group, side, side), np.int16)
        self.entries = np.empty((group, side, side), np.int64)
        self.maps = np.empty((group, side, side, layer.spec.num_filters), np.float32)

    def __call__(self, patches: np.ndarray, apply_factor: bool = True) -> Tensor:
        """uint8 (group, S, S, 3) → pooled maps."""
        entries = self._find_entries(convert_to_luma(patches))
        np.take(self.table, entries, axis=0, out=self.maps, mode="clip")  # faster than "raise"
        maps = torch.from_numpy(self.maps)
        if self.window is not None:
            maps *= self.window
        return self.pooling(maps, apply_factor)

    def _find_entries(self, luma: np.ndarray) -> np.ndarray:
        """Rows of the table: twice the differences along x times the table's width, plus those along y."""
        padded, step = self.padded, self.step
        padded[:, 1:-1, 1:-1] = luma
        for line, neighbour, next_one in ((0, 1, 2), (-1, -2, -3)):  # extrapolated: one-sided differences
            padded[:, line] = 2 * padded[:, neighbour] - padded[:, next_one]
            padded[:, :, line] = 2 * padded[:, :, neighbour] - padded[:, :, next_one]
        along_x, along_y = self.differences
        np.subtract(padded[:, 1:-1:step, 2::step], padded[:, 1:-1:step, :-2:step], out=along_x)
        np.subtract(padded[:, 2::step, 1:-1:step], padded[:, :-2:step, 1:-1:step], out=along_y)
        np.multiply(along_x, _WIDTH, out=self.entries, dtype=np.int64)
        along_y += _REACH
        self.entries += along_y
        self.entries += _REACH * _WIDTH
        return self.entries


def tabulate_responses(layer: CknLayer, power: float) -> np.ndarray:
    """(1021², p) float32: row 1021 (510 x + 510) + 510 y + 510 holds the responses to the gradient (x, y)."""
    axis = np.arange(-_REACH, _REACH + 1, dtype=np.float32) / (2 * 255)
    table = np.empty((_WIDTH, _WIDTH, len(layer.bias)), np.float32)
    for row, x in enumerate(axis):
        norms = np.hypot(x, axis)
        unit = np.stack([np.full_like(axis, x), axis], 1) / np.where(norms > 0, norms, 1)[:, None]
        table[row] = (
            np.exp(unit @ layer.weights.T + layer.bias) * np.where(norms > 0, norms**power, 0)[:, None]
        )
    return table.reshape(_WIDTH**2, -1)
