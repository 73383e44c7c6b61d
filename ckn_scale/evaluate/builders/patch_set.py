"""From scenes with tracks to a set on disk: points and images drawn evenly from all scenes, split by scene.

OUT/train/patches/<scene>-<point>/00.png …   views of a point, the first is the query
OUT/train/images/groups.tsv                  image, scene and role
OUT/test/…                                   the same of other scenes
OUT/build.json                               what was made of what

`evaluate patches --protocol rome` reads the former, `evaluate images --protocol groups` the latter.
"""

from __future__ import annotations

import csv
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from ckn_scale.config import Settings
from ckn_scale.core.descriptors.network import ProjectedDescriptor
from ckn_scale.core.descriptors.sift import SiftNetwork
from ckn_scale.core.pca import learn_projection
from ckn_scale.core.sampling import hash_priorities
from ckn_scale.errors import InputError
from ckn_scale.evaluate.builders.cameras import Camera
from ckn_scale.evaluate.builders.reconstructions import Reconstruction
from ckn_scale.evaluate.builders.tracks import Regions, join_matches, match_scene
from ckn_scale.evaluate.cache import ContentCache, hash_code, make_key
from ckn_scale.evaluate.image_sets import GROUPS_FILE
from ckn_scale.evaluate.parallel import describe_files
from ckn_scale.evaluate.regions import Detected, ImageFile, KeyedDescriptor, RegionReader, describe_regions
from ckn_scale.evaluate.training_images import Progress

TRAIN, TEST = "train", "test"


@dataclass(frozen=True)
class BuildPlan:
    """How much is drawn of what; the defaults are the paper's."""

    num_points: int = 1000  # of either split
    num_views: int = 10  # of a point: one query, the others to be found
    num_images: int = 1000  # queries of either split, and as many targets
    tolerance_px: float = 3.0
    test_share: float = 1 / 3  # of the scenes
    seed: int = 0


@dataclass(frozen=True)
class Tracked:
    """A scene with the groups of its regions that show one point each."""

    name: str
    files: tuple[ImageFile, ...]
    detected: tuple[Detected, ...]
    groups: tuple[tuple[tuple[int, int], ...], ...]  # of (image, region)
    facts: dict[str, int]


def track_scene(
    scene: Reconstruction,
    reader: RegionReader,
    plan: BuildPlan,
    on_progress: Progress,
    *,
    workers: int = 1,
) -> Tracked:
    """Detect, describe by SIFT, match all pairs, filter, join; what the cache knows is not redone."""
    files = tuple(ImageFile(view.path) for view in scene.views)
    keyed = _make_sift()
    describe_files(files, reader, keyed, f"{scene.name}: regions", on_progress, workers=workers)
    detected = tuple(reader.detect(file) for file in files)
    regions = [
        Regions(_locate(view.camera, found), describe_regions(reader, file, keyed)[0])
        for view, found, file in zip(scene.views, detected, files, strict=True)
    ]
    tell = partial(on_progress, f"{scene.name}: pairs")
    matches = match_scene(scene.views, regions, tell, tolerance_px=plan.tolerance_px)
    groups = join_matches(scene.views, regions, matches, tolerance_px=plan.tolerance_px)
    starts = np.cumsum([0, *(len(one.rows) for one in regions)])
    images = [np.searchsorted(starts, group, side="right") - 1 for group in groups]
    located = tuple(
        tuple(zip(of.tolist(), (np.array(group) - starts[of]).tolist(), strict=True))
        for of, group in zip(images, groups, strict=True)
    )
    facts = {
        "images": len(files),
        "regions": int(starts[-1]),
        "matches": matches.proposed,
        "epipolar": len(matches.first),
        "points": len(groups),
        "most_views": max((len(group) for group in groups), default=0),
        "points_of_enough_views": sum(len(group) >= plan.num_views for group in groups),
    }
    return Tracked(scene.name, files, detected, located, facts)


def make_reader(settings: Settings, cache: ContentCache) -> RegionReader:
    """Reconstructions know pixels as they are stored, whatever EXIF says of orientation."""
    images = replace(settings.images, exif_orientation=False)
    return RegionReader(images, settings.keypoints, settings.patches, cache)


def _make_sift() -> KeyedDescriptor:
    sift = SiftNetwork()
    descriptor = ProjectedDescriptor(sift, learn_projection(np.empty((0, sift.dim)), None))
    key = make_key("sift", hash_code(), sift.root, sift.window_sigma, sift.smoothing_px)
    return KeyedDescriptor(descriptor, key)


def _locate(camera: Camera, found: Detected) -> np.ndarray:
    """(N, 2) centres of regions in pixels of the pinhole; they were found at working size."""
    scale = np.array([camera.width_px / found.width_px, camera.height_px / found.height_px])
    centres = found.keypoints.frames[:, :, 2].astype(np.float64)
    return camera.undistort((centres + 0.5) * scale)


