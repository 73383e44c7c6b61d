"""Geometric verification: how near the transform of two images comes to the true one, and what it takes.

    python benchmarks/geometry.py --scenes OXFORD_AFFINE --train-images PHOTOS [--unrelated FOLDER]

Scenes have the homographies from their first image to each other. Regions of both images are matched (mutual
nearest descriptors) and verified by `core/geometry.py`; OpenCV's MAGSAC gets the same matches. Error: the
median distance between where the estimated and the true homography take a grid of points of image 1 that
image 2 shows, in pixels. Milliseconds: CPU time of the verification alone, one thread, the median of some
runs. With FOLDER (Holidays, say), inliers of pairs that have nothing in common. A descriptor is learned on
PHOTOS with the preset's settings; `rootsift@12` says another region.

Then, on generated points, the stages of a search: selective matching of 1,000 candidates, tentative matches
of 100, geometry of 100 with 100 matches each (a third of them right in half of the candidates, else none).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything that starts a thread pool

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from ckn_scale.config import Settings, load_settings
from ckn_scale.core.geometry import verify_candidates, verify_matches
from ckn_scale.core.numerics import set_compute_threads
from ckn_scale.core.selective_matching import (
    PointSets,
    aggregate_points,
    make_query,
    match_mutually,
    match_points,
    score_points,
)
from ckn_scale.evaluate.cache import ContentCache
from ckn_scale.evaluate.descriptors import fit_member, parse_requests
from ckn_scale.evaluate.matching import measure_distances
from ckn_scale.evaluate.patch_table import ANY_PIXELS
from ckn_scale.evaluate.regions import ImageFile, KeyedDescriptor, RegionReader, describe_regions
from ckn_scale.evaluate.report import format_table
from ckn_scale.evaluate.scenes import Scene, read_scenes
from ckn_scale.evaluate.training_images import TrainingPatches, find_images

MAGSAC_PX = 3.0
GRID_STEP_PX = 20
LAPS = 5
NUM_UNRELATED = 50  # pairs


def time_call(call: Callable[[], Any], laps: int = LAPS) -> tuple[Any, float]:
    """What it returns, and the median of its CPU time in milliseconds."""
    taken = []
    for _ in range(laps):
        started = time.process_time()
        result = call()
        taken.append(1e3 * (time.process_time() - started))
    return result, statistics.median(taken)


def fit(
    name: str, region: float, settings: Settings, arguments: argparse.Namespace, cache: ContentCache
) -> list[KeyedDescriptor]:
    reader = RegionReader(settings.images, settings.keypoints, settings.patches, cache)
    training = TrainingPatches(find_images(arguments.train_images), reader, lambda *_: None)
    source = training.source(region, settings.sample)
    members = parse_requests(name, lambda _: settings)[0].members
    return [fit_member(member, None, source, cache) for member in members]


def measure_scene(
    scene: Scene, fitted: list[KeyedDescriptor], reader: RegionReader
) -> Iterator[dict[str, Any]]:
    rows, found = {}, {}
    for number, file in scene.images.items():
        found[number] = reader.detect(file)
        described = [describe_regions(reader, file, one)[0] for one in fitted]
        rows[number] = np.concatenate(described, axis=1)
    for number, homography in scene.homographies.items():
        i, j = match_mutually(measure_distances(rows[1], rows[number]))
        frames = found[1].keypoints.frames[i], found[number].keypoints.frames[j]
        sizes = [(one.width_px, one.height_px) for one in (found[1], found[number])]
        ours, ours_ms = time_call(lambda: verify_matches(*frames, *sizes))  # noqa: B023
        rival, rival_ms = time_call(lambda: run_magsac(frames[0][..., 2], frames[1][..., 2]))  # noqa: B023
        yield {
            "scene": scene.name,
            "pair": f"1–{number}",
            "matches": len(i),
            "kind": ours.kind,
            "inliers": len(ours.inliers),
            "error_px": measure_error(ours.transform, homography, *sizes),
            "ms": ours_ms,
            "magsac_inliers": rival[1],
            "magsac_error_px": measure_error(rival[0], homography, *sizes),
            "magsac_ms": rival_ms,
        }


def count_chance(folder: Path, fitted: list[KeyedDescriptor], reader: RegionReader) -> list[int]:
    """Inliers of pairs of images that lie half a folder apart, ascending."""
    paths, counts = find_images(folder), []
    half = len(paths) // 2
    for position in range(0, half, max(1, half // NUM_UNRELATED)):
        files = [ImageFile(paths[position + shift]) for shift in (0, half)]
        found = [reader.detect(file) for file in files]
        rows = [
            np.concatenate([describe_regions(reader, file, one)[0] for one in fitted], axis=1)
            for file in files
        ]
        i, j = match_mutually(measure_distances(*rows))
        frames = found[0].keypoints.frames[i], found[1].keypoints.frames[j]
        sizes = [(one.width_px, one.height_px) for one in found]
        counts.append(len(verify_matches(*frames, *sizes).inliers))
    return sorted(counts)


def run_magsac(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray | None, int]:
    cv2.setRNGSeed(0)
    points = first.astype(np.float64), second.astype(np.float64)
    transform, mask = cv2.findHomography(*points, cv2.USAC_MAGSAC, MAGSAC_PX, maxIters=20_000)
    return transform, 0 if mask is None else int(mask.sum())


def measure_error(
    transform: np.ndarray | None, truth: np.ndarray, size: tuple[int, int], other: tuple[int, int]
) -> float:
    if transform is None:
        return float("inf")
    x, y = np.meshgrid(np.arange(0, size[0], GRID_STEP_PX), np.arange(0, size[1], GRID_STEP_PX))
    grid = np.stack([x.ravel(), y.ravel(), np.ones(x.size)])
    there, estimated = (one[:2] / one[2] for one in (truth @ grid, transform @ grid))
    shown = (there >= 0).all(axis=0) & (there[0] <= other[0] - 1) & (there[1] <= other[1] - 1)
    return float(np.median(np.hypot(*(there - estimated)[:, shown])))


def make_points(
    rng: np.random.Generator, images: int, points: int, words: int, *, by_word: bool = False
) -> PointSets:
    chosen = rng.integers(0, words, (images, points), dtype=np.uint16)
    if by_word:
        chosen.sort(axis=1)
    codes = rng.integers(0, 256, (images * points, 16), np.uint8)
    return PointSets(chosen.ravel(), codes, np.arange(images + 1) * points)


def make_matches(rng: np.random.Generator, candidates: int, matches: int) -> tuple[np.ndarray, np.ndarray]:
    """Frames (N, 2, 3) of both images; a third of every other candidate's is right, up to noise."""
    first, second = np.zeros((2, candidates * matches, 2, 3))
    turns = rng.uniform(-1, 1, (candidates, 2, 2)) * 0.3 + np.eye(2)
    linear = np.repeat(turns, matches, axis=0)
    first[..., :2] = rng.uniform(2, 10, (len(first), 1, 1)) * (
        np.eye(2) + rng.normal(0, 0.2, (len(first), 2, 2))
    )
    first[..., 2] = rng.uniform(0, 800, (len(first), 2))
    second[..., :2] = linear @ first[..., :2] @ (np.eye(2) + rng.normal(0, 0.1, (len(first), 2, 2)))
    second[..., 2] = (linear @ first[..., 2:])[..., 0] + rng.normal(0, 2, (len(first), 2))
    wrong = (rng.random(len(first)) > 1 / 3) | np.repeat(np.arange(candidates) % 2 > 0, matches)
    second[wrong, :, 2] = rng.uniform(0, 800, (int(wrong.sum()), 2))
    return first, second


