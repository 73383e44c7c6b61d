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
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from ckn_scale.core.hessian_affine import detect_hessian_affine
from ckn_scale.core.patches import extract_patches
from ckn_scale.core.regions import centres_inside, pair_regions, project_frames
from ckn_scale.core.specs import KeypointSpec, PatchSpec

PATCH_PX = 51
HESAFF_REGION = 3.0 * 3.0**0.5  # pyhesaff's keypoints are this much larger than their scale
TILTS = (1.25, 1.5, 2.0, 2.5)
TARGETS = {
    "repeatability on scenes, ours − pyhesaff": 4.0,
    "repeatability on tilts, ours − pyhesaff": 8.0,
    "speed with patches at 1000 points, ours / pyhesaff": 3.0,
    "speed with patches at 2000 points, ours / pyhesaff": 4.0,
    "speed, ours / kornia": 10.0,
    "time, ours / OpenCV SIFT": 0.6,
}


@dataclass(frozen=True)
class Pair:
    group: str
    first: np.ndarray
    second: np.ndarray
    homography: np.ndarray


@dataclass(frozen=True)
class Task:
    """One rival on one image: what is compared, what is timed."""

    find_frames: Callable[[], np.ndarray]
    detect: Callable[[], object]
    cut_patches: Callable[[], object] | None = None


Rival = Callable[[np.ndarray, int], Task]


def prepare_ours(image: np.ndarray, num_points: int) -> Task:
    spec, patch_spec = (
        KeypointSpec(max_keypoints=num_points),
        PatchSpec(size_px=PATCH_PX, region=HESAFF_REGION),
    )
    keypoints = detect_hessian_affine(image, spec)
    return Task(
        lambda: detect_hessian_affine(image, spec).frames,
        lambda: detect_hessian_affine(image, spec),
        lambda: extract_patches(image, keypoints, patch_spec),
    )


def prepare_pyhesaff(image: np.ndarray, num_points: int) -> Task:
    """It tells no response, so the threshold for the wanted number is searched for, outside the clock.

    Its detection always describes the points too; counting does all of it but that, and is timed.
    """
    import pyhesaff

    threshold = _search_threshold(
        lambda t: pyhesaff.detect_num_feats_in_image(image, threshold=t), num_points
    )
    keypoints, _ = pyhesaff.detect_feats_in_image(image, threshold=threshold)
    frames = np.zeros((len(keypoints), 2, 3))
    frames[:, :, 2] = keypoints[:, :2]
    frames[:, 0, 0], frames[:, 1, 0], frames[:, 1, 1] = (keypoints[:, 2:5] / HESAFF_REGION).T
    return Task(
        lambda: frames,
        lambda: pyhesaff.detect_num_feats_in_image(image, threshold=threshold),
        lambda: pyhesaff.extract_patches(image, keypoints, patchSize=PATCH_PX),
    )


def _search_threshold(count: Callable[[float], int], wanted: int) -> float:
    low, high = 0.05, 60.0
    for _ in range(14):
        middle = (low * high) ** 0.5
        found = count(middle)
        if abs(found - wanted) <= 0.005 * wanted:
            break
        low, high = (middle, high) if found > wanted else (low, middle)
    return middle


def prepare_kornia(image: np.ndarray, num_points: int) -> Task:
    import kornia.feature as kf
    import torch
    from kornia.geometry import ScalePyramid

    torch.set_num_threads(1)
    detector = kf.ScaleSpaceDetector(
        num_points,
        resp_module=kf.BlobHessian(),
        scale_pyr_module=ScalePyramid(3, 1.6, 32),
        ori_module=kf.LAFOrienter(19),
        aff_module=kf.LAFAffineShapeEstimator(19),
        mr_size=1.0,
        minima_are_also_good=True,
    )
    tensor = torch.from_numpy(image)[None, None].float() / 255

    def detect() -> np.ndarray:
        with torch.no_grad():
            return detector(tensor)[0][0].numpy().astype(np.float64)

    return Task(detect, detect)


def prepare_sift(image: np.ndarray, num_points: int) -> Task:
    sift = cv2.SIFT_create(num_points)

    def find_frames() -> np.ndarray:
        keypoints = sift.detect(image)
        frames = np.zeros((len(keypoints), 2, 3))
        frames[:, :, 2] = [k.pt for k in keypoints]
        frames[:, 0, 0] = frames[:, 1, 1] = [k.size / 2 for k in keypoints]
        return frames

    return Task(find_frames, lambda: sift.detect(image))


RIVALS: dict[str, Rival] = {
    "ours": prepare_ours,
    "pyhesaff": prepare_pyhesaff,
    "kornia": prepare_kornia,
    "OpenCV SIFT": prepare_sift,
}


