"""AlexNet on whole images, to be trained further: the layers of either published file, the last one new."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor, nn

from ckn_scale.core.descriptors.architectures import (
    CAFFE_GROUPS,
    CAFFE_WIDTHS,
    TORCHVISION_WIDTHS,
    alexnet_layers,
    to_caffe_pixels,
    to_torchvision_pixels,
)
from ckn_scale.core.descriptors.weight_files import find_layout

_DROPOUT = 0.5
_MAP_PX = 6  # of the last map of a crop of 227 pixels


def make_classifier(
    weights: Mapping[str, np.ndarray], num_classes: int, where: str
) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Layers with the names of the file that the weights are from, and what makes pixels ready for them.

    Their linear layers may have any width. InputError for the weights of something else.
    """
    builders = {"fc6.weight": build_caffe_classifier, "classifier.1.weight": build_torchvision_classifier}
    prepares = (to_caffe_pixels, to_torchvision_pixels)
    for (key, build), prepare in zip(builders.items(), prepares, strict=True):
        if key in weights:
            classifier = build(len(weights[key]), num_classes)
            *kept, _, _ = classifier.state_dict().items()
            layout = {name: tuple(one.shape) for name, one in kept}
            find_layout("AlexNet", weights, [layout], where)
            return classifier, prepare
    find_layout("AlexNet", weights, [{key: ()} for key in builders], where)
    raise AssertionError("unreachable")


def build_caffe_classifier(hidden: int, num_classes: int) -> nn.Module:
    named = OrderedDict[str, nn.Module]()
    layers = alexnet_layers(CAFFE_WIDTHS, 5, CAFFE_GROUPS, normalise=True, padding=(0, 2, 1, 1, 1))
    for number, (convolution, *others) in enumerate(layers, start=1):
        named[f"conv{number}"] = convolution
        named[f"after{number}"] = nn.Sequential(*others)
    named["pool5"] = nn.Sequential(nn.MaxPool2d(3, 2), nn.Flatten())
    named["fc6"] = nn.Linear(CAFFE_WIDTHS[-1] * _MAP_PX**2, hidden)
    named["after6"] = nn.Sequential(nn.ReLU(), nn.Dropout(_DROPOUT))
    named["fc7"] = nn.Linear(hidden, hidden)
    named["after7"] = nn.Sequential(nn.ReLU(), nn.Dropout(_DROPOUT))
    named["fc8"] = nn.Linear(hidden, num_classes)
    return nn.Sequential(named)


def build_torchvision_classifier(hidden: int, num_classes: int) -> nn.Module:
    layers = alexnet_layers(TORCHVISION_WIDTHS, 5, normalise=False, padding=(2, 2, 1, 1, 1))
    features = nn.Sequential(*(one for group in layers for one in group), nn.MaxPool2d(3, 2), nn.Flatten())
    classifier = nn.Sequential(
        *(nn.Dropout(_DROPOUT), nn.Linear(TORCHVISION_WIDTHS[-1] * _MAP_PX**2, hidden), nn.ReLU()),
        *(nn.Dropout(_DROPOUT), nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, num_classes),
    )
    return nn.Sequential(OrderedDict(features=features, classifier=classifier))
