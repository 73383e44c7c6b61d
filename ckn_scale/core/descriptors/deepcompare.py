"""DeepCompare's networks that see both patches of a pair at once: they compare patches and describe none."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ckn_scale.core.ckn import pad_batches
from ckn_scale.core.descriptors.architectures import TwoStreams, siam_layers, subtract_mean
from ckn_scale.core.descriptors.convolutional import resample
from ckn_scale.core.descriptors.weight_files import decode_weights, find_layout
from ckn_scale.errors import InputError

_SIDE_PX = 64
_BATCH = 64


def build_2ch() -> nn.Module:
    return nn.Sequential(OrderedDict(siam_layers(2), fc=nn.Linear(256, 1)))


def build_2ch_stream() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            conv0=nn.Conv2d(2, 96, 5),
            below0=nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)),
            conv1=nn.Conv2d(96, 96, 3),
            below1=nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)),
            conv2=nn.Conv2d(96, 192, 3),
            below2=nn.ReLU(),
            conv3=nn.Conv2d(192, 192, 3),
            below3=nn.Sequential(nn.ReLU(), nn.Flatten()),
        )
    )


class TwoStreamPairs(TwoStreams):
    """Both streams see both patches."""

    def __init__(self) -> None:
        super().__init__(build_2ch_stream)
        self.fc0, self.fc1 = nn.Linear(2 * 768, 768), nn.Linear(768, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        joined: Tensor = self.fc1(nn.functional.relu(self.fc0(super().forward(pixels))))
        return joined


@dataclass(frozen=True)
class PairNetwork:
    """Scores pairs of patches: the larger, the likelier they show the same."""

    name: str
    layers: nn.Module

    def score(self, left: Tensor, right: Tensor) -> Tensor:
        """Grey patches (B, 1, 64, 64) in 0 … 1 → (B,)."""
        both = torch.cat([subtract_mean(left), subtract_mean(right)], dim=1)
        scores: Tensor = self.layers(both)[:, 0]
        return scores

    def compare(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """uint8 (N, S, S[, 3]) twice → (N,) float32, in batches of one shape."""
        scores = np.empty(len(left), np.float32)
        with torch.inference_mode():
            for (start, first), (_, second) in zip(
                pad_batches(left, _BATCH), pad_batches(right, _BATCH), strict=True
            ):
                pixels = [resample(one, _SIDE_PX, grey=True) for one in (first, second)]
                rows = scores[start : start + _BATCH]
                rows[:] = self.score(*pixels)[: len(rows)].numpy()
        return scores


def build_pair_network(name: str) -> PairNetwork | None:
    """Without its weights; None for a name of something else."""
    kinds = {"deepcompare-2ch": build_2ch, "deepcompare-2ch2stream": TwoStreamPairs}
    return PairNetwork(name, kinds[name]()) if name in kinds else None


def load_pair_network(name: str, data: bytes | None, where: str) -> PairNetwork:
    """With the weights of a file; InputError when they are missing, or the weights of something else."""
    network = build_pair_network(name)
    assert network is not None, name
    if data is None:
        raise InputError(f"{name} needs its weights: --weights FILE, from `ckn-scale train-network {name}`")
    state = network.layers.state_dict()
    layout = {key: tuple(one.shape) for key, one in state.items()}
    arrays = find_layout(name, decode_weights(data, where), [layout], where)
    network.layers.load_state_dict({key: torch.from_numpy(one) for key, one in arrays.items()})
    network.layers.eval().requires_grad_(False)
    return network
