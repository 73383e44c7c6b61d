"""What a run will take: time of every step, bytes on disk, memory, before it is begun.

Two small runs of a few sampled images go through the real steps, in a process of its own. What a step
takes grows in a line with the rows it works on (images, patches, sub-patches), so two runs give the
line, and the full run lies on it: `step_sizes.py` says how many rows each step has, and is all there is to
know. Some do not grow that way: the reduction's time and memory, and the time of the words of points, are
worked out from their sizes; and SGD takes steps of one length, however many sub-patches there are: one is
timed, and `count_sgd_steps` counts them.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np

from ckn_scale.config import Resources, Settings
from ckn_scale.core.flattening import supported_directions
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.numerics import set_compute_threads
from ckn_scale.core.pca import COLUMNS_PER_BLOCK
from ckn_scale.core.specs import CknTrainingSpec
from ckn_scale.interrupts import signals_blocked
from ckn_scale.processes import SPAWN
from ckn_scale.runs.estimate_index import IndexCosts, estimate_index
from ckn_scale.runs.rehearsal import Rehearsal, rehearse, shrink_settings
from ckn_scale.runs.step_sizes import Size, StepCost, count_point_words, count_sgd_steps, list_sizes
from ckn_scale.steps.build_index import BuildIndex
from ckn_scale.steps.certify_index import CertifyIndex
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.steps.plant_queries import PlantQueries
from ckn_scale.steps.sample_patches import SamplePatches
from ckn_scale.steps.take_networks import load_kept
from ckn_scale.steps.train_descriptors import DescribePatches
from ckn_scale.steps.train_layers import DrawSubpatches
from ckn_scale.steps.train_reduction import SampleVlads
from ckn_scale.storage.plans import PlannedImage, read_sample, read_segments
from ckn_scale.storage.run_folder import RunFolder

NUM_IMAGES = (8, 16)  # of the two small runs: enough for the reduction to be learned
PATCHES_PER_IMAGE = 200  # that the small runs learn from
EIGEN_ROUNDS = 30  # of the subspace iteration
# Steps whose bytes are removed once a version is published.
SAMPLE_STEPS = (SamplePatches.name, DrawSubpatches.name, DescribePatches.name, SampleVlads.name)


@dataclass(frozen=True)
class Estimate:
    num_images: int
    steps: dict[str, StepCost]
    worker_memory_mb: float
    reduction_memory_mb: float
    prepare_s: float  # of an image: reading, detecting and cutting, without describing
    points: str  # what is kept of an image to match it by
    index: IndexCosts

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
        indexing = {BuildIndex.name, *self.index.steps}
        kept = {step.name for step in (EncodeImages, PlantQueries, CertifyIndex)} | indexing
        learning = sum(cost.seconds for name, cost in self.steps.items() if name not in kept)
        encoding = self.steps[EncodeImages.name].seconds
        building = sum(self.steps[name].seconds for name in indexing)
        certifying = sum(self.steps[step.name].seconds for step in (PlantQueries, CertifyIndex))
        each_ms = 1000 * encoding / max(self.num_images, 1)
        describe_s = encoding / max(self.num_images, 1) - self.prepare_s
        learning_mb = self.worker_memory_mb + self.index.learning_bytes / 2**20
        memory_mb = max(self.reduction_memory_mb, learning_mb)
        return [
            f"learning {_duration(learning)}, encoding {self.num_images} images {_duration(encoding)} "
            f"({each_ms:.0f} ms each), building {_duration(building)}, certifying {_duration(certifying)}",
            f"{_duration(self.seconds)} of one worker in all; divide by their number",
            f"memory of a worker: about {self.worker_memory_mb:.0f} MB, with very large images up to "
            f"{Resources().image_memory_mb} MB more; the largest fit: {memory_mb:.0f} MB",
            f"run folder: about {self.kept_bytes / 1e6:.1f} MB, and {self.sample_bytes / 1e6:.1f} MB of "
            "samples until it is published",
            self.points,
            *self.index.lines(),
            f"cores that keep one device busy: {max(1.0, self.prepare_s / max(describe_s, 1e-9)):.1f}",
        ]


def estimate_run(run: RunFolder, settings: Settings) -> Estimate:
    """Rehearse with a few sampled images in a process of its own; the figures go into the event log."""
    segments = read_segments(run)
    images = read_sample(run, segments)
    num_images = sum(segment.num_images for segment in segments)
    background = run.background.latest()
    others = None if background is None else background.num_images
    chosen, networks = images[: max(NUM_IMAGES)], load_kept(run, settings)
    with ProcessPoolExecutor(1, SPAWN) as pool, signals_blocked():
        future = pool.submit(_estimate, chosen, settings, networks, len(images), num_images, others)
    estimate = future.result()
    run.events.write("estimate", **asdict(estimate))
    run.events.flush()
    return estimate


def _estimate(
    images: Sequence[PlannedImage],
    settings: Settings,
    networks: Mapping[str, ModelPart],
    num_sampled: int,
    num_images: int,
    num_background: int | None,
) -> Estimate:
    set_compute_threads(settings.numerics.threads)
    per_image = -(-settings.sample.num_patches // num_sampled)
    small = shrink_settings(settings, max(per_image, PATCHES_PER_IMAGE))
    words = count_point_words(settings, num_sampled, num_sampled * per_image)
    rehearse(images[:1], small(1), networks, words)  # what is imported or cached on first use
    counts = [count for count in NUM_IMAGES if count <= len(images)] or [len(images)]
    runs = [rehearse(images[:count], small(count), networks, words) for count in counts]
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
    index = estimate_index(
        settings, num_images, settings.reduction.dim if settings.reduction.method == "pca" else dim
    )
    steps |= index.steps
    prepare_s = steps["sample_patches"].seconds / num_sampled
    points = _describe_points(settings, count_point_words(settings, num_sampled, num_patches))
    return Estimate(num_images, steps, memory_mb, fit_mb, prepare_s, points, index)


def _sgd_s(training: CknTrainingSpec, begin_s: float, step_s: float) -> dict[str, float]:
    """`begin_s` is what each candidate, and then the layer itself, takes before its first step."""
    begun = {"search_rates": training.sgd_rate_candidates, "train_layer": 1}
    steps = count_sgd_steps(training)
    return {name: begun[name] * begin_s + count * step_s for name, count in steps.items()}


def _extrapolate(name: str, runs: Sequence[Rehearsal], size: Size) -> StepCost:
    first, last = runs[0], runs[-1]
    before, after = (one.costs.get(name, StepCost(0.0, 0.0)) for one in (first, last))
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


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
