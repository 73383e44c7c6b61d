"""The networks that take weights, as data: AlexNet, PhilippNet, DeepCompare, TFeat, MKD."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ckn_scale.core.descriptors.convolutional import Architecture
from ckn_scale.core.descriptors.mkd import MKD_SIDE, MkdLayers

# Receptive fields and what comes out of AlexNet's convolutions, by the file that the weights come from.
ALEXNET_SIDES = (11, 51, 99, 131, 163)
CAFFE_WIDTHS = (96, 256, 384, 384, 256)
TORCHVISION_WIDTHS = (64, 192, 384, 256, 256)
CAFFE_GROUPS = (1, 2, 1, 2, 2)
_KERNELS = (11, 5, 3, 3, 3)
_CAFFE_MEAN_BGR = (104.00699, 116.66877, 122.67892)
_TORCHVISION_MEAN, _TORCHVISION_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_TRAINED_HERE = "`ckn-scale train-network {name} DATA OUT`, which trains it here"


def alexnet_layers(
    widths: tuple[int, ...],
    depth: int,
    groups: tuple[int, ...] = (1,) * 5,
    *,
    normalise: bool,
    padding: tuple[int, ...] = (0,) * 5,
) -> list[list[nn.Module]]:
    """What belongs to each of the first `depth` convolutions, pooling before the next one included.

    Without padding, as a patch of the size of the receptive field wants it, or as for whole images.
    """
    layers: list[list[nn.Module]] = []
    for one in range(depth):
        inputs = widths[one - 1] if one else 3
        convolution = nn.Conv2d(
            inputs, widths[one], _KERNELS[one], 1 if one else 4, padding[one], groups=groups[one]
        )
        layers.append([convolution, nn.ReLU()])
        if one < 2 and one + 1 < depth:
            response = [nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75, k=1)] if normalise else []
            layers[-1] += [*response, nn.MaxPool2d(3, 2)]
    return layers


def build_caffe_alexnet(depth: int) -> nn.Module:
    """The network of the paper: names as in `bvlc_alexnet.caffemodel`."""
    named = OrderedDict[str, nn.Module]()
    layers = alexnet_layers(CAFFE_WIDTHS, depth, CAFFE_GROUPS, normalise=True)
    for number, (convolution, *others) in enumerate(layers, start=1):
        named[f"conv{number}"] = convolution
        named[f"after{number}"] = nn.Sequential(*others)
    return nn.Sequential(named)


def build_torchvision_alexnet(depth: int) -> nn.Module:
    """Names as in torchvision's state dict; narrower, and without response normalisation."""
    layers = alexnet_layers(TORCHVISION_WIDTHS, depth, normalise=False)
    return nn.Sequential(OrderedDict(features=nn.Sequential(*(one for group in layers for one in group))))


def to_caffe_pixels(pixels: Tensor) -> Tensor:
    """RGB in 0 … 1 → BGR in 0 … 255 without the mean colour."""
    return pixels.flip(1) * 255 - pixels.new_tensor(_CAFFE_MEAN_BGR).view(3, 1, 1)


def to_torchvision_pixels(pixels: Tensor) -> Tensor:
    mean, std = (pixels.new_tensor(one).view(3, 1, 1) for one in (_TORCHVISION_MEAN, _TORCHVISION_STD))
    return (pixels - mean) / std


def _list_alexnets() -> list[Architecture]:
    caffe = "http://dl.caffe.berkeleyvision.org/bvlc_alexnet.caffemodel"
    torchvision = "https://download.pytorch.org/models/alexnet-owt-7be5be79.pth"
    source = f"{torchvision} or {caffe}"
    found = []
    for depth, side in enumerate(ALEXNET_SIDES, start=1):
        name = f"alexnet-conv{depth}"
        of_caffe, of_torchvision = (
            partial(build_caffe_alexnet, depth),
            partial(build_torchvision_alexnet, depth),
        )
        found += [
            Architecture(
                *(name, CAFFE_WIDTHS[depth - 1], side, False, of_caffe, source),
                prepare=to_caffe_pixels,
                published="9116a64c0fbe4459",
            ),
            Architecture(
                *(name, TORCHVISION_WIDTHS[depth - 1], side, False, of_torchvision, source),
                prepare=to_torchvision_pixels,
                published="7be5be79",
            ),
        ]
    return found


