import math

import numpy as np
import pytest
import torch

from ckn_scale.core.ckn_sgd import (
    choose_rate,
    descend,
    draw_filters,
    draw_pairs,
    fit_sgd,
    is_sound,
    kernel_of_sums,
    measure_energy,
    measure_error,
    pose_problem,
    precondition,
    take_step,
    try_rate,
)
from ckn_scale.core.specs import CknTrainingSpec

SPEC = CknTrainingSpec(
    solver="sgd",
    sgd_batch_pairs=200,
    sgd_iterations=300,
    sgd_validate_every=100,
    sgd_halve_every=100,
    sgd_rate_candidates=8,
    sgd_validation_pairs=500,
)
ALPHA = 0.6


@pytest.fixture(scope="module")
def rows():
    """Unit rows near a few directions, correlated as sub-patches are."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(12, 10, generator=generator)
    noise = torch.randn(2000, 10, generator=generator)
    return torch.nn.functional.normalize(centres.repeat(167, 1)[:2000] + 0.5 * noise)


@pytest.fixture(scope="module")
def problem(rows):
    return pose_problem(rows, ALPHA, SPEC)


def next_pairs(problem, seed=5):
    return next(draw_pairs(problem.rows, 200, torch.Generator().manual_seed(seed)))


def test_kernel_of_sums_by_hand(rows):
    x, y = rows[:5], rows[5:10]
    sums = torch.nn.functional.pad(x + y, (0, 1), value=2.0)
    expected = torch.exp(-(x - y).square().sum(dim=1) / (2 * ALPHA**2))
    torch.testing.assert_close(kernel_of_sums(sums, ALPHA), expected, rtol=1e-4, atol=1e-6)


def test_draw_filters_are_unbiased(rows):
    """With very many filters the Monte-Carlo features give the kernel itself."""
    problem = pose_problem(rows[:, :3] / rows[:, :3].norm(dim=1, keepdim=True), 1.0, SPEC)
    filters = draw_filters(problem, 200_000, seed=0)
    sums = problem.validation_sums[:20]
    predicted = torch.exp(sums @ filters.T).sum(dim=1)
    torch.testing.assert_close(predicted, kernel_of_sums(sums, 1.0), rtol=0.1, atol=0.02)


def test_precondition_is_the_squared_power_minus_one_half(rows):
    padded = torch.nn.functional.pad(rows, (0, 1), value=1.0).double()
    values, vectors = torch.linalg.eigh(padded.T @ padded / len(padded))
    root = (vectors * (values + values.mean()) ** -0.5) @ vectors.T
    torch.testing.assert_close(precondition(padded), root @ root)
    assert float(values.mean()) == pytest.approx(2 / 11, rel=1e-5)


def test_take_step_is_the_papers_step_in_z(problem):
    """Z ← Z − rate · ∂/∂Z with V = Z R, by automatic differentiation in float64."""
    filters, sums = draw_filters(problem, 16, seed=0), next_pairs(problem)
    values, vectors = torch.linalg.eigh(torch.linalg.inv(problem.preconditioner.double()))
    root, inverse = (vectors * values**-0.5) @ vectors.T, (vectors * values**0.5) @ vectors.T
    z = (filters.double() @ inverse).requires_grad_()
    errors = torch.exp(sums.double() @ (z @ root).T).sum(dim=1) - kernel_of_sums(sums.double(), ALPHA)
    (errors.square().mean() / problem.scale).backward()
    expected = (z.detach() - 0.1 * z.grad) @ root
    stepped = take_step(problem, filters, sums, 0.1)
    torch.testing.assert_close(stepped.double(), expected, rtol=1e-3, atol=1e-4)


def test_descend_lowers_the_error_and_reports_it(problem):
    start, seen = draw_filters(problem, 32, seed=0), []
    found = descend(problem, start, 0.25, SPEC, watch=lambda step, error, _: seen.append((step, error)))
    assert [step for step, _ in seen] == [100, 200, 300]
    assert measure_error(problem, found) < 0.5 * measure_error(problem, start)


def test_descend_goes_back_when_the_rate_is_too_large(problem, caplog):
    start = draw_filters(problem, 32, seed=0)
    spec = CknTrainingSpec(**{**SPEC.__dict__, "sgd_iterations": 2000})
    found = descend(problem, start, 64.0, spec)
    assert "half the rate" in caplog.text
    assert measure_error(problem, found) < 1


def test_try_rate_is_infinite_when_it_diverges(problem):
    start = draw_filters(problem, 32, seed=0)
    assert try_rate(problem, start, 1e4, SPEC) == math.inf
    assert try_rate(problem, start, 0.25, SPEC) < 1


@pytest.mark.parametrize(
    ("error", "best", "expected"),
    [
        (0.2, 0.3, True),
        (2.0, 0.3, False),
        (math.nan, 1.0, False),
        (math.inf, 1.0, False),
        (0.99, 0.5, False),
        (0.99, 1.0, True),
    ],
)
def test_is_sound(problem, error, best, expected):
    assert is_sound(problem, draw_filters(problem, 32, seed=0), error, best) is expected


def test_dead_filters_are_told_from_an_error_that_happens_to_be_one(problem):
    """Predicting zero is an error of 1; so is predicting far too much, on the way down."""
    start = draw_filters(problem, 32, seed=0)
    low, high = -0.7, 10.0  # of all biases: less than the target, far too much
    assert measure_error(problem, shifted(start, low)) < 1 < measure_error(problem, shifted(start, high))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if measure_error(problem, shifted(start, middle)) < 1 else (low, middle)
    alive, dead = shifted(start, low), shifted(start, -20.0)
    assert measure_energy(problem, alive) > 0.5
    for filters, expected in ((alive, True), (dead, False)):
        error = measure_error(problem, filters)
        assert error == pytest.approx(1, abs=1e-3)
        assert is_sound(problem, filters, error, 1.0) is expected


def shifted(filters: torch.Tensor, shift: float) -> torch.Tensor:
    moved = filters.clone()
    moved[:, -1] += shift
    return moved


def test_choose_rate_takes_the_lowest_error():
    assert choose_rate([1.0, 0.5, 0.25], [math.inf, 0.3, 0.4]) == 0.5
    with pytest.raises(ValueError, match=r"all rates from 1 to 0\.5 diverge or collapse"):
        choose_rate([1.0, 0.5], [math.inf, math.inf])


def test_fit_sgd_returns_weights_and_bias(rows):
    weights, bias = fit_sgd(rows, 24, ALPHA, SPEC)
    assert weights.shape == (24, 10)
    assert bias.shape == (24,)
    again = fit_sgd(rows, 24, ALPHA, SPEC)
    assert np.array_equal(weights, again[0])
