import numpy as np
import pytest
import torch

from ckn_scale.core.ckn_training import (
    fit_nystrom,
    inverse_root,
    kernel,
)


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
