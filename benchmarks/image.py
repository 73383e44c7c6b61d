"""One image to its vector and points, by stage: the preset's CKNs against OpenCV's RootSIFT, both with VLAD.

    python benchmarks/image.py --images HOLIDAYS --train-images PHOTOS [--preset fast] [--json FILE]

Ours also flattens the vector, makes its code, and gives each point its word (of 4,096, as many as collections
of up to some thousand images have) and code. Both take the preset's number of points an image and as many
words of the VLAD; both learn on PHOTOS. Time: CPU time of one thread, median over some images of HOLIDAYS,
each side in a process of its own, as a user runs it. OpenCV's scale space is large, and what it takes depends
on malloc: by default its pages go back to the system after each image and have to be cleared for the next;
`pages kept` tells malloc to keep them (both sides). Retrieval: mean average precision on HOLIDAYS (named as
that set: queries end in 00), mean of three codebooks, without and with unit blocks, the better one counts.
`--no-map` leaves retrieval out.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything that starts a thread pool

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from ckn_scale.config import Settings, load_settings
from ckn_scale.core.encoder import Channel, ImageEncoder
from ckn_scale.core.flattening import fit_flattening
from ckn_scale.core.images import decode_image, to_luma
from ckn_scale.core.numerics import set_compute_threads
from ckn_scale.core.patches import extract_patches
from ckn_scale.core.pca import Projection
from ckn_scale.core.points import PointModel, fit_point_projection
from ckn_scale.core.preprocessor import PreparedImage, Preprocessor, detect_keypoints
from ckn_scale.core.specs import USUAL_WORDS
from ckn_scale.core.vector_codes import make_codec
from ckn_scale.core.vlad import aggregate_vlad, fit_codebook
from ckn_scale.evaluate.cache import ContentCache
from ckn_scale.evaluate.descriptors import fit_member, list_members, parse_requests
from ckn_scale.evaluate.image_sets import ImageSet, read_image_set
from ckn_scale.evaluate.image_table import ImageTable, Place, score_rankings
from ckn_scale.evaluate.regions import RegionReader
from ckn_scale.evaluate.training_images import TrainingPatches, find_images

SEEDS = (0, 1, 2)
NUM_NOISE = 300  # rows that the flattening is learned on, as many as bsds500 has photographs
MALLOC = {
    "malloc as it comes": {},
    "pages kept": {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)},
}
TITLES = {"ckn": "ours: vector and points", "opencv": "OpenCV RootSIFT + VLAD"}
Stages = dict[str, float]


class Stopwatch:
    """CPU seconds between the calls of `lap`."""

    def __init__(self) -> None:
        self.stages: Stages = {}
        self._last = time.process_time()

    def lap(self, stage: str) -> None:
        now = time.process_time()
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self._last
        self._last = now


def describe_by_opencv(image: np.ndarray, detector: Any, points: int, watch: Stopwatch) -> np.ndarray:
    """RootSIFT (N, 128) of OpenCV's own detector."""
    luma = to_luma(image)
    found = detector.detect(luma, None)
    found = sorted(found, key=lambda one: -one.response)[:points]
    watch.lap("detect")
    found, rows = detector.compute(luma, found)
    if rows is None:
        return np.empty((0, 128), np.float32)
    rows = np.sqrt(rows / np.maximum(rows.sum(axis=1, keepdims=True), 1e-12))
    watch.lap("describe")
    return rows.astype(np.float32)


def time_opencv(data: bytes, settings: Settings, words: np.ndarray, detector: Any) -> Stages:
    watch = Stopwatch()
    image = decode_image(data, settings.images)
    watch.lap("decode")
    rows = describe_by_opencv(image, detector, settings.keypoints.max_keypoints, watch)
    aggregate_vlad(rows, words, intra_normalise=True)
    watch.lap("aggregate")
    return watch.stages


