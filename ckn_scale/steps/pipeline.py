"""The pipeline as a plain list: every step that is done in shards, in order, with its parameters."""

from __future__ import annotations

from collections.abc import Mapping

from ckn_scale.config import Settings
from ckn_scale.steps.base import Step
from ckn_scale.steps.build_index import BuildIndex
from ckn_scale.steps.certify_index import CertifyIndex
from ckn_scale.steps.describe_patches import DescribePatches
from ckn_scale.steps.draw_subpatches import DrawSubpatches
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.steps.plant_queries import PlantQueries
from ckn_scale.steps.sample_patches import SamplePatches
from ckn_scale.steps.sample_vlads import SampleVlads
from ckn_scale.steps.search_rates import SearchRates
from ckn_scale.steps.train_codebook import TrainCodebook
from ckn_scale.steps.train_layer import TrainLayer
from ckn_scale.steps.train_projection import TrainProjection
from ckn_scale.steps.train_reduction import TrainReduction

StepUse = tuple[type[Step], Mapping[str, str]]


LAYER_STEPS: tuple[type[Step], ...] = (DrawSubpatches, SearchRates, TrainLayer)


def list_training(settings: Settings) -> list[StepUse]:
    """From sampled patches to the last model."""
    num_layers = max(len(channel.ckn.layers) for channel in settings.channels)
    layers = [(kind, {"layer": str(layer)}) for layer in range(num_layers) for kind in LAYER_STEPS]
    return [
        *layers,
        (DescribePatches, {"form": "raw"}),
        (TrainProjection, {}),
        (DescribePatches, {"form": "projected"}),
        (TrainCodebook, {}),
        (SampleVlads, {}),
        (TrainReduction, {}),
    ]


def list_learning(settings: Settings) -> list[StepUse]:
    """Everything before the models stand."""
    return [(SamplePatches, {}), *list_training(settings)]


ALL_STEPS: tuple[type[Step], ...] = (
    SamplePatches,
    *LAYER_STEPS,
    DescribePatches,
    TrainProjection,
    TrainCodebook,
    SampleVlads,
    TrainReduction,
    EncodeImages,
    BuildIndex,
    PlantQueries,
    CertifyIndex,
)
STEPS: dict[str, type[Step]] = {kind.name: kind for kind in ALL_STEPS}
