"""Run these on the first machine with a GPU: pytest tests/gpu."""

import numpy as np
import pytest
import torch

from ckn_scale.core.coarse_lists import learn_lists, open_lists
from ckn_scale.core.short_codes import learn_quantiser

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


@pytest.fixture(scope="module")
def rows():
    found = np.random.default_rng(0).standard_normal((3000, 8192)).astype(np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def test_codes_made_on_a_gpu_are_those_of_the_cpu(rows):
    quantiser = learn_quantiser(rows, 0, device="cuda")
    np.testing.assert_array_equal(learn_quantiser(rows, 0, device="cuda").centroids, quantiser.centroids)
    assert np.mean(quantiser.encode(rows, "cuda") == quantiser.encode(rows)) > 0.999


def test_lists_learned_on_a_gpu_are_the_same_each_time_and_hold_what_they_hold_on_the_cpu(rows):
    once, again = (learn_lists(rows.__getitem__, len(rows), 16, 0, device="cuda") for _ in range(2))
    np.testing.assert_array_equal(once, again)
    on_cpu = open_lists(learn_lists(rows.__getitem__, len(rows), 16, 0), 8192)
    assert np.mean(open_lists(once, 8192).search(rows, 1)[1] == on_cpu.search(rows, 1)[1]) > 0.9