def time_ours(data: bytes, settings: Settings, encoder: ImageEncoder) -> Stages:
    """All that encoding computes of an image, one after the other: its vector's code and its points."""
    watch = Stopwatch()
    image = decode_image(data, settings.images)
    watch.lap("decode")
    keypoints = detect_keypoints(image, settings.keypoints)
    watch.lap("detect")
    patches = extract_patches(image, keypoints, settings.patches)
    prepared = PreparedImage(image, keypoints, patches, (image.shape[1], image.shape[0]))
    watch.lap("patches")
    described = []
    for channel in encoder.channels:
        described.append(channel.describe([prepared], with_points=True))
        watch.lap(f"describe {channel.name}")
    vlad = encoder.aggregate([one.rows[0] for one in described])
    watch.lap("aggregate")
    make_codec(settings.reduction.stored, encoder.dim).encode(encoder.reduce(vlad[None]))
    watch.lap("reduce, code")
    encoder.encode_points(prepared, [one.points[0] for one in described if one.points])
    watch.lap("points")
    return watch.stages


def fit_encoder(settings: Settings, train: Sequence[Path], cache: ContentCache) -> ImageEncoder:
    """The preset's networks and words. Words of points are descriptors as they come and the flattening is
    learned on noise: what they are worth does not show in the time."""
    reader = RegionReader(settings.images, settings.keypoints, settings.patches, cache)
    source = TrainingPatches(train, reader, lambda *_: None).source(settings.patches.region, settings.sample)
    patches = source(min(20_000, settings.vlad.num_descriptors))
    channels, points = [], settings.points
    projections: dict[str, Projection] = {}
    for member, spec in zip(
        list_members(parse_requests("ckn", lambda _: settings)), settings.channels, strict=True
    ):
        descriptor = fit_member(member, None, source, cache).descriptor
        name, projector = spec.name, None
        if name in settings.point_channels:
            projections[name] = fit_point_projection(descriptor.network.describe(patches), points)
            projector = descriptor.network.fold(projections[name])
        words = fit_codebook(descriptor.describe(patches), settings.vlad.num_words)
        channels.append(Channel(name, descriptor, words, spec.weight, spec.max_points, projector))
    dim = sum(channel.centroids.size for channel in channels)
    noise = np.random.default_rng(0).standard_normal((NUM_NOISE, dim), np.float32)
    by_name = {channel.name: channel for channel in channels}
    num_words = min(points.num_words, USUAL_WORDS)
    described = [
        by_name[name].descriptor.describe_with(patches[:num_words], [by_name[name].points])[1]
        for name in projections
    ]
    model = PointModel(projections, np.concatenate(described, axis=1), points.max_points)
    return ImageEncoder(
        Preprocessor(settings.images, settings.keypoints, settings.patches),
        tuple(channels),
        settings.vlad.intra_normalise,
        fit_flattening(noise, NUM_NOISE // 4),
        model,
    )


def describe_files_by_opencv(
    paths: Sequence[Path], settings: Settings, detector: Any
) -> dict[Path, np.ndarray]:
    limit, watch = settings.keypoints.max_keypoints, Stopwatch()
    images = ((path, decode_image(path.read_bytes(), settings.images)) for path in paths)
    return {path: describe_by_opencv(image, detector, limit, watch) for path, image in images}


def measure_opencv_map(images: ImageSet, settings: Settings, train: Sequence[Path], detector: Any) -> float:
    learned = describe_files_by_opencv(train, settings, detector)
    rows = describe_files_by_opencv([file.path for file in images.database], settings, detector)
    pool = np.concatenate(list(learned.values()))
    pool = pool[np.random.default_rng(0).permutation(len(pool))[: settings.vlad.num_descriptors]]
    means = []
    for intra in (False, True):
        scores = []
        for seed in SEEDS:
            words = fit_codebook(pool, settings.vlad.num_words, seed=seed)
            vectors = {path: aggregate_vlad(one, words, intra_normalise=intra) for path, one in rows.items()}
            database = np.stack([vectors[file.path] for file in images.database])
            queries = np.stack([vectors[query.image.path] for query in images.queries])
            scores.append(score_rankings(images, queries @ database.T))
        means.append(float(np.mean(scores)))
    return max(means)


def measure_our_map(
    images: ImageSet, settings: Settings, train: Sequence[Path], cache: ContentCache
) -> float:
    requests = parse_requests("ckn", lambda _: settings)
    table = ImageTable(images, requests, settings, train, cache, lambda *_: None, seeds=SEEDS)
    cells = table.measure([Place(settings.patches.region, None)])["ckn", "none"]
    return max(cell.mean_score for cell in cells)


def take_medians(time_one: Callable[[bytes], Stages], files: Sequence[bytes]) -> Stages:
    laps = [time_one(data) for data in files]
    return {stage: statistics.median(lap[stage] for lap in laps) for stage in laps[0]}


def time_side(side: str, settings: Settings, arguments: argparse.Namespace) -> Stages:
    """Medians of one side, in this process."""
    images = read_image_set(arguments.images, "holidays")
    files = [file.read() for file in images.database[:: max(1, len(images.database) // arguments.timed)]]
    if side == "ckn":
        encoder = fit_encoder(settings, find_images(arguments.train_images), ContentCache(arguments.cache))
        return take_medians(lambda data: time_ours(data, settings, encoder), files)
    words = np.eye(128, dtype=np.float32)[: settings.vlad.num_words]
    detector = cv2.SIFT.create(settings.keypoints.max_keypoints)
    return take_medians(lambda data: time_opencv(data, settings, words, detector), files)


def time_in_child(side: str, environment: dict[str, str]) -> Stages:
    """The same in a process of its own."""
    command = [sys.executable, *sys.argv, "--side", side]
    child = subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True)
    stages: Stages = json.loads(child.stdout.splitlines()[-1])
    return stages


def print_stages(name: str, stages: Stages) -> None:
    total = sum(stages.values())
    print(f"\n{name}: {1e3 * total:.1f} ms an image")
    for stage, seconds in stages.items():
        print(f"  {stage:<20}{1e3 * seconds:>8.1f} ms  {100 * seconds / total:>5.1f} %")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, required=True, help="a folder named like the Holidays set")
    parser.add_argument("--train-images", type=Path, required=True)
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--set", action="append", default=[], help="key.path=value, over the preset")
    parser.add_argument("--timed", type=int, default=20, help="how many images are timed")
    parser.add_argument("--no-map", action="store_true", help="time only")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=list(TITLES), help=argparse.SUPPRESS)  # what a child measures
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    set_compute_threads(1)
    settings = load_settings(arguments.preset, None, arguments.set)
    if arguments.side is not None:
        print(json.dumps(time_side(arguments.side, settings, arguments)))
        return
    content: dict[str, Any] = {"preset": arguments.preset, "points": settings.keypoints.max_keypoints}
    for regime, environment in MALLOC.items():
        stages = {side: time_in_child(side, environment) for side in TITLES}
        for side, title in TITLES.items():
            print_stages(f"{title}, {regime}", stages[side])
        ratio = sum(stages["ckn"].values()) / sum(stages["opencv"].values())
        print(f"\ntime, ours / OpenCV, {regime}: {ratio:.2f}", flush=True)
        content[regime] = {"stages_s": stages, "time_ratio": ratio}
    if not arguments.no_map:
        content["map"] = measure_maps(settings, arguments)
        print("mAP: " + ", ".join(f"{side} {100 * value:.1f}" for side, value in content["map"].items()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


def measure_maps(settings: Settings, arguments: argparse.Namespace) -> dict[str, float]:
    images, train = read_image_set(arguments.images, "holidays"), find_images(arguments.train_images)
    detector = cv2.SIFT.create(settings.keypoints.max_keypoints)
    return {
        "ckn": measure_our_map(images, settings, train, ContentCache(arguments.cache)),
        "opencv": measure_opencv_map(images, settings, train, detector),
    }


if __name__ == "__main__":
    main()
