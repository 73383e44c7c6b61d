"""Every network by its name, from the model that a run or the evaluation keeps of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckn_scale.core.ckn_model import Ckn
from ckn_scale.core.ckn_training import LayerStore, train_ckn
from ckn_scale.core.descriptors.architectures import find_architectures
from ckn_scale.core.descriptors.ckn import CknNetwork
from ckn_scale.core.descriptors.convolutional import ConvolutionalNetwork
from ckn_scale.core.descriptors.network import (
    PatchNetwork,
    ProjectedDescriptor,
    make_network_part,
    split_part,
)
from ckn_scale.core.descriptors.sift import SiftNetwork
from ckn_scale.core.descriptors.weight_files import decode_weights, find_layout, warn_of_other_file
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.pca import Projection, learn_projection
from ckn_scale.core.specs import ChannelSpec, CknTrainingSpec, NetworkSpec
from ckn_scale.errors import InputError

SIFTS = {"sift": False, "rootsift": True}


def make_part(spec: NetworkSpec, data: bytes | None = None) -> ModelPart:
    """The model of a network at its own smoothing, of the bytes of its weights' file where it takes some.

    InputError when they are missing, or the weights of something else.
    """
    if not spec.takes_weights:
        return make_network_part(spec.name, {})
    kinds = find_architectures(spec.name)
    if data is None:
        raise InputError(f"{spec.name} needs its weights: --weights FILE, from {kinds[0].source}")
    where = str(spec.weights)
    layouts = [one.layout() for one in kinds]
    arrays = find_layout(spec.name, decode_weights(data, where), layouts, where)
    warn_of_other_file(data, [one.published for one in kinds], where)
    return make_network_part(spec.name, arrays)


def load_network(part: ModelPart, **options: Any) -> PatchNetwork:
    """`options` are batch_size, device and dtype, which are no part of the model."""
    name = part.metadata.get("network")
    if name is None:
        return CknNetwork(Ckn.from_part(part), **options)
    smoothing_px = part.metadata["smoothing_px"]
    if name in SIFTS:
        own = {} if smoothing_px is None else {"smoothing_px": smoothing_px}
        return SiftNetwork(root=SIFTS[name], **own)
    shapes = {key: array.shape for key, array in part.arrays.items()}
    fitting = [one for one in find_architectures(name) if one.layout().items() <= shapes.items()]
    return ConvolutionalNetwork(fitting[0], part.arrays, smoothing_px, **options)


def load_descriptor(part: ModelPart, **options: Any) -> ProjectedDescriptor:
    """What `ProjectedDescriptor.to_part` gave."""
    network, projection = split_part(part)
    return ProjectedDescriptor(load_network(network, **options), Projection.from_part(projection))


def train_descriptor(
    patches: np.ndarray,
    channel: ChannelSpec,
    training: CknTrainingSpec,
    network: ModelPart | None = None,
    *,
    device: str = "cpu",
    store: LayerStore | None = None,
    **options: Any,
) -> ProjectedDescriptor:
    """A channel learned from patches (N, S, S, 3) in one go; the training steps do the same in shards.

    `network` is the model of one that is no CKN, `store` may have layers of one that is; `options` are
    batch_size and dtype.
    """
    if channel.ckn is not None:
        learned = patches[: training.num_patches]
        network = train_ckn(learned, channel.ckn, training, device=device, store=store).to_part()
    assert network is not None
    loaded = load_network(network, device=device, **options)
    rows = loaded.describe(patches[: channel.num_descriptors if channel.projection else 0])
    return ProjectedDescriptor(loaded, learn_projection(rows, channel.projection))
