import json

import numpy as np
import pytest
from ckn_cases import PAPER, SIDE, pooling_matrix

from ckn_scale.core.ckn_model import (
    Ckn,
    count_flops,
    input_window,
    layer_sides,
    make_pooling_taps,
    orientation_layer,
    pooled_side,
    window_weights,
)
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.specs import CknSpec, LayerSpec


def dense(channel):
    first, second = PAPER[channel].layers
    layers = (
        LayerSpec(first.patch_px, first.num_filters, 4),
        LayerSpec(second.patch_px, second.num_filters, 3),
    )
    return CknSpec(channel, layers)


@pytest.mark.parametrize(
    ("spec", "dim"),
    [
        (PAPER["raw"], 41_472),
        (PAPER["white"], 32_768),
        (PAPER["grad"], 50_176),
        (dense("grad"), 9_216),
        (dense("white"), 8_192),
    ],
)
def test_dim_of_the_papers_networks(spec, dim):
    assert Ckn(spec, SIDE, ()).dim == dim


def test_dim_of_the_liberty_network():
    spec = CknSpec("grad", (LayerSpec(1, 6, 8), LayerSpec(4, 1024, 3)))
    assert Ckn(spec, 64, ()).dim == 4096


def test_layer_sides_follow_the_paper():
    assert layer_sides(PAPER["white"], SIDE) == [(49, 16), (15, 8)]


@pytest.mark.parametrize(
    ("side", "subsampling", "expected"), [(47, 5, 9), (49, 3, 16), (14, 2, 7), (5, 1, 5), (1, 9, 0)]
)
def test_pooled_side_counts_centres(side, subsampling, expected):
    assert pooled_side(side, subsampling) == expected


def pool_by_taps(values, taps):
    padded = np.pad(values, taps.padding)
    starts = range(0, taps.count * taps.stride, taps.stride)
    return np.array([padded[start : start + len(taps.weights)] @ taps.weights for start in starts])


def test_make_pooling_taps_by_hand():
    taps = make_pooling_taps(7, 3)  # centres 1 and 4
    expected = np.exp(-(np.arange(-3, 4) ** 2) / 9)
    np.testing.assert_allclose(taps.weights, expected / expected.sum())
    assert (taps.stride, taps.padding, taps.count) == (3, 2, 2)


@pytest.mark.parametrize("subsampling", [1, 2, 3, 4, 5, 8])
def test_make_pooling_taps_equal_the_rule_for_every_side(subsampling):
    rng = np.random.default_rng(0)
    for side in range(2 * subsampling, 60):
        values = rng.random(side)
        expected = pooling_matrix(side, subsampling) @ values
        np.testing.assert_allclose(pool_by_taps(values, make_pooling_taps(side, subsampling)), expected)


def test_make_pooling_taps_of_thinned_positions_leave_the_others_out():
    values = np.random.default_rng(0).random(51)
    matrix = pooling_matrix(51, 4)[:, ::2] * 2
    np.testing.assert_allclose(pool_by_taps(values[::2], make_pooling_taps(51, 4, 2)), matrix @ values[::2])


def test_window_weights():
    weights = window_weights(5, 5, 0.4)
    np.testing.assert_allclose(weights, np.exp(-0.5 * (np.arange(-2, 3) / 2) ** 2), rtol=1e-6)


def test_input_window_is_thinned_like_the_positions():
    layers = (LayerSpec(1, 8, 4),)
    every = input_window(CknSpec("grad", layers, window_sigma=0.3), SIDE)
    thinned = input_window(CknSpec("grad", layers, window_sigma=0.3, position_step=2), SIDE)
    assert np.array_equal(thinned, every[::2, ::2])
    assert input_window(CknSpec("grad", layers), SIDE) is None


def test_orientation_layer_weights_of_the_neighbouring_bins():
    layer = orientation_layer(LayerSpec(1, 16, 3))
    responses = np.exp(layer.weights @ np.array([1, 0]) + layer.bias)
    assert layer.alpha == pytest.approx(0.390, abs=1e-3)
    np.testing.assert_allclose(responses[:4], [1, 0.606, 0.147, 0.0174], rtol=0.02)
    np.testing.assert_allclose(responses[1:8], responses[:8:-1], rtol=1e-4)


def test_orientation_layer_refuses_a_single_direction():
    with pytest.raises(ValueError, match="got 1"):
        orientation_layer(LayerSpec(1, 1, 3))


def test_layer_sides_refuse_patches_that_are_too_small():
    with pytest.raises(ValueError, match="4 px leave nothing"):
        layer_sides(PAPER["raw"], 4)


def test_from_part_refuses_what_does_not_fit():
    ckn = Ckn(CknSpec("grad", (LayerSpec(1, 8, 3),)), SIDE, (orientation_layer(LayerSpec(1, 8, 3)),))
    arrays, meta = ckn.to_part()
    meta = json.loads(json.dumps(meta))
    assert Ckn.from_part(ModelPart(arrays, meta)).spec == ckn.spec
    with pytest.raises(ValueError, match=r"layer0\.bias"):
        Ckn.from_part(ModelPart({"layer0.weights": arrays["layer0.weights"]}, meta))
    with pytest.raises(ValueError, match=r"must be \(8, 2\), got \(7, 2\)"):
        Ckn.from_part(ModelPart({**arrays, "layer0.weights": arrays["layer0.weights"][1:]}, meta))
    with pytest.raises(ValueError, match="as many alphas"):
        Ckn.from_part(ModelPart(arrays, {**meta, "alphas": []}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": ()}, "at least one layer"),
        ({"layers": (LayerSpec(3, 8, 3),)}, "patch_px 1, got 3"),
        ({"alpha_quantile": 1.5}, "got 1.5"),
        ({"position_step": 0}, "position_step must be"),
        ({"shrink": 0}, "shrink must be ≥ 1, got 0"),
        ({"position_step": 2}, "must divide layer one's subsampling 3, got 2"),
        ({"channel": "white"}, "patch_px ≥ 2, got 1"),
    ],
)
def test_ckn_spec_refuses_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        CknSpec(**{"channel": "grad", "layers": (LayerSpec(1, 8, 3),), **settings})


@pytest.mark.parametrize(
    ("channel", "mflop"), [("grad", 102.8), ("white", 16.6 + 118.0 + 8.4 + 7.0), ("raw", 169.7)]
)
def test_count_flops_of_the_papers_networks(channel, mflop):
    assert count_flops(PAPER[channel], SIDE) / 1e6 == pytest.approx(mflop, rel=1e-3)
