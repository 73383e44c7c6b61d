import json
from dataclasses import replace

import cv2
import numpy as np
import pytest
from ckn_cases import SIDE, SMALL, TRAINING, cut_patches

from ckn_scale.core.ckn import encode_patches
from ckn_scale.core.ckn_model import Ckn
from ckn_scale.core.ckn_training import train_ckn
from ckn_scale.core.descriptors.catalogue import load_descriptor
from ckn_scale.core.descriptors.ckn import CknNetwork
from ckn_scale.core.descriptors.network import ProjectedDescriptor
from ckn_scale.core.descriptors.sift import SiftNetwork, cell_matrix, normalise_histograms
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.pca import fit_projection
from ckn_scale.core.specs import ProjectionSpec


@pytest.fixture(scope="module")
def patches():
    return cut_patches(200)


def train(patches, channel, *, keep_last_factor, power=1.0):
    training = replace(TRAINING, keep_last_factor=keep_last_factor)
    ckn = train_ckn(patches, SMALL[channel], training)
    ckn = Ckn(replace(ckn.spec, descriptor_power=power), SIDE, ckn.layers)
    return ckn, fit_projection(encode_patches(ckn, patches), ProjectionSpec(dim=32, whitening=0.5))


@pytest.mark.parametrize("channel", ["grad", "white", "raw"])
@pytest.mark.parametrize("keep_last_factor", [False, True])
def test_folded_descriptors_equal_the_unfolded_ones(patches, channel, keep_last_factor):
    """One matrix and a scalar norm give what encoding, L2 and projection give one after another."""
    ckn, projection = train(patches, channel, keep_last_factor=keep_last_factor)
    found = ProjectedDescriptor(CknNetwork(ckn, batch_size=16), projection).describe(patches[:20])
    unfolded = encode_patches(ckn, patches[:20])
    unit = unfolded / np.linalg.norm(unfolded, axis=1, keepdims=True)
    expected = unit.astype(np.float64) @ projection.matrix.T - projection.offset
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_a_power_of_the_descriptor_is_not_folded(patches):
    ckn, projection = train(patches, "white", keep_last_factor=True, power=0.5)
    found = ProjectedDescriptor(CknNetwork(ckn), projection).describe(patches[:10])
    np.testing.assert_allclose(found, projection.apply(encode_patches(ckn, patches[:10])), atol=1e-4)


@pytest.fixture(scope="module")
def descriptor(patches):
    ckn, projection = train(patches, "grad", keep_last_factor=False)
    return ProjectedDescriptor(CknNetwork(ckn, batch_size=32), projection)


def test_describe_gives_unit_rows_and_zeros_for_blank_patches(descriptor, patches):
    rows = descriptor.describe(np.concatenate([patches[:3], np.full((1, SIDE, SIDE, 3), 50, np.uint8)]))
    assert rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), [1, 1, 1, 0], rtol=1e-5)


def test_describe_a_row_depends_on_its_patch_alone(descriptor, patches):
    rows = descriptor.describe(patches)
    assert np.array_equal(descriptor.describe(patches[::-1]), rows[::-1])
    assert np.array_equal(descriptor.describe(patches[123:124]), rows[123:124])


def test_describe_nothing(descriptor, patches):
    assert descriptor.describe(patches[:0]).shape == (0, descriptor.dim)


def test_descriptor_arrays_round_trip(descriptor, patches):
    arrays, meta = descriptor.to_part()
    meta = json.loads(json.dumps(meta))
    again = load_descriptor(ModelPart(arrays, meta), batch_size=32, device="cpu", dtype="float32")
    assert np.array_equal(again.describe(patches[:5]), descriptor.describe(patches[:5]))
    assert again.name == "ckn-grad"


def test_descriptor_refuses_a_projection_of_another_size(descriptor, patches):
    other = fit_projection(np.random.default_rng(0).normal(size=(50, 7)), ProjectionSpec(dim=4))
    with pytest.raises(ValueError, match="takes 7 dims, ckn-grad gives 216"):
        ProjectedDescriptor(descriptor.network, other)


@pytest.mark.parametrize("descriptor_name", ["descriptor", "sift", "rootsift"])
def test_all_descriptors_follow_the_protocol(request, descriptor_name, patches):
    known = {"sift": SiftNetwork(), "rootsift": SiftNetwork(root=True)}
    one = known.get(descriptor_name) or request.getfixturevalue(descriptor_name)
    assert isinstance(one.name, str)
    assert one.describe(patches[:2]).shape == (2, one.dim)


