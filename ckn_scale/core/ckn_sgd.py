"""The published training: stochastic gradient descent on pairs of sub-patches.

Filters W and biases b shall make s = Σⱼ exp(wⱼ·x + bⱼ) exp(wⱼ·x′ + bⱼ) equal to the kernel
t = exp(−‖x − x′‖²/(2α²)). With x̃ = [x; 1] and V = [W b] that is s = Σⱼ exp(vⱼ·(x̃ + x̃′)): one product
per pair. The paper moves Z in V = Z R; a step along the gradient in Z is a step in V along the gradient
times R R = (G + τ I)⁻¹, G being the mean of x̃ x̃ᵀ and τ its mean eigenvalue, so only V is kept here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.specs import CknTrainingSpec

logger = logging.getLogger(__name__)

Watcher = Callable[[int, float, Tensor], None]  # iterations done, relative error, filters

_MAX_EXPONENT = 30.0  # larger ones only occur on the way to infinity
_DIVERGED = 4.0  # times the best error so far
_NEAR_ONE = 1e-3  # of the error 1, that of predicting zero
_DEAD = 0.01  # share of the targets' energy below which predictions are zero: the filters have died
_COLLAPSED = 0.98  # the same, when it was once well below 1
_VALIDATION_SEED = 1  # apart from the training pairs


@dataclass(frozen=True)
class PairProblem:
    """Everything a step needs; `rows` (n, q + 1) are sub-patches with a 1 at the end."""

    rows: Tensor
    alpha: float
    preconditioner: Tensor  # (q + 1, q + 1): R R
    validation_sums: Tensor  # (m, q + 1): x̃ + x̃′
    validation_targets: Tensor  # (m,)
    scale: float  # mean of squared targets: an error of 1 is that of predicting zero


def fit_sgd(
    subpatches: Tensor,
    num_filters: int,
    alpha: float,
    spec: CknTrainingSpec,
    *,
    rate: float | None = None,
    watch: Watcher | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(weights (p, q), bias (p,)) from unit rows (n, q); the rate is searched unless it is given."""
    problem = pose_problem(subpatches, alpha, spec)
    start = draw_filters(problem, num_filters, spec.seed)
    if rate is None:
        rates = candidate_rates(spec)
        rate = choose_rate(rates, [try_rate(problem, start, one, spec) for one in rates])
    logger.info("descending at rate %.3g", rate)
    filters = descend(problem, start, rate, spec, watch=watch).cpu().numpy()
    return np.ascontiguousarray(filters[:, :-1]), np.ascontiguousarray(filters[:, -1])


def candidate_rates(spec: CknTrainingSpec) -> list[float]:
    """The learning rates 2^(−k/2) that are tried, largest first."""
    return [2 ** (-k / 2) for k in range(spec.sgd_rate_candidates)]


def pose_problem(subpatches: Tensor, alpha: float, spec: CknTrainingSpec) -> PairProblem:
    """The problem of unit rows (n, q): its validation pairs are the same for every rate."""
    rows = torch.nn.functional.pad(subpatches, (0, 1), value=1.0)
    generator = torch.Generator().manual_seed(_VALIDATION_SEED)
    sums = next(draw_pairs(rows, spec.sgd_validation_pairs, generator))
    targets = kernel_of_sums(sums, alpha)
    scale = float(targets.square().mean())
    return PairProblem(rows, alpha, precondition(rows), sums, targets, scale)


def precondition(rows: Tensor) -> Tensor:
    """(G + τ I)⁻¹ of the second moments G of the rows, τ its mean eigenvalue, through float64."""
    moments = (rows.T @ rows).double() / len(rows)
    values, vectors = torch.linalg.eigh(moments)
    inverse: Tensor = ((vectors / (values + values.mean())) @ vectors.T).to(rows.dtype)
    return inverse


def draw_filters(problem: PairProblem, num_filters: int, seed: int) -> Tensor:
    """The Monte-Carlo form of the kernel: w ~ N(0, I/α²), b = −1/α² − log(p)/2. Its mean is exact."""
    generator = torch.Generator().manual_seed(seed)
    filters = torch.randn(num_filters, problem.rows.shape[1], generator=generator) / problem.alpha
    filters[:, -1] = -1 / problem.alpha**2 - math.log(num_filters) / 2
    return filters.to(problem.rows.device)


