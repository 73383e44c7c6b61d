"""Networks that share layers learn them once, and are what they are without that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ckn_scale.config import load_settings
from ckn_scale.core import ckn_training
from ckn_scale.core.ckn_training import train_ckn
from ckn_scale.evaluate.cache import ContentCache
from ckn_scale.evaluate.descriptors import fit_member, parse_requests
from ckn_scale.evaluate.layers import CachedLayers

SMALL = [
    "training.num_patches=80",
    "training.num_subpatches=2000",
    "channels.1.projection.num_descriptors=80",
]


@pytest.fixture
def learned(monkeypatch) -> list[int]:
    """How many filters each layer has that is learned."""
    counts: list[int] = []
    real = ckn_training.fit_layer

    def fit_layer(subpatches, spec, *arguments, **options):
        counts.append(spec.num_filters)
        return real(subpatches, spec, *arguments, **options)

    monkeypatch.setattr(ckn_training, "fit_layer", fit_layer)
    return counts


@pytest.fixture
def patches() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (80, 51, 51, 3), np.uint8)


def fit(patches, cache, *overrides):
    load = lambda preset=None: load_settings("tiny", None, [*SMALL, *overrides])  # noqa: E731
    member = parse_requests("ckn-white", load)[0].members[0]
    return fit_member(member, None, lambda count: patches[:count], cache)


def test_only_what_changed_is_learned_again(patches, learned, tmp_path):
    cache = ContentCache(tmp_path)
    fit(patches, cache)
    assert learned == [16, 16]
    fit(patches, cache, "channels.1.projection.dim=8")  # the projection alone
    assert learned == [16, 16]
    fit(patches, cache, "channels.1.ckn.layers.1.num_filters=24")  # layer two
    assert learned == [16, 16, 24]
    fit(patches, cache, "channels.1.ckn.layers.0.num_filters=12")  # layer one, and what is above it
    assert learned == [16, 16, 24, 12, 16]
    fit(patches[::-1].copy(), cache)  # other patches
    assert learned[5:] == [16, 16]


def test_network_of_kept_layers_is_the_same(patches, tmp_path):
    settings = load_settings("tiny", None, SMALL)
    spec, cache = settings.channels[1].ckn, ContentCache(tmp_path)
    more = replace(spec, layers=(spec.layers[0], replace(spec.layers[1], num_filters=20)))
    plain = train_ckn(patches, more, settings.training)
    train_ckn(patches, spec, settings.training, store=CachedLayers(cache))
    layers = CachedLayers(cache)
    reused = train_ckn(patches, more, settings.training, store=layers)
    assert layers.reused_s > 0
    assert reused.spec == plain.spec
    for mine, theirs in zip(reused.layers, plain.layers, strict=True):
        np.testing.assert_array_equal(mine.weights, theirs.weights)
        assert (mine.factor is None) == (theirs.factor is None)