def read_scenes(folder: Path) -> Iterator[Pair]:
    for scene in sorted(p for p in folder.iterdir() if p.is_dir()):
        images = {p.stem: p for p in scene.glob("img*.*")}
        first = cv2.imread(str(images["img1"]), cv2.IMREAD_GRAYSCALE)
        for k in range(2, 7):
            second = cv2.imread(str(images[f"img{k}"]), cv2.IMREAD_GRAYSCALE)
            yield Pair(scene.name, first, second, np.loadtxt(scene / f"H1to{k}p"))


def read_photos(folder: Path | None, count: int) -> list[np.ndarray]:
    if folder is None or not folder.is_dir():
        return [make_dead_leaves(seed) for seed in range(count)]
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg", ".png"))
    step = max(1, len(paths) // count)
    return [cv2.imread(str(p), cv2.IMREAD_GRAYSCALE) for p in paths[step // 2 :: step][:count]]


def make_dead_leaves(seed: int) -> np.ndarray:
    """Overlapping discs with the size statistics of natural images."""
    rng = np.random.default_rng(seed)
    image = np.full((480, 640), 128, np.uint8)
    for _ in range(6000):
        centre = (int(rng.integers(-50, 690)), int(rng.integers(-50, 530)))
        radius = int(3 / np.sqrt(rng.uniform(0.0005, 1)))
        cv2.circle(image, centre, radius, int(rng.integers(0, 256)), -1, cv2.LINE_AA)
    return image


def tilt_photos(photos: list[np.ndarray]) -> Iterator[Pair]:
    """Each photo as seen by a camera that is tilted, turned and moved back at random."""
    rng = np.random.default_rng(0)
    for photo in photos:
        for tilt in TILTS:
            longitude_rad, roll_rad = rng.uniform(0, np.pi), rng.uniform(-np.pi, np.pi)
            shape = (
                rng.uniform(0.8, 1.1)
                * _rotation(roll_rad)
                @ np.diag([1 / tilt, 1])
                @ _rotation(longitude_rad)
            )
            yield Pair(f"tilt {tilt}", photo, *_warp_whole(photo, shape))


def _rotation(angle_rad: float) -> np.ndarray:
    cos, sin = np.cos(angle_rad), np.sin(angle_rad)
    return np.array([[cos, -sin], [sin, cos]])


def _warp_whole(image: np.ndarray, shape: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The whole image under a linear map, and the homography; three times too large first, then averaged."""
    height, width = image.shape
    corners = np.array([[0, 0], [width - 1, 0], [0, height - 1], [width - 1, height - 1]]) @ shape.T
    size = np.ceil(np.ptp(corners, axis=0) + 1).astype(int)
    homography = np.eye(3)
    homography[:2, :2], homography[:2, 2] = shape, -corners.min(axis=0)
    enlarge = np.array([[3.0, 0, 1], [0, 3, 1], [0, 0, 1]])
    large = cv2.warpAffine(
        image,
        (enlarge @ homography)[:2],
        tuple(int(3 * s) for s in size),
        flags=cv2.INTER_CUBIC,
        borderMode=cv2.BORDER_REPLICATE,
    )
    return cv2.resize(large, tuple(int(s) for s in size), interpolation=cv2.INTER_AREA), homography


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
    print(
        f"\n{title}\n{'':14}{'points':>10}{'detect ms':>11}{'patches ms':>12}{'points/s':>11}{'with patches/s':>16}"
    )
    for name, row in table.items():
        both = row["detect"] + row.get("patches", np.nan)
        print(
            f"{name:14}{row['points']:10.0f}{1e3 * row['detect']:11.1f}{1e3 * row.get('patches', np.nan):12.1f}"
            f"{row['points'] / row['detect']:11.0f}{row['points'] / both:16.0f}"
        )


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


def main() -> None:
    args = parse_arguments()
    cv2.setNumThreads(1)
    scene_pairs = list(read_scenes(args.data)) if args.data.is_dir() else []
    if not scene_pairs:
        print(f"{args.data} has no scenes: repeatability is measured on tilts alone", file=sys.stderr)
    tilt_pairs = list(tilt_photos(read_photos(args.photos, args.num_photos)))
    timed = list({id(p.first): p.first for p in scene_pairs or tilt_pairs}.values())
    seconds = {}
    for num_points in args.points:
        seconds[num_points] = measure_seconds(timed, args.rivals, num_points, args.repeats)
        print_seconds(
            f"CPU time per image of {np.mean([i.size for i in timed]) / 1e6:.2f} MP, {num_points} points",
            seconds[num_points],
        )
    fewest = min(args.points)
    tables = {}
    for label, pairs in (("scenes", scene_pairs), ("tilts", tilt_pairs)):
        tables[label] = (
            {n: mean_repeatability(RIVALS[n], pairs, fewest) for n in args.rivals} if pairs else {}
        )
        if pairs:
            print_repeatability(f"repeatability in % on {label}, {fewest} points", tables[label])
    figures = compare(tables["scenes"], tables["tilts"], seconds)
    print_comparison(figures)
    if args.json:
        args.json.write_text(json.dumps({"seconds": seconds, **tables, "figures": figures}, indent=2))


if __name__ == "__main__":
    main()
