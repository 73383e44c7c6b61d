"""Both solvers on the same patches: kernel error against training seconds, and the retrieval each gives.

    python benchmarks/train.py [--images FOLDER] [--filters 256] [--sgd-iterations 3000] [--json FILE]
    python benchmarks/train.py --images FOLDER --published     # the paper's sizes and schedule: hours

Learns the second layer of the paper's `grad` network, by spherical k-means + Nyström and by the published
stochastic gradient descent, from sub-patches of the images (scikit-image's photographs without --images).
SGD's seconds include the search for its rate.
The kernel error is relative, on pairs that no solver has seen: 1 is predicting zero. Retrieval: patches of
other images, each in ten disturbed views; one view is the query, the other nine are to be found among all
(mean average precision). One thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from skimage import data

from ckn_scale.core.ckn import encode_patches
from ckn_scale.core.ckn_model import Ckn, CknLayer
from ckn_scale.core.ckn_sgd import candidate_rates, choose_rate, descend, draw_filters, pose_problem, try_rate
from ckn_scale.core.ckn_training import (
    Subpatches,
    choose_alpha,
    draw_subpatches,
    fit_layer,
    measure_kernel_error,
    start_ckn,
    subpatches_per_patch,
)
from ckn_scale.core.descriptors import PatchDescriptor
from ckn_scale.core.descriptors.ckn import CknNetwork
from ckn_scale.core.descriptors.network import ProjectedDescriptor
from ckn_scale.core.descriptors.sift import SiftNetwork
from ckn_scale.core.keypoints import Keypoints
from ckn_scale.core.patches import extract_patches
from ckn_scale.core.pca import fit_projection
from ckn_scale.core.preprocessor import detect_keypoints
from ckn_scale.core.specs import CknSpec, CknTrainingSpec, KeypointSpec, LayerSpec, PatchSpec, ProjectionSpec
from ckn_scale.evaluate.metrics import average_precision

PHOTOS = ("astronaut", "coffee", "chelsea", "rocket")
VIEWS = 10
KMEANS_ITERATIONS = (1, 2, 5, 10, 20)
SGD_STOPS = (1000, 2000, 3000, 10_000, 30_000, 100_000, 200_000, 300_000)
PROJECTION_PATCHES = 4000
PUBLISHED = {"filters": 1024, "sgd_iterations": 300_000, "subpatches": 1_250_000, "rates": 41, "dim": 1024}
PATCHES = PatchSpec()


@dataclass(frozen=True)
class Task:
    """What both solvers are given, and what judges them."""

    spec: CknSpec
    start: Ckn  # everything below the layer to learn
    patches: np.ndarray
    rows: np.ndarray  # sub-patches to learn from
    left: np.ndarray  # pairs of sub-patches that were not learned from
    right: np.ndarray
    alpha: float
    views: np.ndarray  # (points · 10, S, S, 3)


@dataclass(frozen=True)
class Fit:
    solver: str
    iterations: int
    seconds: float
    layer: CknLayer


def read_images(folder: Path | None) -> list[np.ndarray]:
    if folder is None:
        return [getattr(data, name)() for name in PHOTOS]
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg", ".png"))
    if not files:
        raise SystemExit(f"no JPEG or PNG in {folder}")
    return [cv2.cvtColor(cv2.imread(str(file)), cv2.COLOR_BGR2RGB) for file in files]


def cut_training_patches(images: list[np.ndarray], per_image: int) -> np.ndarray:
    spec = KeypointSpec(max_keypoints=per_image)
    return np.concatenate(
        [extract_patches(image, detect_keypoints(image, spec), PATCHES) for image in images]
    )


def cut_views(images: list[np.ndarray], per_image: int) -> np.ndarray:
    """Ten views of each point: turned, scaled, stretched, shifted, then blurred, lit and made noisy."""
    rng, views = np.random.default_rng(0), []
    for image in images:
        keypoints = detect_keypoints(image, KeypointSpec(max_keypoints=per_image))
        frames = np.repeat(keypoints.frames, VIEWS, axis=0)
        frames[:, :, :2] = frames[:, :, :2] @ draw_distortions(len(frames), rng)
        frames[:, :, 2] += 0.08 * rng.normal(size=(len(frames), 2)) * scales_of(frames)
        patches = extract_patches(image, Keypoints(frames, np.ones(len(frames), np.float32)), PATCHES)
        views.append(np.array([disturb(patch, rng) for patch in patches]))
    return np.concatenate(views)


def draw_distortions(count: int, rng: np.random.Generator) -> np.ndarray:
    """(count, 2, 2) float32: small rotations, scalings and stretchings."""
    angles_rad, scales = rng.normal(0, np.deg2rad(8), count), np.exp(rng.normal(0, 0.12, count))
    turns = np.array([[np.cos(angles_rad), -np.sin(angles_rad)], [np.sin(angles_rad), np.cos(angles_rad)]])
    stretch = np.exp(rng.normal(0, 0.08, count)) * np.array([[1.0], [-1.0]])
    stretch[1] = 1 / stretch[0]
    return (turns * (scales * stretch)[None]).transpose(2, 0, 1).astype(np.float32)


def scales_of(frames: np.ndarray) -> np.ndarray:
    return PATCHES.region * np.sqrt(np.abs(np.linalg.det(frames[:, :, :2])))[:, None]


def disturb(patch: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    blurred = cv2.GaussianBlur(patch, (0, 0), rng.uniform(0.2, 1.6)).astype(np.float32)
    lit = 255 * (blurred / 255) ** np.exp(rng.normal(0, 0.2)) * rng.uniform(0.7, 1.2, 3)
    return np.clip(lit + rng.normal(0, 6, patch.shape), 0, 255).astype(np.uint8)


def pose_task(arguments: argparse.Namespace) -> Task:
    images = read_images(arguments.images)
    half = len(images) // 2
    patches = cut_training_patches(images[:half], arguments.patches_per_image)
    spec = CknSpec("grad", (LayerSpec(1, 16, 3), LayerSpec(4, arguments.filters, 2)))
    start = start_ckn(spec, PATCHES.size_px)
    training = CknTrainingSpec(num_subpatches=arguments.subpatches)
    per_patch = subpatches_per_patch(training, len(patches))
    drawn = draw_subpatches(start, spec, patches, np.arange(len(patches)), per_patch, seed=0)
    rows = Subpatches.merge([drawn], arguments.subpatches).rows
    kept, tenth = len(rows) * 8 // 10, len(rows) // 10
    alpha = choose_alpha(rows[:kept], spec.alpha_quantile)
    views = cut_views(images[half:], max(1, arguments.points // (len(images) - half)))
    left, right = rows[kept : kept + tenth], rows[kept + tenth : kept + 2 * tenth]
    return Task(spec, start, patches, rows[:kept], left, right, alpha, views)


def fit_by_nystrom(task: Task) -> Iterator[Fit]:
    for iterations in KMEANS_ITERATIONS:
        training = CknTrainingSpec(kmeans_iterations=iterations)
        start = time.perf_counter()
        layer = fit_layer(task.rows, task.spec.layers[1], task.alpha, training)
        yield Fit("nystrom", iterations, time.perf_counter() - start, layer)


def fit_by_sgd(task: Task, iterations: int, num_rates: int) -> Iterator[Fit]:
    """As published, seen at several stops on the way."""
    training = CknTrainingSpec(
        sgd_iterations=iterations,
        sgd_validate_every=min(1000, iterations),
        sgd_rate_candidates=num_rates,
    )
    begun = time.perf_counter()
    problem = pose_problem(torch.from_numpy(task.rows), task.alpha, training)
    start = draw_filters(problem, task.spec.layers[1].num_filters, seed=0)
    rates = candidate_rates(training)
    rate = choose_rate(rates, [try_rate(problem, start, rate, training) for rate in rates])
    print(f"sgd: rate {rate:.3g} of {num_rates} after {time.perf_counter() - begun:.0f} s", flush=True)
    seen = []

    def watch(done: int, error: float, filters: torch.Tensor) -> None:
        if done in SGD_STOPS or done == iterations:
            seconds = time.perf_counter() - begun
            print(f"sgd: {done} iterations, {seconds:.0f} s, error {error:.5f}", flush=True)
            seen.append((done, seconds, filters.numpy()))

    descend(problem, start, rate, training, watch=watch)
    for done, seconds, filters in seen:
        layer = CknLayer(task.spec.layers[1], task.alpha, filters[:, :-1].copy(), filters[:, -1].copy())
        yield Fit("sgd", done, seconds, layer)


def finish_descriptor(task: Task, layer: CknLayer, dim: int) -> ProjectedDescriptor:
    ckn = Ckn(task.spec, PATCHES.size_px, (*task.start.layers, layer))
    rows = encode_patches(ckn, task.patches[:: max(1, len(task.patches) // PROJECTION_PATCHES)])
    return ProjectedDescriptor(CknNetwork(ckn), fit_projection(rows, ProjectionSpec(dim=dim, whitening=0.5)))


def measure_map(descriptor: PatchDescriptor, views: np.ndarray) -> float:
    """The first view of each point is the query, the others of all points are ranked."""
    rows = descriptor.describe(views)
    points = np.repeat(np.arange(len(views) // VIEWS), VIEWS)
    is_query = np.arange(len(views)) % VIEWS == 0
    similarity, targets = rows[is_query] @ rows[~is_query].T, points[~is_query]
    order = np.argsort(-similarity, axis=1, kind="stable")
    return float(np.mean([average_precision(targets[row] == point) for point, row in enumerate(order)]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--images", type=Path, help="half of them to learn from, half to retrieve")
    parser.add_argument("--filters", type=int, default=256)
    parser.add_argument("--sgd-iterations", type=int, default=3000)
    parser.add_argument("--rates", type=int, default=12, help="candidates 2^(-k/2) of SGD's rate")
    parser.add_argument("--subpatches", type=int, default=50_000, help="four fifths of them are learned from")
    parser.add_argument("--patches-per-image", type=int, default=500)
    parser.add_argument("--points", type=int, default=300, help="to retrieve, each in ten views")
    parser.add_argument("--dim", type=int, default=128, help="of the descriptor after its projection")
    parser.add_argument("--published", action="store_true", help="the paper's sizes and schedule")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.published:
        vars(arguments).update(PUBLISHED)
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    task = pose_task(arguments)
    shape = f"{len(task.rows)} sub-patches, {arguments.filters} filters, α {task.alpha:.3f}"
    print(f"{shape}; retrieval of {len(task.views) // VIEWS} points")
    print(f"{'solver':<10}{'iterations':>11}{'seconds':>9}{'kernel error':>14}{'mAP':>8}")
    results = []
    for fits in (fit_by_nystrom(task), fit_by_sgd(task, arguments.sgd_iterations, arguments.rates)):
        for fit in fits:
            error = measure_kernel_error(fit.layer, task.left, task.right)
            score = measure_map(finish_descriptor(task, fit.layer, arguments.dim), task.views)
            print(
                f"{fit.solver:<10}{fit.iterations:>11}{fit.seconds:>9.1f}{error:>14.4f}{100 * score:>8.1f}",
                flush=True,
            )
            row = {"solver": fit.solver, "iterations": fit.iterations, "seconds": fit.seconds}
            results.append({**row, "kernel_error": error, "map": score})
    for rival in (SiftNetwork(), SiftNetwork(root=True)):
        print(f"{rival.name:<44}{100 * measure_map(rival, task.views):>8.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"alpha": task.alpha, "results": results}, indent=2))


if __name__ == "__main__":
    main()
