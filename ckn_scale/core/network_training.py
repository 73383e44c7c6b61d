"""Training of networks by SGD with momentum: one loop for all of them, stopped and taken up at any step.

What a step draws (its batch, its views, its dropout) depends on the seed and its number alone, so a run that
goes on from a checkpoint ends with the bits of one that was never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Recipe:
    """How a network is trained."""

    steps: int
    batch_size: int = 128
    rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0005
    num_drops: int = 2  # how often the rate is divided by ten, evenly over the steps
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be ≥ 1, got {getattr(self, name)}")
        if not self.rate > 0:
            raise ValueError(f"rate must be > 0, got {self.rate}")

    def rate_at(self, step: int) -> float:
        return self.rate / 10.0 ** (step * (self.num_drops + 1) // self.steps)


class Objective(Protocol):
    """What a network is to learn, and from what."""

    @property
    def network(self) -> nn.Module:
        """All that is trained."""
        ...

    def measure_loss(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """The loss of a batch that `generator` draws."""
        ...

    def export(self) -> dict[str, np.ndarray]:
        """The weights by the names of the network's layout."""
        ...


OnStep = Callable[[int, float], None]  # how many steps are done, the loss of the last one
Save = Callable[[int, Mapping[str, np.ndarray]], None]


def train_network(
    objective: Objective,
    recipe: Recipe,
    saved: Mapping[str, np.ndarray] | None = None,
    *,
    on_step: OnStep = lambda step, loss: None,
    save: Save = lambda step, arrays: None,
    save_every: int = 500,
) -> None:
    """Train what the objective holds; `saved` is what an earlier call gave to `save`.

    ValueError when the loss is no number any more: the rate is too high.
    """
    network = objective.network.train()
    optimiser = torch.optim.SGD(
        network.parameters(), recipe.rate, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    )
    begin = 0 if saved is None else restore(network, optimiser, saved)
    for step in range(begin, recipe.steps):
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        for group in optimiser.param_groups:
            group["lr"] = recipe.rate_at(step)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed * 1_000_003 + step)
            loss = objective.measure_loss(recipe.batch_size, generator)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ValueError(f"the loss is {value} at step {step + 1}: try a lower rate than {recipe.rate:g}")
        on_step(step + 1, value)
        if (step + 1) % save_every == 0 and step + 1 < recipe.steps:
            save(step + 1, snapshot(network, optimiser, step + 1))
    network.eval()


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
