import cv2
import numpy as np
import pytest
import torch
from ckn_cases import SIDE, cut_patches

from ckn_scale.core.ckn_inputs import (
    InputSubpatches,
    blur_matrix,
    convert_to_luma,
    differentiate,
    half_whitening,
    mix_sums,
    opposite_basis,
    shrink_patches,
    split_colours,
)
from ckn_scale.core.specs import CknSpec, LayerSpec


@pytest.fixture(scope="module")
def patches():
    return cut_patches(6)


def extract(spec, patches):
    inputs = InputSubpatches(spec, patches.shape[1], len(patches), torch.device("cpu"))
    rows = inputs(patches)[:, :, : inputs.count]
    return rows.numpy() if inputs.basis is None else (inputs.basis.T @ rows).numpy()


def test_convert_to_luma_weights_the_colours():
    patches = np.zeros((1, 4, 4, 3), np.uint8)
    patches[..., 1] = 100
    assert np.all(convert_to_luma(patches) == 59)
    assert convert_to_luma(patches[:0]).shape == (0, 4, 4)
    assert convert_to_luma(patches[..., 0]).shape == (1, 4, 4)


def test_split_colours_moves_the_channels_first(patches):
    assert np.array_equal(split_colours(patches), np.moveaxis(patches, 3, 0))


def test_differentiate_is_numpys_gradient(patches):
    luma = convert_to_luma(patches).astype(np.float32)
    out = torch.empty(len(luma), 2, SIDE, SIDE)
    differentiate(torch.from_numpy(luma), out)
    np.testing.assert_allclose(out[:, 0].numpy(), np.gradient(luma, axis=2))
    np.testing.assert_allclose(out[:, 1].numpy(), np.gradient(luma, axis=1))


def test_blur_matrix_is_opencvs_blur(patches):
    luma = convert_to_luma(patches)[0].astype(np.float32)
    blur = blur_matrix(SIDE, 1.5)
    expected = cv2.GaussianBlur(luma, (13, 13), 1.5, borderType=cv2.BORDER_REPLICATE)
    np.testing.assert_allclose(blur @ luma @ blur.T, expected, atol=0.01)


def test_input_subpatches_of_raw_are_channel_fastest(patches):
    rows = extract(CknSpec("raw", (LayerSpec(5, 8, 5),)), patches)
    assert rows.shape == (6, 75, 47 * 47)
    expected = patches[2, 10:15, 20:25].ravel() / 255
    np.testing.assert_allclose(rows[2, :, 10 * 47 + 20], expected, rtol=1e-6)


def test_input_subpatches_with_a_step_are_every_second_one(patches):
    layers = (LayerSpec(5, 8, 4),)
    every = extract(CknSpec("raw", layers), patches).reshape(6, 75, 47, 47)
    thinned = extract(CknSpec("raw", layers, position_step=2), patches).reshape(6, 75, 24, 24)
    assert np.array_equal(thinned, every[:, :, ::2, ::2])


def test_input_subpatches_of_grad_with_blur(patches):
    spec = CknSpec("grad", (LayerSpec(1, 8, 4),), input_blur_px=1.0)
    rows = extract(spec, patches)
    blur = blur_matrix(SIDE, 1.0)
    luma = blur @ convert_to_luma(patches)[3].astype(np.float32) @ blur.T / 255
    np.testing.assert_allclose(rows[3, 1].reshape(SIDE, SIDE), np.gradient(luma, axis=0), atol=1e-6)


def test_white_is_the_half_whitening_of_centred_colours(patches):
    """Each step written out in float64: mean colour, mean patch, covariance, fourth root."""
    rows = extract(CknSpec("white", (LayerSpec(3, 8, 3),)), patches)
    raw = extract(CknSpec("raw", (LayerSpec(3, 8, 3),)), patches)[1].astype(np.float64)
    centred = raw.reshape(9, 3, -1) - raw.reshape(9, 3, -1).mean(axis=0)
    centred = centred.reshape(27, -1)
    centred -= centred.mean(axis=1, keepdims=True)
    values, vectors = np.linalg.eigh(centred @ centred.T / centred.shape[1])
    scales = np.where(values > 1e-5 * values[-1], np.maximum(values, 1e-30) ** -0.25, 0)
    expected = (vectors * scales) @ vectors.T @ centred
    np.testing.assert_allclose(rows[1], expected, atol=2e-3 * np.abs(expected).max())


def test_white_ignores_a_change_of_colour_and_scales_with_contrast(patches):
    spec = CknSpec("white", (LayerSpec(3, 8, 3),))
    quarter = (patches // 4) * 2
    np.testing.assert_allclose(extract(spec, quarter + 40), extract(spec, quarter), atol=1e-3)
    half = extract(spec, quarter // 2)
    np.testing.assert_allclose(half * np.sqrt(2), extract(spec, quarter), atol=1e-3)


def test_white_of_a_constant_patch_is_zero():
    patches = np.full((3, SIDE, SIDE, 3), 7, np.uint8)
    patches[1] = [200, 13, 77]
    patches[2] = 255
    assert not np.any(extract(CknSpec("white", (LayerSpec(3, 8, 3),)), patches))


@pytest.mark.parametrize("num_pixels", [4, 9])
def test_opposite_basis_is_orthonormal_and_blind_to_the_mean_colour(num_pixels):
    basis = opposite_basis(num_pixels)
    np.testing.assert_allclose(basis @ basis.T, np.eye(3 * num_pixels - 3), atol=1e-6)
    np.testing.assert_allclose(basis @ np.tile([0.2, 0.5, 0.9], num_pixels), 0, atol=1e-6)


def test_opposite_basis_has_differences_first():
    root = np.sqrt(0.5)
    first = opposite_basis(4)[0]
    np.testing.assert_allclose(first, [root, 0, 0, 0, 0, 0, 0, 0, 0, -root, 0, 0], atol=1e-6)


def test_mix_sums_makes_the_second_half_of_the_basis():
    pixels = np.random.default_rng(0).random((9, 3))
    halved = pixels / np.sqrt(2)
    sums = np.concatenate([halved[:4] + halved[:4:-1], halved[4:5]]).ravel()
    expected = opposite_basis(9)[12:] @ pixels.ravel()
    np.testing.assert_allclose(mix_sums(9) @ sums, expected, atol=1e-6)


def test_half_whitening_is_the_inverse_fourth_root():
    matrix = torch.diag(torch.tensor([16.0, 1.0, 1e-9]))[None]
    expected = torch.diag(torch.tensor([0.5, 1.0, 0.0]))[None]
    torch.testing.assert_close(half_whitening(matrix), expected)
    assert not half_whitening(torch.zeros(2, 3, 3)).any()


@pytest.mark.parametrize("factor", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("shape", [(3, 17, 17, 3), (3, 17, 17), (0, 17, 17, 3)])
def test_shrunk_patches_are_means_of_squares(shape, factor):
    patches = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    small, side = shrink_patches(patches, factor), 17 // factor
    used = patches[:, : side * factor, : side * factor]
    squares = used.reshape(shape[0], side, factor, side, factor, *shape[3:])
    assert small.shape == (shape[0], side, side, *shape[3:])
    assert np.abs(small - squares.mean(axis=(2, 4))).max(initial=0) <= 0.5
