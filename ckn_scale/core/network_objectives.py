"""What networks of patches learn: surrogate classes, groups of views, pairs; and whole images with labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ckn_scale.core.ckn_inputs import blur_matrix
from ckn_scale.core.descriptors.architectures import find_architectures
from ckn_scale.core.descriptors.convolutional import Architecture, resample
from ckn_scale.core.descriptors.deepcompare import build_pair_network
from ckn_scale.core.network_training import export_layers, start_weights

VIEW_MARGIN = 1.5  # a seed patch is so much larger than its views, which turn, shift and zoom in it
_BLURS_PX = (0.0, 0.7, 1.2, 2.0)
_DROPOUT = 0.5


class Classes:
    """PhilippNet: which seed patch is this a view of (surrogate classes), or which group of views.

    `groups` holds the patches of each class, uint8 (n, S, S, 3). Views of a patch are turned, shifted,
    zoomed, changed in colour and contrast, and blurred.
    """

    def __init__(self, groups: Sequence[np.ndarray], name: str = "philippnet", seed: int = 0) -> None:
        if len(groups) < 2:
            raise ValueError(f"classes must be two or more, got {len(groups)}")
        self.groups, self.architecture = groups, find_architectures(name)[0]
        self.layers = self.architecture.build()
        head = nn.Linear(self.architecture.dim, len(groups))
        self.network = nn.Sequential(self.layers, nn.Flatten(), nn.Dropout(_DROPOUT), head)
        start_weights(self.network, seed)

    def measure_loss(self, places: range, generator: torch.Generator) -> Tensor:
        labels = torch.randint(len(self.groups), (len(places),), generator=generator)
        patches = np.stack([_choose(self.groups[one], generator) for one in labels.tolist()])
        views = place(draw_views(patches, self.architecture.input_px, generator), self.network)
        scores = self.network(self.architecture.prepare(views))
        return nn.functional.cross_entropy(scores, place(labels, self.network))

    def export(self) -> dict[str, np.ndarray]:
        return export_layers(self.layers)


class Pairs:
    """DeepCompare: do two patches show the same? Of views (groups as above), as many pairs that do as not.

    Descriptors learn the metric cost: the distance d of a pair that matches, max(0, 1 − d) of another.
    Networks that see both patches at once learn to tell the two kinds apart (softmax).
    """

    def __init__(self, groups: Sequence[np.ndarray], name: str, seed: int = 0) -> None:
        self.groups = [group for group in groups if len(group) > 1]
        if len(self.groups) < 2:
            raise ValueError(f"groups of two or more views must be two or more, got {len(self.groups)}")
        self.joint = build_pair_network(name)
        self.architecture: Architecture | None = None
        if self.joint is None:
            self.architecture = find_architectures(name)[0]
        self.network = self.joint.layers if self.joint is not None else find_architectures(name)[0].build()
        start_weights(self.network, seed)

    def measure_loss(self, places: range, generator: torch.Generator) -> Tensor:
        matching = [number % 2 == 0 for number in places]
        left, right = (place(one, self.network) for one in self._draw_pairs(matching, generator))
        return self._measure_pairs(left, right, place(torch.tensor(matching), self.network))

    def _measure_pairs(self, left: Tensor, right: Tensor, matching: Tensor) -> Tensor:
        if self.joint is not None:
            scores = self.joint.score(left, right)
            return nn.functional.softplus(torch.where(matching, -scores, scores)).mean()
        assert self.architecture is not None
        rows = [
            nn.functional.normalize(self.network(self.architecture.prepare(one))) for one in (left, right)
        ]
        distances = (rows[0] - rows[1]).square().sum(dim=1).add(1e-12).sqrt()
        return torch.where(matching, distances, (1 - distances).clamp(min=0)).mean()

    def _draw_pairs(self, matching: Sequence[bool], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Grey 64 × 64 patches in 0 … 1; both of a pair are turned and mirrored alike."""
        left, right = [], []
        for match in matching:
            first, second = torch.randperm(len(self.groups), generator=generator)[:2].tolist()
            if match:
                views = torch.randperm(len(self.groups[first]), generator=generator)[:2].tolist()
                pair = [self.groups[first][one] for one in views]
            else:
                pair = [_choose(self.groups[one], generator) for one in (first, second)]
            turns, mirrored = torch.randint(4, (2,), generator=generator).tolist()
            pair = [np.rot90(one, turns)[:, :: -1 if mirrored > 1 else 1] for one in pair]
            left.append(pair[0])
            right.append(pair[1])
        side = 64
        return resample(np.stack(left), side, grey=True), resample(np.stack(right), side, grey=True)

    def export(self) -> dict[str, np.ndarray]:
        return export_layers(self.network)


ReadImage = Callable[[int], np.ndarray]  # the position of an image → (H, W, 3) uint8


