"""Training of networks by SGD with momentum: one loop for all of them, stopped and taken up at any step.

A batch is cut into pieces, always as many, and what a piece draws (examples, views, dropout) depends on the
seed, the step and its number alone. Whoever computes gradients of pieces, they are summed in one order
(`gradient_sums.py`); so the bits are the same for any number of workers, stopped in between or not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ckn_scale.core.gradient_sums import PartialSum, finish_sum, merge_sums


@dataclass(frozen=True)
class Recipe:
    """How a network is trained."""

    steps: int
    batch_size: int = 128
    rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0005
    num_drops: int = 2  # how often the rate is divided by ten, evenly over the steps
    num_pieces: int = 8  # of a batch: at most so many workers share a step
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "num_pieces"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be ≥ 1, got {getattr(self, name)}")
        if not self.rate > 0:
            raise ValueError(f"rate must be > 0, got {self.rate}")

    def rate_at(self, step: int) -> float:
        return self.rate / 10.0 ** (step * (self.num_drops + 1) // self.steps)

    @property
    def pieces(self) -> list[range]:
        """The places in the batch that each piece has, as even as can be."""
        count = min(self.num_pieces, self.batch_size)
        bounds = [number * self.batch_size // count for number in range(count + 1)]
        return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


class Objective(Protocol):
    """What a network is to learn, and from what."""

    @property
    def network(self) -> nn.Module:
        """All that is trained."""
        ...

    def measure_loss(self, places: range, generator: torch.Generator) -> Tensor:
        """The mean loss at these places of a batch, for which `generator` draws."""
        ...

    def export(self) -> dict[str, np.ndarray]:
        """The weights by the names of the network's layout."""
        ...


class GradientComputer:
    """Computes gradients of pieces with a network of its own, which gets its weights with each call."""

    def __init__(self, objective: Objective, recipe: Recipe, device: str = "cpu") -> None:
        self._objective, self._recipe = objective, recipe
        self._network = objective.network.to(device).train()

    def compute(self, step: int, weights: Sequence[np.ndarray], pieces: range) -> list[PartialSum]:
        """Of the step's batch, for the parameters in the network's order; the loss comes last."""
        with torch.no_grad():
            for parameter, weight in zip(self._network.parameters(), weights, strict=True):
                parameter.copy_(torch.tensor(weight))
        return merge_sums(PartialSum(piece, 1, self._measure(step, piece)) for piece in pieces)

    def _measure(self, step: int, piece: int) -> list[np.ndarray]:
        recipe, places = self._recipe, self._recipe.pieces[piece]
        seed = ((recipe.seed * 1_000_003 + step) * 1_009 + piece) % 2**63
        self._network.zero_grad(set_to_none=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            loss = self._objective.measure_loss(places, torch.Generator().manual_seed(seed))
        loss = loss * (len(places) / recipe.batch_size)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [one.grad for one in self._network.parameters()]
        assert all(one is not None for one in gradients)
        arrays = [one.cpu().numpy().copy() for one in gradients if one is not None]
        return [*arrays, np.array([float(loss.detach())])]


# step, weights in the network's order → the sums of all pieces of its batch, in their order
ComputeGradients = Callable[[int, Sequence[np.ndarray]], list[PartialSum]]
OnStep = Callable[[int, float], None]  # how many steps are done, the loss of the last one
Save = Callable[[int, Mapping[str, np.ndarray]], None]


def train_network(
    network: nn.Module,
    recipe: Recipe,
    compute: ComputeGradients,
    saved: Mapping[str, np.ndarray] | None = None,
    *,
    on_step: OnStep = lambda step, loss: None,
    save: Save = lambda step, arrays: None,
    save_every: int = 500,
) -> None:
    """Train the network by gradients of `compute`; `saved` is what an earlier call gave to `save`.

    ValueError when the loss is no number any more: the rate is too high. Or for a network with batch
    normalisation, whose pieces would each see another mean.
    """
    if any(True for _ in network.buffers()):
        raise ValueError("a network with statistics of its batches cannot be trained in pieces")
    optimiser = torch.optim.SGD(
        network.parameters(), recipe.rate, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    )
    begin = 0 if saved is None else restore(network, optimiser, saved)
    for step in range(begin, recipe.steps):
        for group in optimiser.param_groups:
            group["lr"] = recipe.rate_at(step)
        weights = [one.detach().numpy() for one in network.parameters()]
        *gradients, loss = finish_sum(compute(step, weights))
        value = float(loss[0])
        if not math.isfinite(value):
            raise ValueError(f"the loss is {value} at step {step + 1}: try a lower rate than {recipe.rate:g}")
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            parameter.grad = torch.tensor(gradient)
        optimiser.step()
        on_step(step + 1, value)
        if (step + 1) % save_every == 0 and step + 1 < recipe.steps:
            save(step + 1, snapshot(network, optimiser, step + 1))


def snapshot(network: nn.Module, optimiser: torch.optim.Optimizer, step: int) -> dict[str, np.ndarray]:
    """Weights, momenta and the number of steps done."""
    arrays = {f"network.{name}": one.detach().numpy().copy() for name, one in network.state_dict().items()}
    for name, parameter in network.named_parameters():
        momentum = optimiser.state[parameter].get("momentum_buffer")
        if momentum is not None:
            arrays[f"momentum.{name}"] = momentum.numpy().copy()
    return {**arrays, "step": np.array([step], np.int64)}


def restore(network: nn.Module, optimiser: torch.optim.Optimizer, saved: Mapping[str, np.ndarray]) -> int:
    """What `snapshot` gave; the number of steps done."""
    prefix = "network."
    weights = {key[len(prefix) :]: one for key, one in saved.items() if key.startswith(prefix)}
    network.load_state_dict({name: torch.from_numpy(one.copy()) for name, one in weights.items()})
    for name, parameter in network.named_parameters():
        if f"momentum.{name}" in saved:
            momentum = torch.from_numpy(saved[f"momentum.{name}"].copy())
            optimiser.state[parameter]["momentum_buffer"] = momentum
    return int(saved["step"][0])


def export_layers(layers: nn.Module) -> dict[str, np.ndarray]:
    """Weights by name, as a file of them has it."""
    return {name: one.detach().numpy().copy() for name, one in layers.state_dict().items()}


def start_weights(network: nn.Module, seed: int) -> None:
    """Normal numbers that keep the size of what goes through rectified layers (He et al.), no biases."""
    generator = torch.Generator().manual_seed(seed)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            inputs = layer.weight[0].numel()
            with torch.no_grad():
                layer.weight.normal_(0, math.sqrt(2 / inputs), generator=generator)
                if layer.bias is not None:
                    layer.bias.zero_()
