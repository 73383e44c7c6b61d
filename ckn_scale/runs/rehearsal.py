"""A small run of a few images through the real steps, and what each of them took."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ckn_scale.config import Settings, parse_settings
from ckn_scale.core.ckn_model import Ckn
from ckn_scale.core.ckn_sgd import PairProblem, draw_pairs, measure_error, take_step
from ckn_scale.core.ckn_training import add_layer
from ckn_scale.core.evidence import warm_up
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.specs import CknTrainingSpec
from ckn_scale.pipeline import list_training_steps
from ckn_scale.runs.step_sizes import Size, StepCost, list_sizes
from ckn_scale.step import Step, process_shard
from ckn_scale.steps.build_index import BuildIndex, write_build_manifest
from ckn_scale.steps.certify_index import CertifyIndex
from ckn_scale.steps.draw_queries import draw_queries, write_draw
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.steps.plan_images import write_segment
from ckn_scale.steps.plant_queries import PlantQueries
from ckn_scale.steps.record_models import record_generation
from ckn_scale.steps.sample_patches import SamplePatches
from ckn_scale.steps.take_networks import keep_networks
from ckn_scale.steps.train_descriptors import TrainPointWords
from ckn_scale.steps.train_layers import SearchRates, TrainLayer, require_ckn
from ckn_scale.storage.builds import name_shards, number_index_shards
from ckn_scale.storage.image_refs import ImageRef
from ckn_scale.storage.plans import PlannedImage, read_segments
from ckn_scale.storage.run_folder import PATCHES_STAGE, RunFolder

SUBPATCHES_PER_PATCH = 10
SGD_TIMED_S = 0.5  # for which steps are taken, per layer


class Rehearsal(NamedTuple):
    """A small run: its sizes, and what each step took; of SGD, one of its steps in all layers."""

    num_patches: int
    vlad_dim: int
    sgd_step_s: float
    sizes: dict[str, Size]
    costs: dict[str, StepCost]


def rehearse(
    images: Sequence[PlannedImage], small: Settings, networks: Mapping[str, ModelPart], num_words: int
) -> Rehearsal:
    """Learn, encode, build and certify a small run of these images, with the full run's number of words."""
    warm_up()  # what is compiled once is no part of what a step takes
    with tempfile.TemporaryDirectory(prefix="ckn-rehearsal-") as folder:
        run = RunFolder.create(folder, small.model_dump(mode="json"))
        refs = [ImageRef(image.uri, image.size_bytes, image.etag) for image in images]
        keep_networks(run, networks)
        write_segment(run, small, [], refs, {}, [image.uri for image in images], [])
        costs: dict[str, StepCost] = {}
        for step in list_training_steps(run):
            if isinstance(step, TrainLayer) and small.training.solver == "sgd":
                step = StandInLayer(run, step.layer)
            if isinstance(step, TrainPointWords):
                step = StandInWords(run, num_words)
            _do(step, costs)
        record_generation(run, small)
        _do(EncodeImages(run), costs)
        segments, encoded = read_segments(run), run.commits(EncodeImages.name).committed()
        numbers = number_index_shards(run, segments, encoded, purge=None)
        build = BuildIndex(run, name_shards(numbers))
        _do(build, costs)
        manifest = write_build_manifest(build)
        draw = write_draw(run, draw_queries(run, segments, numbers, None))
        _do(PlantQueries(run, manifest, draw), costs)
        _do(CertifyIndex(run, manifest, draw), costs)
        sampled = run.commits(SamplePatches.name).committed().values()
        num_patches = sum(commit.files[PATCHES_STAGE].rows for commit in sampled)
        vlad_dim, sgd_step_s = EncodeImages(run).encoder.dim, _time_sgd_step(run, small)
    sizes = list_sizes(small, len(images), len(images), num_patches)
    return Rehearsal(num_patches, vlad_dim, sgd_step_s, sizes, costs)


class StandInLayer(TrainLayer):
    """A layer of the form that SGD gives it, by the closed form: few steps of SGD leave nothing to go on."""

    def learn(self, shard_id: int, below: Ckn, subpatches: np.ndarray) -> Ckn:
        spec, training = (
            require_ckn(self.settings.channels[shard_id]),
            replace(self.settings.training, solver="nystrom"),
        )
        ckn = add_layer(below, spec, subpatches, training, device=self.settings.numerics.device)
        return replace(ckn, layers=(*below.layers, replace(ckn.layers[-1], factor=None)))


@dataclass(frozen=True, eq=False)
class StandInWords(TrainPointWords):
    """As many words as the full run has, not learned: a few images do not support them."""

    num_words: int

    def learn(self, descriptors: np.ndarray, num_images: int) -> np.ndarray:
        return np.resize(descriptors, (self.num_words, descriptors.shape[1]))


def _time_sgd_step(run: RunFolder, small: Settings) -> float:
    """CPU seconds of one step in every layer of every channel together."""
    total = 0.0
    for step in list_training_steps(run):
        if isinstance(step, SearchRates) and small.training.solver == "sgd":
            total += sum(_time_steps(*step.pose(one), small.training) for one in step.drawn.positions())
    return total


def _time_steps(problem: PairProblem, filters: Tensor, training: CknTrainingSpec) -> float:
    pairs = draw_pairs(problem.rows, training.sgd_batch_pairs, torch.Generator().manual_seed(0))
    take_step(problem, filters, next(pairs), 0.0)
    begun, count = time.process_time(), 0
    while time.process_time() - begun < SGD_TIMED_S:
        filters = take_step(problem, filters, next(pairs), 0.0)  # at rate 0: nothing diverges
        count += 1
    measure_error(problem, filters)  # a GPU is done only when somebody looks
    return (time.process_time() - begun) / count


def shrink_settings(settings: Settings, patches_per_image: int) -> Callable[[int], Settings]:
    """The same networks, words and dimensions, learned from less: settings for a number of images."""

    def shrink(num_images: int) -> Settings:
        patches = patches_per_image * num_images
        tree = settings.model_dump(mode="json")
        training = tree["training"]
        _limit(tree["sample"], num_patches=patches)
        _limit(training, num_patches=patches, num_subpatches=SUBPATCHES_PER_PATCH * patches)
        _limit(training, sgd_validate_every=1, sgd_rate_candidates=1, sgd_validation_pairs=1000)
        _limit(tree["vlad"], num_descriptors=patches)
        _limit(tree["points"], num_descriptors=patches)
        for channel in tree["channels"]:
            if channel["projection"] is not None:
                _limit(channel["projection"], num_descriptors=patches)
        _limit(tree["reduction"], min_images=2)
        tree["publish"]["num_queries"] = num_images
        return parse_settings(tree)

    return shrink


def _limit(section: dict[str, Any], **limits: int) -> None:
    for name, limit in limits.items():
        section[name] = min(section[name], limit)


def _do(step: Step, costs: dict[str, StepCost]) -> None:
    """All shards of a step, here; what they took is added to the costs under the step's name."""
    begun = _cpu_s()
    commits = [process_shard(step, shard_id)[0] for shard_id in step.shard_ids()]
    before = costs.get(step.name, StepCost(0.0, 0.0))
    stored = sum(file.size_bytes for commit in commits for file in commit.files.values())
    costs[step.name] = StepCost(before.seconds + _cpu_s() - begun, before.stored_bytes + stored)


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
