"""What a run will take: time of every step, bytes on disk, memory, before it is begun.

Two small runs of a few sampled images go through the real steps, in a process of its own. What a step
takes grows in a line with the rows it works on (images, patches, sub-patches), so two runs give the
line, and the full run lies on it: `list_sizes` says how many rows each step has, and is all there is to
know. Some do not grow that way: the reduction's time and memory, and the time of the words of points, are
worked out from their sizes; and SGD takes steps of one length, however many sub-patches there are: one is
timed, and `count_sgd_steps` counts them.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ckn_scale.config import Resources, Settings, parse_settings
from ckn_scale.core.ckn_model import Ckn
from ckn_scale.core.ckn_sgd import PairProblem, draw_pairs, measure_error, take_step
from ckn_scale.core.ckn_training import add_layer
from ckn_scale.core.evidence import HEAD
from ckn_scale.core.flattening import supported_directions
from ckn_scale.core.numerics import set_compute_threads
from ckn_scale.core.pca import COLUMNS_PER_BLOCK
from ckn_scale.core.specs import CknTrainingSpec
from ckn_scale.interrupts import signals_blocked
from ckn_scale.pipeline import list_training_steps
from ckn_scale.processes import SPAWN
from ckn_scale.step import Step, process_shard
from ckn_scale.steps.build_index import BuildIndex, write_build_manifest
from ckn_scale.steps.certify_index import CertifyIndex
from ckn_scale.steps.draw_queries import draw_queries, write_draw
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.steps.plan_images import write_segment
from ckn_scale.steps.plant_queries import PlantQueries
from ckn_scale.steps.record_models import record_generation
from ckn_scale.steps.sample_patches import SamplePatches
from ckn_scale.steps.train_descriptors import DescribePatches, TrainPointWords
from ckn_scale.steps.train_layers import DrawSubpatches, SearchRates, TrainLayer
from ckn_scale.steps.train_reduction import SampleVlads
from ckn_scale.storage.builds import name_shards, number_index_shards
from ckn_scale.storage.image_refs import ImageRef
from ckn_scale.storage.plans import PlannedImage, read_sample, read_segments
from ckn_scale.storage.run_folder import PATCHES_STAGE, RunFolder

NUM_IMAGES = (8, 16)  # of the two small runs: enough for the reduction to be learned
PATCHES_PER_IMAGE = 200  # that the small runs learn from
SUBPATCHES_PER_PATCH = 10
SGD_TIMED_S = 0.5  # for which steps are taken, per layer
EIGEN_ROUNDS = 30  # of the subspace iteration
# Steps whose bytes are removed once a version is published.
SAMPLE_STEPS = (SamplePatches.name, DrawSubpatches.name, DescribePatches.name, SampleVlads.name)


@dataclass(frozen=True)
class StepCost:
    seconds: float  # of one core, or of the device
    stored_bytes: float


@dataclass(frozen=True)
class Estimate:
    num_images: int
    steps: dict[str, StepCost]
    worker_memory_mb: float
    reduction_memory_mb: float
    prepare_s: float  # of an image: reading, detecting and cutting, without describing
    points: str  # what is kept of an image to match it by

    @property
    def seconds(self) -> float:
        return sum(cost.seconds for cost in self.steps.values())

    @property
    def sample_bytes(self) -> float:
        return sum(cost.stored_bytes for name, cost in self.steps.items() if name in SAMPLE_STEPS)

    @property
    def kept_bytes(self) -> float:
        return sum(cost.stored_bytes for cost in self.steps.values()) - self.sample_bytes

    def lines(self) -> list[str]:
        kept = {step.name for step in (EncodeImages, BuildIndex, PlantQueries, CertifyIndex)}
        learning = sum(cost.seconds for name, cost in self.steps.items() if name not in kept)
        encoding, building = (self.steps[step.name].seconds for step in (EncodeImages, BuildIndex))
        certifying = sum(self.steps[step.name].seconds for step in (PlantQueries, CertifyIndex))
        each_ms = 1000 * encoding / max(self.num_images, 1)
        describe_s = encoding / max(self.num_images, 1) - self.prepare_s
        memory_mb = max(self.worker_memory_mb, self.reduction_memory_mb)
        return [
            f"learning {_duration(learning)}, encoding {self.num_images} images {_duration(encoding)} "
            f"({each_ms:.0f} ms each), building {_duration(building)}, certifying {_duration(certifying)}",
            f"{_duration(self.seconds)} of one worker in all; divide by their number",
            f"memory of a worker: about {self.worker_memory_mb:.0f} MB, with very large images up to "
            f"{Resources().image_memory_mb} MB more; the largest fit: {memory_mb:.0f} MB",
            f"run folder: about {self.kept_bytes / 1e6:.1f} MB, and {self.sample_bytes / 1e6:.1f} MB of "
            "samples until it is published",
            self.points,
            f"cores that keep one device busy: {max(1.0, self.prepare_s / max(describe_s, 1e-9)):.1f}",
        ]


def estimate_run(run: RunFolder, settings: Settings) -> Estimate:
    """Rehearse with a few sampled images in a process of its own; the figures go into the event log."""
    segments = read_segments(run)
    images = read_sample(run, segments)
    num_images = sum(segment.num_images for segment in segments)
    background = run.background.latest()
    others = None if background is None else background.num_images
    with ProcessPoolExecutor(1, SPAWN) as pool, signals_blocked():
        future = pool.submit(_estimate, images[: max(NUM_IMAGES)], settings, len(images), num_images, others)
    estimate = future.result()
    run.events.write("estimate", **asdict(estimate))
    run.events.flush()
    return estimate


def _estimate(
    images: Sequence[PlannedImage],
    settings: Settings,
    num_sampled: int,
    num_images: int,
    num_background: int | None,
) -> Estimate:
    set_compute_threads(settings.numerics.threads)
    per_image = -(-settings.sample.num_patches // num_sampled)
    small = _shrink(settings, max(per_image, PATCHES_PER_IMAGE))
    words = count_point_words(settings, num_sampled, num_sampled * per_image)
    _rehearse(images[:1], small(1), words)  # what is imported or cached on first use
    counts = [count for count in NUM_IMAGES if count <= len(images)] or [len(images)]
    runs = [_rehearse(images[:count], small(count), words) for count in counts]
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = runs[-1].num_patches / counts[-1]  # an image may have fewer points than are asked of it
    num_patches = num_sampled * min(per_image, found)
    full = list_sizes(settings, num_sampled, num_images, num_patches, num_background)
    steps = {name: _extrapolate(name, runs, size) for name, size in full.items()}
    for name, cost in _sgd_s(settings.training, steps["search_rates"].seconds, runs[-1].sgd_step_s).items():
        steps[name] = StepCost(cost, steps[name].stored_bytes)
    fitted, dim = int(full["sample_vlads"].work), runs[-1].vlad_dim
    directions = settings.reduction.dim
    if settings.reduction.method == "flatten":
        directions = supported_directions(fitted, background=num_background is not None)
    steps["train_reduction"] = StepCost(
        _reduction_s(fitted, dim, directions), steps["train_reduction"].stored_bytes
    )
    products = full["train_point_words"].work * settings.points.dim * len(settings.point_channels)
    steps["train_point_words"] = StepCost(
        _kmeans_s(products, settings.points.kmeans_iterations), steps["train_point_words"].stored_bytes
    )
    fit_mb = memory_mb + _reduction_bytes(fitted, dim, directions) / 2**20 if fitted else 0.0
    prepare_s = steps["sample_patches"].seconds / num_sampled
    points = _describe_points(settings, count_point_words(settings, num_sampled, num_patches))
    return Estimate(num_images, steps, memory_mb, fit_mb, prepare_s, points)


class Size(NamedTuple):
    """What a step's time and what its bytes grow with, in a line."""

    work: float
    stored: float