class Labels:
    """AlexNet-Landmarks: whole images with labels, by a network that knows others; its last layer is new."""

    def __init__(
        self,
        start: dict[str, np.ndarray],
        labels: Sequence[int],
        read: ReadImage,
        classifier: nn.Module,
        prepare: Callable[[Tensor], Tensor],
        seed: int = 0,
    ) -> None:
        if len(set(labels)) < 2:
            raise ValueError(f"images must have two labels or more, got {len(set(labels))}")
        self.labels, self.read, self.prepare = torch.tensor(labels), read, prepare
        self.network = classifier
        self._load(start, seed)

    def _load(self, start: dict[str, np.ndarray], seed: int) -> None:
        """All layers but the last, which begins with normal numbers of deviation 0.01."""
        generator, state = torch.Generator().manual_seed(seed), self.network.state_dict()
        *_, last_weight, last_bias = state
        for name, value in state.items():
            if name == last_weight:
                state[name] = 0.01 * torch.randn(value.shape, generator=generator)
            elif name == last_bias:
                state[name] = torch.zeros_like(value)
            else:
                state[name] = torch.from_numpy(start[name].copy())
        self.network.load_state_dict(state)

    def measure_loss(self, places: range, generator: torch.Generator) -> Tensor:
        chosen = torch.randint(len(self.labels), (len(places),), generator=generator)
        crops = torch.stack([draw_crop(self.read(one), generator) for one in chosen.tolist()])
        scores = self.network(self.prepare(place(crops, self.network)))
        return nn.functional.cross_entropy(scores, place(self.labels[chosen], self.network))

    def export(self) -> dict[str, np.ndarray]:
        return export_layers(self.network)


def place(values: Tensor, network: nn.Module) -> Tensor:
    """On the device of the network."""
    return values.to(next(network.parameters()).device)


def draw_views(patches: np.ndarray, side: int, generator: torch.Generator) -> Tensor:
    """uint8 (B, S, S, 3) → (B, 3, side, side): a random view of each, which is VIEW_MARGIN smaller."""
    count = len(patches)

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    angle, zoom = draw(-0.35, 0.35), torch.exp(draw(-0.35, 0.35)) / VIEW_MARGIN
    shift = torch.stack([draw(-0.15, 0.15), draw(-0.15, 0.15)], dim=1)
    cos, sin = zoom * torch.cos(angle), zoom * torch.sin(angle)
    flip = torch.where(draw(0, 1) < 0.5, -1.0, 1.0)
    rows = torch.stack([cos * flip, -sin, shift[:, 0], sin * flip, cos, shift[:, 1]], dim=1).view(-1, 2, 3)
    grid = nn.functional.affine_grid(rows, [count, 3, side, side], align_corners=False)
    pixels = torch.from_numpy(np.ascontiguousarray(patches.transpose(0, 3, 1, 2))).float() / 255
    views = nn.functional.grid_sample(pixels, grid, padding_mode="reflection", align_corners=False)
    blurs = torch.stack([_blur(side, sigma_px) for sigma_px in _BLURS_PX])
    blur = blurs[torch.randint(len(_BLURS_PX), (count,), generator=generator)][:, None]
    views = blur @ views @ blur.transpose(2, 3)
    contrast, brightness = (draw(*bounds).view(-1, 1, 1, 1) for bounds in ((0.7, 1.4), (-0.1, 0.1)))
    colours = torch.stack([draw(0.8, 1.25) for _ in range(3)], dim=1)[:, :, None, None]
    mean = views.mean(dim=(1, 2, 3), keepdim=True)
    changed = ((views - mean) * contrast + mean + brightness) * colours
    return changed.clamp(0, 1)


def draw_crop(image: np.ndarray, generator: torch.Generator, side: int = 227, whole: int = 256) -> Tensor:
    """(3, side, side) in 0 … 1 of the image at `whole` × `whole`: any place, mirrored or not, other light."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255
    resized = nn.functional.interpolate(pixels, (whole, whole), mode="bilinear", antialias=True)[0]
    bounds = (whole - side + 1, whole - side + 1, 2)
    top, left, mirrored = (int(torch.randint(one, (1,), generator=generator)) for one in bounds)
    crop = resized[:, top : top + side, left : left + side]
    crop = crop.flip(2) if mirrored else crop
    light = 0.1 * torch.randn(3, 1, 1, generator=generator)
    return (crop + light * crop.std()).clamp(0, 1)


def _blur(side: int, sigma_px: float) -> Tensor:
    return torch.eye(side) if sigma_px == 0 else torch.from_numpy(blur_matrix(side, sigma_px))


def _choose(group: np.ndarray, generator: torch.Generator) -> np.ndarray:
    chosen: np.ndarray = group[int(torch.randint(len(group), (1,), generator=generator))]
    return chosen
