"""Run these on the first machine with a GPU: pytest tests/gpu."""

import numpy as np
import pytest
import torch

from ckn_scale.core.ckn import encode_patches
from ckn_scale.core.ckn_training import train_ckn
from ckn_scale.core.kmeans import cluster
from ckn_scale.core.specs import CknSpec, CknTrainingSpec, LayerSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

SPECS = {
    "raw": CknSpec("raw", (LayerSpec(5, 16, 5),), alpha_quantile=0.3),
    "white": CknSpec("white", (LayerSpec(3, 16, 4), LayerSpec(2, 32, 3)), alpha_quantile=0.1),
    "grad": CknSpec("grad", (LayerSpec(1, 8, 4), LayerSpec(4, 32, 3)), norm_power=0.5, window_sigma=0.3),
}
TRAINING = CknTrainingSpec(num_patches=200, num_subpatches=3000)


@pytest.fixture(scope="module")
def patches():
    """Smooth random textures."""
    coarse = np.random.default_rng(0).integers(0, 255, (200, 17, 17, 3), dtype=np.uint8)
    return np.repeat(np.repeat(coarse, 3, axis=1), 3, axis=2)


@pytest.mark.parametrize("channel", ["raw", "white", "grad"])
@pytest.mark.parametrize(("dtype", "cosine"), [("float32", 0.99999), ("float16", 0.999), ("bfloat16", 0.99)])
def test_gpu_descriptors_are_those_of_the_cpu(patches, channel, dtype, cosine):
    if channel == "raw" and dtype != "float32":
        pytest.skip("the narrow kernel of raw needs float32")
    ckn = train_ckn(patches, SPECS[channel], TRAINING)
    expected = encode_patches(ckn, patches[:70], batch_size=32)
    found = encode_patches(ckn, patches[:70], batch_size=32, device="cuda", dtype=dtype)
    norms = np.linalg.norm(expected, axis=1) * np.linalg.norm(found, axis=1)
    assert np.min(np.sum(expected * found, axis=1) / norms) > cosine


@pytest.mark.parametrize("solver", ["nystrom", "sgd"])
def test_training_on_a_gpu(patches, solver):
    training = CknTrainingSpec(
        solver=solver, num_patches=200, num_subpatches=3000, sgd_iterations=200, sgd_validate_every=100
    )
    ckn = train_ckn(patches, SPECS["grad"], training, device="cuda")
    assert np.isfinite(encode_patches(ckn, patches[:3], device="cuda")).all()


def test_clusters_have_equal_bytes_each_time():
    points = torch.nn.functional.normalize(
        torch.randn(100_000, 75, generator=torch.Generator().manual_seed(0))
    )
    found = [cluster(points.cuda(), 256, iterations=5, seed=0, spherical=True).cpu() for _ in range(3)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