def list_sizes(
    settings: Settings,
    num_sampled: int,
    num_images: int,
    num_patches: float,
    num_background: int | None = None,
) -> dict[str, Size]:
    """The rows that each step works on and stores, by `num_patches` sampled patches."""
    training, channels = settings.training, settings.channels
    raw = sum(min(channel.projection.num_descriptors, num_patches) for channel in channels)
    points = min(settings.points.num_descriptors, num_patches) if settings.point_channels else 0
    words = count_point_words(settings, num_sampled, num_patches)
    projected = len(channels) * min(settings.vlad.num_descriptors, num_patches)
    described = raw + projected + len(settings.point_channels) * points
    queries = min(settings.publish.num_queries, num_images)
    spec = settings.reduction
    taught_by = num_sampled if num_background is None else num_background
    too_few = spec.method == "flatten" and taught_by < spec.min_images
    fitted = 0 if spec.method == "none" or too_few else min(taught_by, spec.num_images)
    return {
        "sample_patches": Size(num_sampled, num_patches),
        "draw_subpatches": Size(min(training.num_patches, num_patches), training.num_subpatches),
        "search_rates": Size(training.num_subpatches if training.solver == "sgd" else 0, 0),
        "train_layer": Size(training.num_subpatches, 0),
        "describe_patches": Size(described, described),
        "train_projection": Size(raw, 0),
        "train_codebook": Size(projected, 0),
        "train_point_words": Size(points * words, 0),
        "sample_vlads": Size(fitted, fitted),
        "train_reduction": Size(fitted, 0),
        "encode_images": Size(num_images, num_images),
        "build_index": Size(num_images, num_images),
        "plant_queries": Size(queries, queries),
        "certify_index": Size(queries * _count_verified(settings, num_images), 0),
    }