def build_philippnet(*top: nn.Module) -> nn.Module:
    """Three convolutions and a linear layer, which is one more convolution: larger patches give maps."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 64, 7, 2),
            below1=nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)),
            conv2=nn.Conv2d(64, 128, 5),
            below2=nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)),
            conv3=nn.Conv2d(128, 256, 5),
            below3=nn.ReLU(),
            fc=nn.Conv2d(256, 512, 1),
            top=nn.Sequential(nn.ReLU(), *top),
        )
    )


def centre_pixels(pixels: Tensor) -> Tensor:
    """0 … 1 → −1 … 1."""
    return 2 * pixels - 1


def subtract_mean(pixels: Tensor) -> Tensor:
    """Each patch without its own mean."""
    return pixels - pixels.mean(dim=(1, 2, 3), keepdim=True)


def siam_layers(channels: int) -> OrderedDict[str, nn.Module]:
    """DeepCompare's one stream of 64 × 64 pixels: 256 numbers."""
    return OrderedDict(
        conv0=nn.Conv2d(channels, 96, 7, 3),
        below0=nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)),
        conv1=nn.Conv2d(96, 192, 5),
        below1=nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)),
        conv2=nn.Conv2d(192, 256, 3),
        below2=nn.Sequential(nn.ReLU(), nn.Flatten()),
    )


class TwoStreams(nn.Module):
    """The middle of a patch as it is, and the whole of it at half the size, each by layers of its own."""

    def __init__(self, stream: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.retina, self.fovea = stream(), stream()

    def forward(self, pixels: Tensor) -> Tensor:
        middle, half = pixels[..., 16:48, 16:48], nn.functional.avg_pool2d(pixels, 2)
        return torch.cat([self.retina(middle), self.fovea(half)], dim=1)


def build_siam_stream() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            conv0=nn.Conv2d(1, 96, 4, 2),
            below0=nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)),
            conv1=nn.Conv2d(96, 192, 3),
            below1=nn.ReLU(),
            conv2=nn.Conv2d(192, 256, 3),
            below2=nn.ReLU(),
            conv3=nn.Conv2d(256, 256, 3),
            top=nn.Flatten(),
        )
    )


def build_tfeat() -> nn.Module:
    """TFeat (Balntas et al., BMVC 2016): two small layers of convolutions and a linear one."""
    features = nn.Sequential(
        nn.InstanceNorm2d(1),
        *(nn.Conv2d(1, 32, 7), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 6), nn.Tanh(), nn.Flatten()),
    )
    descr = nn.Sequential(nn.Linear(64 * 8 * 8, 128), nn.Tanh())
    return nn.Sequential(OrderedDict(features=features, descr=descr))


_TFEAT_SOURCE = "https://github.com/vbalnt/tfeat (pretrained-models/tfeat-liberty.params)"
_MKD_SOURCE = "https://github.com/manyids2/mkd_pytorch (mkd_pytorch/mkd-concat-64.pth)"
_MKD_PUBLISHED = "e31112000009e0d6"
_SIAM_TRAINED = _TRAINED_HERE.format(name="deepcompare-siam")

ARCHITECTURES = (
    *_list_alexnets(),
    Architecture(
        *("philippnet", 512, 64, False, build_philippnet, _TRAINED_HERE.format(name="philippnet")),
        prepare=centre_pixels,
    ),
    Architecture(
        *("philippnet-91", 2048, 91, False, partial(build_philippnet, nn.MaxPool2d(2))),
        _TRAINED_HERE.format(name="philippnet"),
        prepare=centre_pixels,
    ),
    Architecture(
        *("deepcompare-siam", 256, 64, True, lambda: nn.Sequential(siam_layers(1)), _SIAM_TRAINED),
        prepare=subtract_mean,
    ),
    Architecture(
        *("deepcompare-siam2stream", 512, 64, True, partial(TwoStreams, build_siam_stream)),
        _TRAINED_HERE.format(name="deepcompare-siam2stream"),
        prepare=subtract_mean,
    ),
    Architecture("tfeat", 128, 32, True, build_tfeat, _TFEAT_SOURCE, published="1f2e9516b03c4587"),
    Architecture(
        "mkd", 128, MKD_SIDE, True, partial(MkdLayers, "pca"), _MKD_SOURCE, published="e31112000009e0d6"
    ),
    Architecture(
        "mkd-lw", 128, MKD_SIDE, True, partial(MkdLayers, "lw"), _MKD_SOURCE, published="e31112000009e0d6"
    ),
)


def find_architectures(name: str) -> list[Architecture]:
    """One for each layout that files of its weights come in."""
    return [one for one in ARCHITECTURES if one.name == name]
