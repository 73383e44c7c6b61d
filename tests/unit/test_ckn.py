from dataclasses import replace

import numpy as np
import pytest
import torch
from ckn_cases import SIDE, SMALL, TRAINING, cut_patches, pooling_matrix

from ckn_scale.core.ckn import CknEncoder, FirstLayer, encode_patches, pad_batches, parse_dtype
from ckn_scale.core.ckn_inputs import InputSubpatches, convert_to_luma, shrink_patches
from ckn_scale.core.ckn_model import Ckn, CknLayer, input_window, layer_sides
from ckn_scale.core.ckn_training import train_ckn
from ckn_scale.core.specs import CknSpec, LayerSpec


@pytest.fixture(scope="module")
def patches():
    return cut_patches(150)


@pytest.fixture(scope="module")
def ckns(patches):
    training = replace(TRAINING, keep_last_factor=True)
    return {channel: train_ckn(patches, spec, training) for channel, spec in SMALL.items()}


@pytest.fixture(params=["grad", "white", "raw"])
def ckn(request, ckns):
    return ckns[request.param]


def encode_slowly(ckn: Ckn, patch: np.ndarray) -> np.ndarray:
    """The definition, position by position, in float64; only the input maps are shared."""
    spec = ckn.spec
    if spec.channel == "grad":
        luma = convert_to_luma(patch[None])[0] / 255.0
        subpatches = np.stack([np.gradient(luma, axis=1), np.gradient(luma, axis=0)], 2)[:, :, None]
    else:
        inputs = InputSubpatches(spec, SIDE, 1, torch.device("cpu"))
        rows = inputs(patch[None])[0, :, : inputs.count].double().numpy()
        rows = rows if inputs.basis is None else inputs.basis.double().numpy().T @ rows
        side = len(inputs.positions)
        subpatches = rows.T.reshape(side, side, -1)
    window = input_window(spec, SIDE)
    window = np.ones(subpatches.shape[:2]) if window is None else window
    maps = pool_slowly(ckn.layers[0], subpatches, spec.norm_power, window)
    for layer in ckn.layers[1:]:
        k, side = layer.spec.patch_px, len(maps) - layer.spec.patch_px + 1
        subpatches = np.array(
            [[maps[y : y + k, x : x + k].ravel() for x in range(side)] for y in range(side)]
        )
        maps = pool_slowly(layer, subpatches, 1.0, np.ones((side, side)))
    return maps.ravel()


def pool_slowly(layer: CknLayer, subpatches: np.ndarray, power: float, window: np.ndarray) -> np.ndarray:
    side = len(subpatches)
    flat = subpatches.reshape(side * side, -1)
    norms = np.linalg.norm(flat, axis=1, keepdims=True)
    unit = flat / np.maximum(norms, 1e-5)
    responses = np.exp(unit @ layer.weights.T + layer.bias) * np.where(norms > 0, norms**power, 0)
    responses = responses.reshape(side, side, -1) * window[:, :, None]
    pooling = pooling_matrix(side, layer.spec.subsampling)
    pooled = np.einsum("iy,jx,yxp->ijp", pooling, pooling, responses)
    return pooled if layer.factor is None else pooled @ layer.factor.T


def test_encode_patches_equals_the_definition(ckn, patches):
    expected = np.array([encode_slowly(ckn, patch) for patch in patches[:3]])
    rows = encode_patches(ckn, patches[:3], batch_size=4)
    assert rows.shape == (3, ckn.dim)
    np.testing.assert_allclose(rows, expected, atol=2e-4 * np.abs(expected).max())


def test_encode_patches_with_three_layers_equals_the_definition(patches):
    spec = CknSpec("grad", (LayerSpec(1, 4, 2), LayerSpec(3, 8, 2), LayerSpec(2, 6, 3)))
    ckn = train_ckn(patches[:60], spec, TRAINING)
    assert ckn.layers[1].factor is not None
    expected = encode_slowly(ckn, patches[0])
    np.testing.assert_allclose(encode_patches(ckn, patches[:1])[0], expected, atol=1e-4 * expected.max())


def test_encode_patches_of_nothing(ckn, patches):
    assert encode_patches(ckn, patches[:0], batch_size=4).shape == (0, ckn.dim)


def test_encode_patches_of_zero_patches_is_zero(ckn):
    assert not encode_patches(ckn, np.zeros((2, SIDE, SIDE, 3), np.uint8)).any()


@pytest.mark.parametrize("channel", ["grad", "white"])
def test_encode_patches_of_constant_patches_is_zero(ckns, channel):
    assert not encode_patches(ckns[channel], np.full((2, SIDE, SIDE, 3), 90, np.uint8)).any()


def test_encode_patches_of_constant_patches_is_zero_with_blur(ckns):
    ckn = ckns["grad"]
    blurred = Ckn(replace(ckn.spec, input_blur_px=1.3), SIDE, ckn.layers)
    assert not encode_patches(blurred, np.full((2, SIDE, SIDE, 3), 90, np.uint8)).any()


