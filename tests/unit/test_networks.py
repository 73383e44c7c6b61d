"""Networks with weights of others: layouts, what comes out of them, wrong files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ckn_cases import cut_patches
from safetensors.numpy import save as save_safetensors
from weight_files import (
    caffe_layout,
    draw_state,
    encode_caffemodel,
    torchvision_layout,
    write_mkd,
    write_tfeat,
)

from ckn_scale.core.descriptors.architectures import ARCHITECTURES, CAFFE_WIDTHS, TORCHVISION_WIDTHS
from ckn_scale.core.descriptors.caffe_files import decode_caffemodel
from ckn_scale.core.descriptors.catalogue import load_network, make_part
from ckn_scale.core.descriptors.convolutional import resampling_matrix
from ckn_scale.core.descriptors.mkd import MkdLayers
from ckn_scale.core.descriptors.network import ProjectedDescriptor
from ckn_scale.core.descriptors.weight_files import decode_weights
from ckn_scale.core.pca import learn_projection
from ckn_scale.core.specs import WEIGHTED_NETWORKS, NetworkSpec
from ckn_scale.errors import InputError

HIDDEN = 16  # of AlexNet's linear layers, of which descriptors need none


@pytest.fixture(scope="module")
def patches():
    return cut_patches(12)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    torch.save(draw_state(torchvision_layout(HIDDEN, 7)), folder / "alexnet.pth")
    state = {key: one.numpy() for key, one in draw_state(caffe_layout(HIDDEN, 7)).items()}
    for old in (True, False):
        (folder / f"{'old' if old else 'new'}.caffemodel").write_bytes(encode_caffemodel(state, old=old))
    write_tfeat(folder / "tfeat.params")
    write_mkd(folder / "mkd.pth")
    return folder


def load(name, path, **options):
    return load_network(make_part(NetworkSpec(name, str(path)), path.read_bytes()), **options)


CASES = [
    *((f"alexnet-conv{one}", "alexnet.pth", TORCHVISION_WIDTHS[one - 1]) for one in (1, 3, 5)),
    *((f"alexnet-conv{one}", "old.caffemodel", CAFFE_WIDTHS[one - 1]) for one in (1, 2, 4, 5)),
    *(("tfeat", "tfeat.params", 128), ("mkd", "mkd.pth", 128), ("mkd-lw", "mkd.pth", 128)),
]


@pytest.mark.parametrize(("name", "file", "dim"), CASES)
def test_a_network_describes_patches_one_by_one(files, patches, name, file, dim):
    network = load(name, files / file, batch_size=4)
    rows = network.describe(patches)
    assert rows.shape == (12, dim) == (12, network.dim)
    assert np.isfinite(rows).all()
    assert np.array_equal(network.describe(patches[::-1]), rows[::-1])
    blank = np.full((1, 51, 51, 3), 77, np.uint8)
    assert not network.describe(blank).any()
    descriptor = ProjectedDescriptor(load(name, files / file), learn_projection(rows, None))
    projected = descriptor.describe(patches)
    np.testing.assert_allclose(projected, rows / np.linalg.norm(rows, axis=1, keepdims=True), atol=1e-6)
    assert np.array_equal(descriptor.describe(patches[3:]), projected[3:])
    again = load_network(network.to_part(), batch_size=4)
    assert np.array_equal(again.describe(patches), rows)


def test_every_name_has_an_architecture():
    assert {one.name for one in ARCHITECTURES} >= set(WEIGHTED_NETWORKS)


def test_both_forms_of_caffe_files_hold_the_same(files):
    old, new = (decode_caffemodel((files / f"{form}.caffemodel").read_bytes()) for form in ("old", "new"))
    assert {key: one.shape for key, one in new.items()} == caffe_layout(HIDDEN, 7)
    assert old.keys() == new.keys()
    assert all(np.array_equal(old[key], new[key]) for key in new)


def test_alexnet_of_caffe_is_what_caffe_computes(files, patches):
    """Layer by layer: BGR without its mean, ReLU, response normalisation, pooling, two groups."""
    arrays = decode_caffemodel((files / "old.caffemodel").read_bytes())
    weights = {key: torch.from_numpy(one) for key, one in arrays.items()}
    matrix = resampling_matrix(51, 51)
    pixels = torch.from_numpy(patches[..., ::-1].copy()).permute(0, 3, 1, 2).float()
    mean = torch.tensor([104.00699, 116.66877, 122.67892]).view(3, 1, 1)
    maps = torch.nn.functional.conv2d(pixels - mean, weights["conv1.weight"], weights["conv1.bias"], 4).relu()
    squares = torch.nn.functional.pad(maps**2, (0, 0, 0, 0, 2, 2)).unfold(1, 5, 1).sum(-1)
    maps = torch.nn.functional.max_pool2d(maps / (1 + 1e-4 / 5 * squares) ** 0.75, 3, 2)
    maps = torch.nn.functional.conv2d(maps, weights["conv2.weight"], weights["conv2.bias"], groups=2).relu()
    found = load("alexnet-conv2", files / "old.caffemodel").describe(patches)
    np.testing.assert_allclose(found, maps.flatten(1).numpy(), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(matrix, np.eye(51))


def test_mkd_is_a_kernel_of_gradients_and_places(patches):
    """The explicit maps give sums over all pairs of pixels of the products of three von Mises kernels."""
    layers = MkdLayers("pca")
    for name, value in {"mean": torch.zeros(238), "eigvals": torch.ones(238)}.items():
        getattr(layers.liberty["pca"], name).copy_(value)
    layers.liberty["pca"].eigvecs.copy_(torch.eye(238))
    rows = layers(torch.rand(4, 1, 32, 32, generator=torch.Generator().manual_seed(0)))
    assert rows.shape == (4, 128)
    polar = layers.get_buffer("polar")
    assert polar.shape == (25, 32, 32)
    window = polar[:, 10, 20].square().sum()
    coefficients = torch.tensor([0.14343168, 0.268285, 0.21979234]).sum()
    rho = (torch.linspace(-1, 1, 32)[[10, 20]] ** 2).sum() / 2
    np.testing.assert_allclose(window, coefficients**2 * torch.exp(-rho) ** 2, rtol=1e-4)


def test_smaller_targets_average_and_keep_the_mean():
    matrix = resampling_matrix(51, 11).numpy()
    np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=1e-5)
    assert ((matrix > 0).sum(axis=1)[1:-1] >= 8).all()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tfeat", b"", "holds no weights of torch, Caffe or safetensors"),
        ("tfeat", b"PK\x03\x04 no zip", "holds no weights of torch, Caffe or safetensors"),
        ("tfeat", b"\x80\x02 no pickle", "holds no weights of torch, Caffe or safetensors"),
        ("tfeat", save_safetensors({"a": np.zeros(2)}), "of tfeat: features.1.weight is missing .it has a"),
        (
            "tfeat",
            save_safetensors({"features.1.weight": np.zeros((3, 1, 7, 7))}),
            r"features.1.weight is \(3, 1, 7, 7\), not \(32, 1, 7, 7\)",
        ),
        (
            "alexnet-conv1",
            save_safetensors({"fc.weight": np.zeros(2)}),
            "alexnet-conv1: features.0.weight",
        ),
    ],
)
def test_other_files_are_refused(name, content, sentence):
    with pytest.raises(InputError, match=sentence):
        make_part(NetworkSpec(name, "file"), content)


def test_truncated_caffe_files_are_refused(files):
    content = (files / "old.caffemodel").read_bytes()
    for length in (1, 100, len(content) // 2, len(content) - 1):
        with pytest.raises(InputError, match="holds no weights"):
            make_part(NetworkSpec("alexnet-conv5", "file"), content[:length])


def test_pickled_code_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "done"), "w"))

    torch.save({"features.1.weight": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(InputError, match="holds no weights"):
        decode_weights((tmp_path / "evil.pth").read_bytes(), "evil.pth")
    assert not (tmp_path / "done").exists()


def test_another_file_than_the_published_one_is_told(files, caplog):
    load("tfeat", files / "tfeat.params")
    assert "is not the published file" in caplog.text
