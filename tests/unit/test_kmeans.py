"""k-means on points and on the sphere."""

import pytest
import torch

from ckn_scale.core.kmeans import add_by_product, add_to_clusters, cluster


def unit_rows(count, dim, seed=0):
    rows = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows)


def test_cluster_on_a_sphere_finds_separate_groups():
    centres = torch.eye(4)
    noise = 0.05 * torch.randn(400, 4, generator=torch.Generator().manual_seed(1))
    rows = torch.nn.functional.normalize(centres.repeat(100, 1) + noise)
    found = cluster(rows, 4, iterations=10, seed=0, spherical=True)
    torch.testing.assert_close(torch.linalg.vector_norm(found, dim=1), torch.ones(4))
    assert (found @ centres.T).max(dim=1).values.min() > 0.99
    assert len((found @ centres.T).argmax(dim=1).unique()) == 4


def test_cluster_on_a_sphere_is_deterministic():
    rows = unit_rows(500, 6)
    first = cluster(rows, 8, iterations=3, seed=1, spherical=True)
    assert torch.equal(first, cluster(rows, 8, iterations=3, seed=1, spherical=True))
    assert not torch.equal(first, cluster(rows, 8, iterations=3, seed=2, spherical=True))


def test_cluster_on_a_sphere_restarts_empty_clusters():
    rows = torch.cat([torch.tensor([[1.0, 0, 0]]).repeat(50, 1), torch.eye(3)])
    found = cluster(rows, 3, iterations=5, seed=0, spherical=True)
    assert (found @ torch.eye(3)).max(dim=0).values.min() > 0.99


def test_cluster_on_a_sphere_refuses_too_few_points():
    with pytest.raises(ValueError, match="5 clusters need as many points, got 4"):
        cluster(unit_rows(4, 3), 5, iterations=1, seed=0, spherical=True)


def test_add_by_product_is_the_sum_of_each_cluster():
    """What CUDA uses; on a CPU `index_add_` has a fixed order already."""
    generator = torch.Generator().manual_seed(0)
    rows, clusters = torch.randn(500, 7, generator=generator), torch.randint(9, (500,), generator=generator)
    added, expected = torch.ones(9, 7), torch.ones(9, 7)
    add_by_product(added, clusters, rows)
    add_to_clusters(expected, clusters, rows)
    torch.testing.assert_close(added, expected)
    torch.testing.assert_close(expected[3], 1 + rows[clusters == 3].sum(dim=0))