@pytest.mark.parametrize("device_path", ["table", "filters"])
def test_a_network_that_shrinks_is_the_same_on_shrunk_patches(ckn, patches, device_path):
    """`filters`: a blur too small to change a pixel keeps grad from its table."""
    blur = 1e-3 if device_path == "filters" else 0.0
    plain = Ckn(replace(ckn.spec, input_blur_px=blur), SIDE // 2, ckn.layers)
    shrinking = Ckn(replace(plain.spec, shrink=2), SIDE, ckn.layers)
    small = shrink_patches(patches[:5], 2)
    assert small.shape == (5, SIDE // 2, SIDE // 2, 3)
    assert shrinking.dim == plain.dim < ckn.dim
    assert np.array_equal(encode_patches(shrinking, patches[:5]), encode_patches(plain, small))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_depends_on_its_patch_alone(ckn, patches, threads):
    """Bytes are equal whatever the position, the neighbours and the number of rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = encode_patches(ckn, patches[:50], batch_size=32)
        order = np.random.default_rng(0).permutation(50)
        assert np.array_equal(encode_patches(ckn, patches[order], batch_size=32), rows[order])
        among_blank = np.zeros_like(patches[:6])
        among_blank[5] = patches[37]
        assert np.array_equal(encode_patches(ckn, among_blank, batch_size=32)[5], rows[37])
    finally:
        torch.set_num_threads(before)


def test_tabulated_orientations_equal_the_computed_ones(ckns, patches):
    ckn = ckns["grad"]
    encoder = CknEncoder(ckn, batch_size=8)
    computed = FirstLayer(ckn.spec, ckn.layers[0], SIDE, 8, torch.empty(0))
    expected = computed(patches[:8])
    torch.testing.assert_close(encoder.first(patches[:8]), expected, rtol=1e-4, atol=1e-6)


def test_tabulated_orientations_equal_the_computed_ones_at_extreme_borders():
    patches = np.zeros((1, SIDE, SIDE), np.uint8)
    patches[:, ::2, 1::2] = 255
    spec = replace(SMALL["grad"], layers=SMALL["grad"].layers[:1], position_step=2)
    ckn = train_ckn(cut_patches(2), spec, TRAINING)
    computed = FirstLayer(spec, ckn.layers[0], SIDE, 1, torch.empty(0))
    torch.testing.assert_close(
        CknEncoder(ckn, batch_size=1).first(patches), computed(patches), rtol=1e-4, atol=1e-6
    )


def test_grad_takes_grey_patches(ckns, patches):
    grey = convert_to_luma(patches[:4])
    assert np.array_equal(encode_patches(ckns["grad"], grey), encode_patches(ckns["grad"], patches[:4]))


def test_descriptor_power_is_applied_last(ckns, patches):
    ckn = ckns["white"]
    rooted = Ckn(replace(ckn.spec, descriptor_power=0.5), SIDE, ckn.layers)
    rows = encode_patches(ckn, patches[:4])
    expected = np.sign(rows) * np.sqrt(np.abs(rows))
    np.testing.assert_allclose(encode_patches(rooted, patches[:4]), expected, rtol=1e-5)


@pytest.mark.parametrize("channel", ["grad", "white"])
def test_half_precision_keeps_the_direction(ckns, patches, channel):
    exact = encode_patches(ckns[channel], patches[:8])
    half = encode_patches(ckns[channel], patches[:8], dtype="bfloat16")
    cosines = np.sum(exact * half, axis=1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(half, axis=1)
    assert cosines.min() > 0.99


def test_half_precision_is_refused_for_a_narrow_kernel(ckns, patches):
    with pytest.raises(ValueError, match=r"too small for torch\.float16: use float32 for raw"):
        encode_patches(ckns["raw"], patches[:1], dtype=torch.float16)


def test_arrays_round_trip(ckn, patches):
    again = Ckn.from_part(ckn.to_part())
    assert np.array_equal(encode_patches(again, patches[:4]), encode_patches(ckn, patches[:4]))


def test_encode_patches_refuses_other_shapes_and_types(ckns, patches):
    with pytest.raises(
        ValueError, match=r"white takes uint8 patches \('N', 51, 51, 3\), got uint8 \(2, 51, 51\)"
    ):
        encode_patches(ckns["white"], patches[:2, :, :, 0])
    with pytest.raises(ValueError, match="got float32"):
        encode_patches(ckns["grad"], patches[:2].astype(np.float32))
    with pytest.raises(ValueError, match="batch_size must be ≥ 1, got 0"):
        encode_patches(ckns["grad"], patches[:2], batch_size=0)


def test_parse_dtype_names_what_it_knows():
    assert parse_dtype("float16") == torch.float16
    with pytest.raises(ValueError, match="got float8"):
        parse_dtype("float8")


def test_pad_batches_fills_the_last_one():
    batches = list(pad_batches(np.arange(5), 3))
    assert [(start, batch.tolist()) for start, batch in batches] == [(0, [0, 1, 2]), (3, [3, 4, 0])]


def test_layer_sides_match_the_encoded_maps(ckn, patches):
    encoder = CknEncoder(ckn, batch_size=2)
    side = layer_sides(ckn.spec, SIDE)[-1][1]
    assert encoder.encode_group(patches[: encoder.group]).shape[1:3] == (side, side)
