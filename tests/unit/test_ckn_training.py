from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from ckn_cases import SIDE, SMALL, TRAINING, cut_patches

from ckn_scale.core.ckn import encode_patches
from ckn_scale.core.ckn_training import (
    Subpatches,
    choose_alpha,
    draw_subpatches,
    fit_layer,
    fit_nystrom,
    inverse_root,
    kernel,
    measure_kernel_error,
    start_ckn,
    train_ckn,
)
from ckn_scale.core.specs import CknSpec, CknTrainingSpec, LayerSpec

GRAD = CknSpec("grad", (LayerSpec(1, 16, 3), LayerSpec(4, 128, 2)))


@pytest.fixture(scope="module")
def patches():
    return cut_patches(300)


@pytest.fixture(scope="module")
def subpatches(patches):
    """Sub-patches of grad's second layer."""
    drawn = draw_subpatches(start_ckn(GRAD, SIDE), GRAD, patches, np.arange(300), 40, seed=0)
    return Subpatches.merge([drawn], 12_000).rows


def test_draw_subpatches_are_unit_rows(subpatches):
    assert subpatches.shape == (12_000, 256)
    np.testing.assert_allclose(np.linalg.norm(subpatches, axis=1), 1, rtol=1e-5)


def test_draw_subpatches_do_not_depend_on_how_patches_are_split(patches):
    ckn, ids = start_ckn(SMALL["white"], SIDE), np.arange(100, 170)
    whole = draw_subpatches(ckn, SMALL["white"], patches[:70], ids, 5, seed=3)
    parts = [
        draw_subpatches(ckn, SMALL["white"], patches[part], ids[part], 5, seed=3)
        for part in np.array_split(np.arange(70), 3)
    ]
    merged = Subpatches.merge(parts[::-1], 200)
    assert np.array_equal(merged.rows, Subpatches.merge([whole], 200).rows)
    assert np.array_equal(merged.priorities, np.sort(whole.priorities)[:200])


def test_draw_subpatches_leave_blank_positions_out(patches):
    blank = np.zeros_like(patches[:2])
    blank[1, :6, :6] = patches[1, :6, :6]
    drawn = draw_subpatches(start_ckn(GRAD, SIDE), GRAD, blank, np.arange(2), 50, seed=0)
    assert 0 < len(drawn.rows) < 50
    assert np.isfinite(drawn.rows).all()


def test_choose_alpha_is_a_quantile_of_distances():
    angles_rad = np.linspace(0.1, 1, 100)
    first = np.tile([[1.0, 0.0]], (100, 1))
    second = np.stack([np.cos(angles_rad), np.sin(angles_rad)], 1)
    alpha = choose_alpha(np.concatenate([first, second]), 0.5)
    assert alpha == pytest.approx(np.median(2 * np.sin(angles_rad / 2)))


def test_choose_alpha_refuses_what_has_no_distances():
    with pytest.raises(ValueError, match="at least two sub-patches, got 1"):
        choose_alpha(np.ones((1, 3)), 0.1)
    with pytest.raises(ValueError, match="all sub-patches are equal"):
        choose_alpha(np.ones((8, 3)), 0.1)


def test_alpha_of_grad_and_white_is_about_a_half(patches, subpatches):
    white = CknSpec("white", (LayerSpec(3, 16, 3),))
    drawn = draw_subpatches(start_ckn(white, SIDE), white, patches, np.arange(300), 40, seed=0)
    assert 0.35 < choose_alpha(subpatches, 0.001) < 0.7
    assert 0.35 < choose_alpha(drawn.rows, 0.001) < 0.7


def test_nystrom_approximates_the_kernel_better_with_more_filters(subpatches):
    alpha = choose_alpha(subpatches, 0.001)
    left, right = subpatches[:4000], subpatches[4000:8000]
    errors = [
        measure_kernel_error(fit_layer(subpatches, LayerSpec(4, count, 2), alpha, TRAINING), left, right)
        for count in (16, 32, 64, 128)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02


def test_train_ckn_is_deterministic_and_drops_the_last_factor(patches):
    ckn = train_ckn(patches, SMALL["white"], TRAINING)
    again = train_ckn(patches, SMALL["white"], TRAINING)
    assert ckn.layers[0].factor is not None
    assert ckn.layers[1].factor is None
    assert np.array_equal(ckn.layers[1].weights, again.layers[1].weights)


def test_train_ckn_learns_the_same_filters_whatever_the_power_of_the_descriptor(patches):
    plain = train_ckn(patches, SMALL["grad"], TRAINING)
    rooted = train_ckn(patches, replace(SMALL["grad"], descriptor_power=0.5), TRAINING)
    assert rooted.spec.descriptor_power == 0.5
    assert np.array_equal(rooted.layers[1].weights, plain.layers[1].weights)


def test_train_ckn_by_sgd_gives_a_network_of_the_same_kind(patches):
    training = CknTrainingSpec(
        solver="sgd",
        num_patches=60,
        num_subpatches=2000,
        sgd_iterations=60,
        sgd_validate_every=20,
        sgd_batch_pairs=100,
        sgd_rate_candidates=16,
    )
    ckn = train_ckn(patches, replace(SMALL["white"], alpha_quantile=0.2), training)
    assert [layer.factor for layer in ckn.layers] == [None, None]
    assert np.isfinite(encode_patches(ckn, patches[:3])).all()


def test_train_ckn_uses_a_sample_of_the_patches(patches):
    few = replace(TRAINING, num_patches=20, num_subpatches=400)
    assert train_ckn(patches, SMALL["grad"], few).layers[1].weights.shape == (24, 128)


def test_train_ckn_refuses_nothing_and_too_little(patches):
    with pytest.raises(ValueError, match="needs patches, got none"):
        train_ckn(patches[:0], SMALL["grad"], TRAINING)
    with pytest.raises(ValueError, match="filters need as many sub-patches"):
        train_ckn(patches[:1], SMALL["grad"], replace(TRAINING, num_subpatches=4))


def unit_rows(count, dim, seed=0):
    rows = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows)


def test_kernel_by_hand():
    x, y = torch.tensor([1.0, 0.0]), torch.tensor([0.6, 0.8])
    expected = torch.exp(-(x - y).square().sum() / (2 * 0.5**2))
    torch.testing.assert_close(kernel(x @ y, 0.5), expected)


def test_inverse_root_drops_empty_directions():
    root = inverse_root(np.diag([4.0, 1.0, 1e-12]), 1e-6)
    np.testing.assert_allclose(root, np.diag([0.5, 1, 0]), atol=1e-12)


def test_fit_nystrom_is_exact_on_its_own_centroids():
    rows = unit_rows(6, 4)
    weights, bias, factor = fit_nystrom(rows, 6, 0.7, iterations=2, epsilon=1e-9, seed=0)
    features = np.exp(rows.numpy() @ weights.T + bias) @ factor.T
    expected = kernel(rows @ rows.T, 0.7).numpy()
    np.testing.assert_allclose(features @ features.T, expected, atol=1e-3)


def test_fit_nystrom_refuses_too_few_subpatches():
    with pytest.raises(ValueError, match="5 filters need as many sub-patches, got 4"):
        fit_nystrom(unit_rows(4, 3), 5, 0.7, iterations=1, epsilon=1e-9, seed=0)
