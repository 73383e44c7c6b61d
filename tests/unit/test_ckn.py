import numpy as np
import pytest
from ckn_cases import PAPER, SIDE, SMALL, TRAINING, cut_patches

from ckn_scale.core.ckn import Ckn, encode_patches
from ckn_scale.core.ckn_training import train_ckn


@pytest.fixture(scope="module")
def patches():
    return cut_patches(150)


@pytest.fixture(scope="module", params=["grad", "white", "raw"])
def ckn(request, patches):
    return train_ckn(patches, SMALL[request.param], TRAINING)


@pytest.mark.parametrize(("channel", "dim"), [("raw", 41_472), ("white", 32_768), ("grad", 50_176)])
def test_dim_of_the_papers_networks(channel, dim):
    assert Ckn(PAPER[channel], SIDE, ()).dim == dim


def test_encode_patches_shape_and_finite(ckn, patches):
    rows = encode_patches(ckn, patches[:5], batch_size=4)
    assert rows.shape == (5, ckn.dim)
    assert np.isfinite(rows).all()


def test_encode_patches_empty(ckn, patches):
    assert encode_patches(ckn, patches[:0], batch_size=4).shape == (0, ckn.dim)


def test_arrays_round_trip(ckn, patches):
    arrays, meta = ckn.to_arrays()
    again = Ckn.from_arrays(arrays, meta)
    expected = encode_patches(ckn, patches[:4], batch_size=4)
    assert np.array_equal(encode_patches(again, patches[:4], batch_size=4), expected)