def test_cell_matrix_shares_every_inner_pixel_fully():
    matrix = cell_matrix(SIDE)
    assert matrix.shape == (4, SIDE)
    np.testing.assert_allclose(matrix.sum(axis=0)[7:-7], 1, rtol=1e-6)
    np.testing.assert_allclose(matrix, matrix[::-1, ::-1], atol=1e-6)


def test_sift_of_a_ramp_has_one_orientation():
    ramp = np.tile(np.arange(0, 4 * SIDE, 4, dtype=np.uint8), (1, SIDE, 1))
    histogram = SiftNetwork(smoothing_px=0).describe(ramp).reshape(16, 8)
    assert np.all(histogram[:, 0] > 0)
    assert not histogram[:, 2:7].any()


def test_sift_turns_with_the_patch(patches):
    """A quarter turn moves cells and orientations, nothing else."""
    upright = SiftNetwork().describe(patches[:5]).reshape(5, 4, 4, 8)
    turned = SiftNetwork().describe(np.rot90(patches[:5], axes=(1, 2)).copy()).reshape(5, 4, 4, 8)
    expected = np.roll(np.rot90(upright, axes=(1, 2)), -2, axis=3)
    np.testing.assert_allclose(turned, expected, atol=1e-5)


def test_sift_ignores_brightness_and_contrast(patches):
    dull = patches[:5] // 2
    np.testing.assert_allclose(SiftNetwork().describe(dull + 60), SiftNetwork().describe(dull), atol=0.02)


def test_rootsift_is_the_root_of_the_shares(patches):
    plain = SiftNetwork().describe(patches[:5])
    expected = np.sqrt(plain / plain.sum(axis=1, keepdims=True))
    np.testing.assert_allclose(SiftNetwork(root=True).describe(patches[:5]), expected, atol=1e-5)


def test_normalise_histograms_clips_large_entries():
    import torch

    histogram = torch.zeros(1, 128)
    histogram[0, 0], histogram[0, 1:] = 100.0, 1.0
    unit = normalise_histograms(histogram, root=False)[0]
    assert float(unit[0] / unit[1]) == pytest.approx(0.2 * np.sqrt(100**2 + 127), rel=1e-3)


def test_sift_of_blank_patches_and_of_nothing():
    assert not SiftNetwork(root=True).describe(np.full((2, SIDE, SIDE, 3), 9, np.uint8)).any()
    assert SiftNetwork().describe(np.empty((0, SIDE, SIDE, 3), np.uint8)).shape == (0, 128)


def test_sift_refuses_bad_settings_and_patches(patches):
    with pytest.raises(ValueError, match="window_sigma must be > 0, got 0"):
        SiftNetwork(window_sigma=0)
    with pytest.raises(ValueError, match="smoothing_px must be ≥ 0, got -1"):
        SiftNetwork(smoothing_px=-1)
    with pytest.raises(ValueError, match="got float32"):
        SiftNetwork().describe(patches[:1].astype(np.float32))


def test_sift_finds_the_right_patch_at_least_as_often_as_opencvs(patches):
    """The same patches, disturbed: our SIFT is no straw man."""
    rng = np.random.default_rng(0)
    turn = cv2.getRotationMatrix2D((SIDE // 2, SIDE // 2), 25, 1.25)
    disturbed = np.array(
        [cv2.warpAffine(p, turn, (SIDE, SIDE), borderMode=cv2.BORDER_REPLICATE) for p in patches]
    )
    noisy = np.clip(disturbed + rng.normal(0, 30, disturbed.shape), 0, 255).astype(np.uint8)
    ours = count_hits(SiftNetwork().describe(patches), SiftNetwork().describe(noisy))
    theirs = count_hits(describe_by_opencv(patches), describe_by_opencv(noisy))
    assert ours >= theirs


def count_hits(left, right):
    return int(np.sum(np.argmax(left @ right.T, axis=1) == np.arange(len(left))))


def describe_by_opencv(patches):
    sift, rows = cv2.SIFT_create(), []
    for patch in patches:
        grey = cv2.copyMakeBorder(
            cv2.cvtColor(patch, cv2.COLOR_RGB2GRAY), 30, 30, 30, 30, cv2.BORDER_REPLICATE
        )
        centre = 30.0 + SIDE // 2
        _, row = sift.compute(grey, [cv2.KeyPoint(centre, centre, 2 * SIDE / 12, 0.0)])
        rows.append(row[0] / max(np.linalg.norm(row[0]), 1e-9))
    return np.array(rows)