def draw_pairs(rows: Tensor, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Sums x̃ + x̃′ (count, q + 1) of random pairs, without end; indices are drawn on the CPU."""
    while True:
        pairs = torch.randint(len(rows), (2, count), generator=generator).to(rows.device)
        yield rows.index_select(0, pairs[0]).add_(rows.index_select(0, pairs[1]))


def kernel_of_sums(sums: Tensor, alpha: float) -> Tensor:
    """exp(−‖x − x′‖²/(2α²)) from x + x′: for unit rows ‖x − x′‖² = 4 − ‖x + x′‖²."""
    return torch.exp((sums[:, :-1].square().sum(dim=1) - 4) / (2 * alpha**2))


def take_step(problem: PairProblem, filters: Tensor, sums: Tensor, rate: float) -> Tensor:
    """One step of (p, q + 1) filters along the preconditioned gradient of the relative squared error."""
    features = _exponentiate(sums, filters)
    excess = features.sum(dim=1) - kernel_of_sums(sums, problem.alpha)
    features *= excess[:, None] * (2 / (len(sums) * problem.scale))
    return filters - rate * (features.T @ sums) @ problem.preconditioner


def _exponentiate(sums: Tensor, filters: Tensor) -> Tensor:
    return (sums @ (filters * math.log2(math.e)).T).clamp_(max=_MAX_EXPONENT).exp2_()


def measure_error(problem: PairProblem, filters: Tensor) -> float:
    """mean (s − t)² / mean t² on the validation pairs."""
    predicted = _exponentiate(problem.validation_sums, filters).sum(dim=1)
    return float((predicted - problem.validation_targets).square().mean() / problem.scale)


def is_sound(problem: PairProblem, filters: Tensor, error: float, best: float) -> bool:
    """Whether filters with `error`, and `best` once, neither diverged nor collapsed.

    Dead filters predict zero, which is an error of 1; but so is predicting twice the target, which a
    sound run passes on its way. So the predictions themselves are looked at.
    """
    if not math.isfinite(error) or error > _DIVERGED * max(best, 0.01):
        return False
    if error > _COLLAPSED and best < 0.9:
        return False
    return abs(error - 1) >= _NEAR_ONE or measure_energy(problem, filters) >= _DEAD


def measure_energy(problem: PairProblem, filters: Tensor) -> float:
    """mean s² / mean t² on the validation pairs."""
    predicted = _exponentiate(problem.validation_sums, filters).sum(dim=1)
    return float(predicted.square().mean() / problem.scale)


def try_rate(problem: PairProblem, filters: Tensor, rate: float, spec: CknTrainingSpec) -> float:
    """The error after `sgd_validate_every` steps; infinite when they diverge or collapse."""
    generator = torch.Generator().manual_seed(spec.seed)
    pairs = draw_pairs(problem.rows, spec.sgd_batch_pairs, generator)
    best = max(1.0, measure_error(problem, filters))
    for step in range(spec.sgd_validate_every):
        filters = take_step(problem, filters, next(pairs), rate)
        if step % 100 == 99 and not is_sound(problem, filters, measure_error(problem, filters), best):
            return math.inf
    error = measure_error(problem, filters)
    return error if is_sound(problem, filters, error, best) else math.inf


def choose_rate(rates: list[float], errors: list[float]) -> float:
    """The rate of the lowest error; candidates may have been tried on different machines."""
    best = min(range(len(rates)), key=lambda index: errors[index])
    if not math.isfinite(errors[best]):
        span = f"{rates[0]:.3g} to {rates[-1]:.3g}"
        raise ValueError(f"all rates from {span} diverge or collapse: a larger alpha_quantile may help")
    return rates[best]


def descend(
    problem: PairProblem,
    filters: Tensor,
    rate: float,
    spec: CknTrainingSpec,
    *,
    watch: Watcher | None = None,
) -> Tensor:
    """All iterations; the rate falls by √2 at intervals, and a bad block is undone and the rate halved."""
    pairs = draw_pairs(problem.rows, spec.sgd_batch_pairs, torch.Generator().manual_seed(spec.seed))
    best, kept = max(1.0, measure_error(problem, filters)), filters
    for done in range(0, spec.sgd_iterations, spec.sgd_validate_every):
        current = rate * 2 ** (-0.5 * (done // spec.sgd_halve_every))
        count = min(spec.sgd_validate_every, spec.sgd_iterations - done)
        for _ in range(count):
            filters = take_step(problem, filters, next(pairs), current)
        error = measure_error(problem, filters)
        if not is_sound(problem, filters, error, best):
            logger.warning("error %.3g after %d steps: back, at half the rate", error, done + count)
            filters, rate = kept, rate / 2
            continue
        best, kept = min(best, error), filters
        if watch is not None:
            watch(done + count, error, filters)
    return kept
