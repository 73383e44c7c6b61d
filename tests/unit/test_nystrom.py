import numpy as np
import pytest
import torch

from ckn_scale.core.ckn_training import (
    add_by_product,
    add_to_clusters,
    cluster_on_sphere,
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


def test_cluster_on_sphere_finds_separate_groups():
    centres = torch.eye(4)
    noise = 0.05 * torch.randn(400, 4, generator=torch.Generator().manual_seed(1))
    rows = torch.nn.functional.normalize(centres.repeat(100, 1) + noise)
    found = cluster_on_sphere(rows, 4, iterations=10, seed=0)
    torch.testing.assert_close(torch.linalg.vector_norm(found, dim=1), torch.ones(4))
    assert (found @ centres.T).max(dim=1).values.min() > 0.99
    assert len((found @ centres.T).argmax(dim=1).unique()) == 4


def test_cluster_on_sphere_is_deterministic():
    rows = unit_rows(500, 6)
    first = cluster_on_sphere(rows, 8, iterations=3, seed=1)
    assert torch.equal(first, cluster_on_sphere(rows, 8, iterations=3, seed=1))
    assert not torch.equal(first, cluster_on_sphere(rows, 8, iterations=3, seed=2))


def test_cluster_on_sphere_restarts_empty_clusters():
    rows = torch.cat([torch.tensor([[1.0, 0, 0]]).repeat(50, 1), torch.eye(3)])
    found = cluster_on_sphere(rows, 3, iterations=5, seed=0)
    assert (found @ torch.eye(3)).max(dim=0).values.min() > 0.99


def test_cluster_on_sphere_refuses_too_few_points():
    with pytest.raises(ValueError, match="5 filters need as many sub-patches, got 4"):
        cluster_on_sphere(unit_rows(4, 3), 5, iterations=1, seed=0)


def test_inverse_root_drops_empty_directions():
    root = inverse_root(np.diag([4.0, 1.0, 1e-12]), 1e-6)
    np.testing.assert_allclose(root, np.diag([0.5, 1, 0]), atol=1e-12)


def test_fit_nystrom_is_exact_on_its_own_centroids():
    rows = unit_rows(6, 4)
    weights, bias, factor = fit_nystrom(rows, 6, 0.7, iterations=2, epsilon=1e-9, seed=0)
    features = np.exp(rows.numpy() @ weights.T + bias) @ factor.T
    expected = kernel(rows @ rows.T, 0.7).numpy()
    np.testing.assert_allclose(features @ features.T, expected, atol=1e-3)


def test_add_by_product_is_the_sum_of_each_cluster():
    """What CUDA uses; on a CPU `index_add_` has a fixed order already."""
    generator = torch.Generator().manual_seed(0)
    rows, clusters = torch.randn(500, 7, generator=generator), torch.randint(9, (500,), generator=generator)
    added, expected = torch.ones(9, 7), torch.ones(9, 7)
    add_by_product(added, clusters, rows)
    add_to_clusters(expected, clusters, rows)
    torch.testing.assert_close(added, expected)
    torch.testing.assert_close(expected[3], 1 + rows[clusters == 3].sum(dim=0))