def _count_verified(settings: Settings, num_images: int) -> int:
    """Images that a planted query is compared with by points: the head of each index shard, and few more."""
    held = settings.plan.images_per_shard * settings.index.shards_per_index_shard
    return -(-num_images // held) * min(num_images, held, 3 * HEAD // 2)


def count_point_words(settings: Settings, num_sampled: int, num_patches: float) -> int:
    """How many words the points get that are matched."""
    return settings.points.count_words(num_sampled, int(min(settings.points.num_descriptors, num_patches)))


def count_sgd_steps(training: CknTrainingSpec) -> dict[str, float]:
    """SGD's steps for one layer of one channel, by pipeline step; none where the closed form is used.

    Rates that diverge are given up early, so searching takes less rather than more.
    """
    if training.solver != "sgd":
        return {}
    validation = training.sgd_validation_pairs / training.sgd_batch_pairs / 2  # there is no way back
    tried = training.sgd_validate_every + (training.sgd_validate_every // 100 + 2) * validation
    blocks = -(-training.sgd_iterations // training.sgd_validate_every)
    return {
        "search_rates": training.sgd_rate_candidates * tried,
        "train_layer": training.sgd_iterations + (blocks + 1) * validation,
    }


def _sgd_s(training: CknTrainingSpec, begin_s: float, step_s: float) -> dict[str, float]:
    """`begin_s` is what each candidate, and then the layer itself, takes before its first step."""
    begun = {"search_rates": training.sgd_rate_candidates, "train_layer": 1}
    steps = count_sgd_steps(training)
    return {name: begun[name] * begin_s + count * step_s for name, count in steps.items()}


def _extrapolate(name: str, runs: Sequence[Rehearsal], size: Size) -> StepCost:
    first, last = runs[0], runs[-1]
    before, after = first.costs[name], last.costs[name]
    seconds = _on_line(
        first.sizes[name].work, before.seconds, last.sizes[name].work, after.seconds, size.work
    )
    stored = _on_line(
        first.sizes[name].stored,
        before.stored_bytes,
        last.sizes[name].stored,
        after.stored_bytes,
        size.stored,
    )
    return StepCost(seconds, stored)


def _reduction_s(num_images: int, dim: int, directions: int) -> float:
    """All pairs of VLADs compared, eigenvectors of that matrix, and directions made of them."""
    if num_images == 0:
        return 0.0
    pairs, combined = num_images * num_images * dim, 2 * num_images * dim * directions
    eigen = 2 * num_images * num_images * min(num_images, 2 * directions) * EIGEN_ROUNDS
    return (pairs + combined + eigen) / _measure_flops()


def _kmeans_s(products: float, iterations: int) -> float:
    """Each iteration multiplies every descriptor with every word, and reads the products three times."""
    return iterations * 4 * products / _measure_flops()


def _describe_points(settings: Settings, num_words: int) -> str:
    points = settings.points
    if not settings.point_channels:
        return "points: none are kept (points.max_points=0), so answers cannot be verified"
    most, each = min(points.max_points, settings.keypoints.max_keypoints), points.bytes_per_point
    return (
        f"points: up to {most} of an image, {each} bytes each: {most * each / 1000:.1f} kB an image; "
        f"{num_words} words of {' + '.join(points.channels)}"
    )


def _reduction_bytes(num_images: int, dim: int, directions: int) -> float:
    """The matrix of all pairs, and beside it either its eigenvectors or what makes directions of them.

    Eigenvectors of all, where many are wanted. Then a block of columns as it is read and in floats, the
    weights of the images in each direction, and the directions in single and double precision.
    """
    pairs, block = num_images**2, num_images * min(dim, COLUMNS_PER_BLOCK)
    eigen = 36 * pairs if num_images < 4 * directions else 0
    return 4.0 * pairs + max(eigen, 8 * block + 36 * num_images * directions + 20 * dim * directions)


def _measure_flops() -> float:
    left = np.ones((1024, 2048), np.float32)
    left @ left.T
    begun = time.perf_counter()
    left @ left.T
    return 2 * 1024 * 1024 * 2048 / (time.perf_counter() - begun)


def _on_line(x1: float, y1: float, x2: float, y2: float, x: float) -> float:
    """The line through two points, at x; it never falls. Through one point: what was measured there."""
    if x1 == x2:
        return y2
    return max(0.0, y2 + max(0.0, (y2 - y1) / (x2 - x1)) * (x - x2))


class Rehearsal(NamedTuple):
    """A small run: its sizes, and what each step took; of SGD, one of its steps in all layers."""

    num_patches: int
    vlad_dim: int
    sgd_step_s: float
    sizes: dict[str, Size]
    costs: dict[str, StepCost]


def _rehearse(images: Sequence[PlannedImage], small: Settings, num_words: int) -> Rehearsal:
    """Learn, encode, build and certify a small run of these images, with the full run's number of words."""
    with tempfile.TemporaryDirectory(prefix="ckn-rehearsal-") as folder:
        run = RunFolder.create(folder, small.model_dump(mode="json"))
        refs = [ImageRef(image.uri, image.size_bytes, image.etag) for image in images]
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
            self.settings.channels[shard_id].ckn,
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


def _shrink(settings: Settings, patches_per_image: int) -> Callable[[int], Settings]:
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


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