def split_scenes(names: Sequence[str], plan: BuildPlan) -> dict[str, str]:
    """train or test by scene: those of the largest hash are test, one at least where there are two."""
    order = sorted(names, key=lambda name: _hash(plan.seed, name))
    num_test = min(max(1, round(plan.test_share * len(names))), len(names) - 1) if plan.test_share else 0
    return {name: TEST if place < num_test else TRAIN for place, name in enumerate(order)}


def _hash(seed: int, name: str, *numbers: int) -> int:
    keys = (np.array([one]) for one in (zlib.crc32(name.encode()), *numbers))
    return int(hash_priorities(seed, *keys)[0])


@dataclass(frozen=True)
class ChosenPoint:
    scene: Tracked
    number: int  # of the group
    views: tuple[tuple[int, int], ...]  # (image, region); the first is the query


def choose_points(scenes: Sequence[Tracked], plan: BuildPlan) -> list[ChosenPoint]:
    """As many of each scene as far as it has them, drawn by hash."""
    ranked = []
    for place, scene in enumerate(scenes):
        enough = [k for k, group in enumerate(scene.groups) if len(group) >= plan.num_views]
        order = sorted(enough, key=lambda number: _hash(plan.seed, scene.name, number))
        ranked += [(rank, place, number) for rank, number in enumerate(order)]
    chosen = []
    for _, place, number in sorted(ranked)[: plan.num_points]:
        scene = scenes[place]
        views = sorted(scene.groups[number], key=lambda one: _hash(plan.seed, scene.name, number, *one))
        chosen.append(ChosenPoint(scene, number, tuple(views[: plan.num_views])))
    return chosen


def write_points(
    folder: Path, points: Sequence[ChosenPoint], reader: RegionReader, on_progress: Progress
) -> None:
    """A folder of patches for each point; every image is decoded once."""
    wanted: dict[tuple[str, int], list[tuple[int, Path]]] = defaultdict(list)
    scenes = {point.scene.name: point.scene for point in points}
    for point in points:
        place = folder / f"{point.scene.name}-{point.number:06d}"
        place.mkdir(parents=True)
        for view, (image, region) in enumerate(point.views):
            wanted[point.scene.name, image].append((region, place / f"{view:02d}.png"))
    for done, ((name, image), items) in enumerate(sorted(wanted.items()), 1):
        scene = scenes[name]
        regions = [region for region, _ in items]
        patches = reader.extract_some(scene.files[image], scene.detected[image], regions)
        for (_, path), patch in zip(items, patches, strict=True):
            path.write_bytes(cv2.imencode(".png", patch[..., ::-1])[1].tobytes())
        on_progress(f"{folder.parent.name}: patches", done, len(wanted))


def choose_images(scenes: Sequence[Tracked], plan: BuildPlan) -> Iterator[tuple[Path, str, str]]:
    """Image, scene and role; as many of each scene as far as it has them, queries and targets in turn."""
    ranked = []
    for place, scene in enumerate(scenes):
        files = sorted(scene.files, key=lambda file: _hash(plan.seed, f"{scene.name}/{file.path.name}"))
        whole = files[: len(files) // 2 * 2]  # a query without a target finds nothing
        ranked += [(rank // 2, place, rank % 2, file.path) for rank, file in enumerate(whole)]
    for _, place, is_target, path in sorted(ranked)[: 2 * plan.num_images]:
        yield path.absolute(), scenes[place].name, "target" if is_target else "query"


def write_images(folder: Path, rows: Sequence[tuple[Path, str, str]]) -> None:
    folder.mkdir(parents=True)
    with (folder / GROUPS_FILE).open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, delimiter="\t", lineterminator="\n")
        table.writerow(["image", "group", "role"])
        table.writerows([str(path), scene, role] for path, scene, role in rows)


def write_set(
    folder: Path,
    scenes: Sequence[Tracked],
    reader: RegionReader,
    plan: BuildPlan,
    on_progress: Progress,
) -> dict[str, Any]:
    """Both splits, and what they hold; InputError when no point has enough views."""
    most = max((scene.facts["most_views"] for scene in scenes), default=0)
    if most < plan.num_views:
        raise InputError(
            f"no point is seen in {plan.num_views} images, the best in {most}: give --views {max(most, 2)} "
            "or fewer, more regions (--set keypoints.max_keypoints=2000), or more images"
        )
    split_of, splits = split_scenes([scene.name for scene in scenes], plan), {}
    for split in sorted(set(split_of.values())):
        members = [scene for scene in scenes if split_of[scene.name] == split]
        points, images = choose_points(members, plan), list(choose_images(members, plan))
        write_points(folder / split / "patches", points, reader, on_progress)
        write_images(folder / split / "images", images)
        splits[split] = {
            "scenes": [scene.name for scene in members],
            "points": len(points),
            "patches": sum(len(point.views) for point in points),
            "query_images": sum(role == "query" for _, _, role in images),
            "target_images": sum(role == "target" for _, _, role in images),
        }
    return splits
