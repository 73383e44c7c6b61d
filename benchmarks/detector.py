"""Our Hessian-Affine detector against pyhesaff (the C++ original), kornia and OpenCV's SIFT detector.

    python benchmarks/detector.py [--data SCENES] [--photos FOLDER] [--points 1000 2000] [--json FILE]

Repeatability: share of regions found again with an overlap of at least 50 % (regions normalised to a
radius of 30 pixels, one to one, in the part both images show), over the scenes' homographies and
over synthetic tilts of photos. Time: CPU time on one thread, the least of the repeats, rivals in
turn on the same images, the same number of points each.

SCENES has the layout of the Oxford affine set: <scene>/img1…6.*, H1to2p…; without it that table is
left out. Without photos, tilts are made of generated images. pip install 'ckn-scale[bench]'.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before anything that starts a thread pool

import argparse
import importlib.util
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
from detector_rivals import RIVALS, Rival
from image_pairs import Pair, read_photos, read_scenes, tilt_photos

from ckn_scale.evaluate.matching import centres_inside, pair_regions, project_frames

TARGETS = {
    "repeatability on scenes, ours − pyhesaff": 4.0,
    "repeatability on tilts, ours − pyhesaff": 8.0,
    "speed with patches at 1000 points, ours / pyhesaff": 3.0,
    "speed with patches at 2000 points, ours / pyhesaff": 4.0,
    "speed, ours / kornia": 10.0,
    "time, ours / OpenCV SIFT": 0.6,
}


def measure_repeatability(pair: Pair, first: np.ndarray, second: np.ndarray) -> float:
    back = np.linalg.inv(pair.homography)
    first = first[centres_inside(project_frames(first, pair.homography), *pair.second.shape)]
    second = second[centres_inside(project_frames(second, back), *pair.first.shape)]
    fewer = min(len(first), len(second))
    if fewer == 0:
        return 0.0
    return 100 * len(pair_regions(project_frames(first, pair.homography), second)[0]) / fewer


def mean_repeatability(rival: Rival, pairs: list[Pair], num_points: int) -> dict[str, float]:
    """Mean per group (scene or tilt), and over the groups."""
    frames: dict[int, np.ndarray] = {}
    groups = defaultdict(list)
    for pair in pairs:
        for image in (pair.first, pair.second):
            if id(image) not in frames:
                frames[id(image)] = rival(image, num_points).find_frames()
        groups[pair.group].append(
            measure_repeatability(pair, frames[id(pair.first)], frames[id(pair.second)])
        )
    means = {group: float(np.mean(values)) for group, values in groups.items()}
    return {**means, "mean": float(np.mean(list(means.values())))}


def measure_seconds(
    images: list[np.ndarray], names: list[str], num_points: int, repeats: int
) -> dict[str, dict]:
    """Per rival: mean seconds per image to detect, and with patches; rivals in turn on each image."""
    total: dict[str, dict[str, float]] = {name: defaultdict(float) for name in names}
    for image in images:
        tasks = {name: RIVALS[name](image, num_points) for name in names}
        least: dict[tuple[str, str], float] = defaultdict(lambda: float("inf"))
        for _ in range(repeats):
            for name, task in tasks.items():
                least[name, "detect"] = min(least[name, "detect"], _seconds_of(task.detect))
                if task.cut_patches is not None:
                    least[name, "patches"] = min(least[name, "patches"], _seconds_of(task.cut_patches))
        for (name, part), seconds in least.items():
            total[name][part] += seconds / len(images)
        for name, task in tasks.items():
            total[name]["points"] += len(task.find_frames()) / len(images)
    return {name: dict(parts) for name, parts in total.items()}


def _seconds_of(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def print_repeatability(title: str, table: dict[str, dict[str, float]]) -> None:
    groups = list(next(iter(table.values())))
    print(f"\n{title}\n{'':14}" + "".join(f"{g:>10}" for g in groups))
    for name, row in table.items():
        print(f"{name:14}" + "".join(f"{row[g]:10.1f}" for g in groups))


def print_seconds(title: str, table: dict[str, dict[str, float]]) -> None:
    columns = ("points", "detect ms", "patches ms", "points/s", "with patches/s")
    print(f"\n{title}\n{'':14}" + "".join(f"{c:>16}" for c in columns))
    for name, row in table.items():
        patches = row.get("patches", np.nan)
        rates = (row["points"] / row["detect"], row["points"] / (row["detect"] + patches))
        figures = (row["points"], 1e3 * row["detect"], 1e3 * patches, *rates)
        print(f"{name:14}" + "".join(f"{f:16.1f}" if np.isfinite(f) else f"{'–':>16}" for f in figures))


def compare(scenes: dict, tilts: dict, seconds: dict[int, dict]) -> dict[str, float]:
    """The figures that TARGETS names, from whatever was measured."""
    result = {}
    for label, table in (("scenes", scenes), ("tilts", tilts)):
        if {"ours", "pyhesaff"} <= set(table):
            key = f"repeatability on {label}, ours − pyhesaff"
            result[key] = table["ours"]["mean"] - table["pyhesaff"]["mean"]
    for num_points, table in seconds.items():
        rate = {
            name: row["points"] / (row["detect"] + row.get("patches", 0.0)) for name, row in table.items()
        }
        if "pyhesaff" in table:
            result[f"speed with patches at {num_points} points, ours / pyhesaff"] = (
                rate["ours"] / rate["pyhesaff"]
            )
    last = seconds[min(seconds)]
    if "kornia" in last:
        result["speed, ours / kornia"] = last["kornia"]["detect"] / last["ours"]["detect"]
    if "OpenCV SIFT" in last:
        result["time, ours / OpenCV SIFT"] = last["ours"]["detect"] / last["OpenCV SIFT"]["detect"]
    return result


def print_comparison(figures: dict[str, float]) -> None:
    print()
    for name, value in figures.items():
        bound = TARGETS.get(name)
        wanted = "" if bound is None else f"   (wanted: {'≤' if name.startswith('time') else '≥'} {bound})"
        print(f"{name:55}{value:7.2f}{wanted}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data/oxford_affine"))
    parser.add_argument("--photos", type=Path, default=Path("../shared/data/holidays"))
    parser.add_argument("--num-photos", type=int, default=8)
    parser.add_argument("--points", type=int, nargs="+", default=[1000, 2000])
    parser.add_argument("--rivals", nargs="+", default=list(RIVALS), choices=list(RIVALS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def keep_installed(names: list[str]) -> list[str]:
    missing = [n for n in names if n in ("pyhesaff", "kornia") and importlib.util.find_spec(n) is None]
    if missing:
        print(f"{', '.join(missing)} missing: pip install 'ckn-scale[bench]'", file=sys.stderr)
    return [n for n in names if n not in missing]


def main() -> None:
    args = parse_arguments()
    cv2.setNumThreads(1)
    names = keep_installed(args.rivals)
    scene_pairs = list(read_scenes(args.data)) if args.data.is_dir() else []
    if not scene_pairs:
        print(f"{args.data} has no scenes: repeatability is measured on tilts alone", file=sys.stderr)
    tilt_pairs = list(tilt_photos(read_photos(args.photos, args.num_photos)))
    timed = list({id(p.first): p.first for p in scene_pairs or tilt_pairs}.values())
    seconds = {}
    for num_points in args.points:
        seconds[num_points] = measure_seconds(timed, names, num_points, args.repeats)
        print_seconds(
            f"CPU time per image of {np.mean([i.size for i in timed]) / 1e6:.2f} MP, {num_points} points",
            seconds[num_points],
        )
    fewest = min(args.points)
    tables = {}
    for label, pairs in (("scenes", scene_pairs), ("tilts", tilt_pairs)):
        tables[label] = {n: mean_repeatability(RIVALS[n], pairs, fewest) for n in names} if pairs else {}
        if pairs:
            print_repeatability(f"repeatability in % on {label}, {fewest} points", tables[label])
    figures = compare(tables["scenes"], tables["tilts"], seconds)
    print_comparison(figures)
    if args.json:
        args.json.write_text(json.dumps({"seconds": seconds, **tables, "figures": figures}, indent=2))


if __name__ == "__main__":
    main()