def time_stages() -> list[tuple[str, float]]:
    """Milliseconds of each stage of a query, on generated points."""
    rng = np.random.default_rng(0)
    thousand, hundred = make_points(rng, 1000, 800, 4096), make_points(rng, 100, 800, 4096)
    words = rng.integers(0, 4096, (800, 3)).astype(np.uint16)
    codes = rng.integers(0, 256, (800, 3, 16), np.uint8)
    query, by_word = make_query(words, codes), make_points(rng, 1000, 800, 4096, by_word=True)
    first, second = make_matches(rng, 100, 100)
    offsets, sizes = np.arange(101) * 100, np.full((100, 2), 800)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("a query's points aggregated, 800 with 3 words", lambda: make_query(words, codes)),
        ("selective scores, 1,000 candidates of 800 points", lambda: score_points(query, by_word)),
        ("tentative matches within words, 100 candidates", lambda: match_points(words, codes, hundred)),
        (
            "geometry, 100 candidates of 100 matches",
            lambda: verify_candidates(first, second, offsets, (800, 800), sizes),
        ),
        (
            "the same by OpenCV's MAGSAC",
            lambda: [
                run_magsac(first[start : start + 100, :, 2], second[start : start + 100, :, 2])
                for start in offsets[:-1]
            ],
        ),
        ("points aggregated, 1,000 images (when built)", lambda: aggregate_points(thousand)),
    ]
    return [(name, time_call(call)[1]) for name, call in calls]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenes", type=Path, required=True, help="a folder of scenes with homographies")
    parser.add_argument("--train-images", type=Path, required=True)
    parser.add_argument("--unrelated", type=Path, help="a folder; images half of it apart share nothing")
    parser.add_argument("--descriptors", default="ckn,rootsift,rootsift@12")
    parser.add_argument("--preset", default="compact")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    set_compute_threads(1)
    settings, cache = load_settings(arguments.preset), ContentCache(arguments.cache)
    images = replace(settings.images, max_pixels=ANY_PIXELS, min_side_px=1, exif_orientation=False)
    scenes, results, unrelated = read_scenes(arguments.scenes), [], {}
    header = ["scene", "pair", "matches", "kind", "inliers", "error px", "ms"]
    for request in arguments.descriptors.split(","):
        name, _, at = request.partition("@")
        region = float(at or settings.patches.region)
        fitted = fit(name, region, settings, arguments, cache)
        reader = RegionReader(images, settings.keypoints, settings.patches, cache).with_region(region)
        rows = [row for scene in scenes for row in measure_scene(scene, fitted, reader)]
        results += [{"descriptor": name, "region": region, **row} for row in rows]
        cells = [
            [
                *(str(row[key]) for key in ("scene", "pair", "matches", "kind", "inliers")),
                f"{row['error_px']:.1f}",
                f"{row['ms']:.1f}",
                str(row["magsac_inliers"]),
                f"{row['magsac_error_px']:.1f}",
                f"{row['magsac_ms']:.1f}",
            ]
            for row in rows
        ]
        print(f"\n{name}, region {region:g}:\n")
        print(format_table([*header, "MAGSAC inliers", "error px", "ms"], cells), flush=True)
        if arguments.unrelated is not None:
            photos = replace(reader, images=settings.images)
            unrelated[request] = counts = count_chance(arguments.unrelated, fitted, photos)
            print(
                f"\n{len(counts)} unrelated pairs: {counts[len(counts) // 2]} inliers in the median, ", end=""
            )
            print(f"{counts[-1]} at most")
    stages = time_stages()
    print("\n" + format_table(["stage, one thread", "ms"], [[name, f"{ms:.1f}"] for name, ms in stages]))
    if arguments.json is not None:
        content = {"pairs": results, "unrelated_inliers": unrelated, "stages_ms": dict(stages)}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
