"""Run these on the first machine with a GPU: pytest tests/gpu."""

import cv2
import numpy as np
import pytest
import torch

from ckn_scale.core.network_training import Recipe
from ckn_scale.evaluate.train_networks import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


@pytest.mark.parametrize("name", ["philippnet-rome", "deepcompare-siam2stream", "deepcompare-2ch"])
def test_networks_trained_on_a_gpu_have_the_same_bytes_each_time(tmp_path, name):
    rng = np.random.default_rng(0)
    for point in "abc":
        (tmp_path / "patches" / point).mkdir(parents=True)
        for view in range(3):
            pixels = rng.integers(0, 255, (64, 64, 3), np.uint8)
            cv2.imwrite(str(tmp_path / "patches" / point / f"{view}.png"), pixels)
    for out in ("once", "again"):
        train(name, tmp_path / "patches", tmp_path / out, Recipe(steps=5, batch_size=16), device="cuda")
    assert (tmp_path / "once").read_bytes() == (tmp_path / "again").read_bytes()
