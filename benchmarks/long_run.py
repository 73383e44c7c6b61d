"""One long run from plan to publish, watched: images per second, memory, open files, object store.

    python benchmarks/long_run.py --images 100000 --out /tmp/long-run

Renders small views of the demo's photographs into tar shards, indexes them on a Ray of its own with
two actors, and samples all processes of the run every few seconds. Writes `long_run.csv`,
`long_run.png` and `long_run.md` into --report (default: this folder).
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np

from ckn_scale.core.augmentations import VIEWS
from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import DISTRACTORS, PHOTOS, read_photo

SIDE_PX = (96, 128)
IMAGES_PER_TAR = 5000
SETTINGS = [
    "images.min_side_px=64",
    "keypoints.max_keypoints=40",
    "points.max_points=40",
    "plan.images_per_shard=500",
    "sample.num_images=400",
    "sample.images_per_shard=50",
    "index.shards_per_index_shard=20",
    "publish.num_queries=64",
    "publish.queries_per_shard=32",
]


def main() -> None:
    arguments = parse_arguments()
    tars, run = arguments.out / "tars", arguments.out / "run"
    if not tars.exists():
        began = time.monotonic()
        render_tars(tars, arguments.images)
        print(f"rendered {arguments.images} images in {time.monotonic() - began:.0f} s")
    shutil.rmtree(run, ignore_errors=True)
    command = [
        str(Path(sys.executable).parent / "ckn-scale"),
        "index",
        str(tars),
        str(run),
        "--preset",
        "tiny",
    ]
    command += ["--workers", "2", "--ray", "local", "--accept"]
    command += [part for setting in SETTINGS for part in ("--set", setting)]
    rows = list(watch(subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}), run))
    write_report(rows, arguments.report, run)


def render_tars(folder: Path, count: int) -> None:
    photos = [read_photo(name) for name in (*PHOTOS, *DISTRACTORS)]
    folder.mkdir(parents=True)
    for start in range(0, count, IMAGES_PER_TAR):
        with tarfile.open(folder / f"{start // IMAGES_PER_TAR:05d}.tar", "w") as tar:
            for number in range(start, min(start + IMAGES_PER_TAR, count)):
                add_member(tar, f"{number:09d}.jpg", render(photos[number % len(photos)], number))


def render(photo: np.ndarray, seed: int) -> bytes:
    """A small window of the photograph, relit or blurred: no two are the same."""
    rng = np.random.default_rng(seed)
    height, width = SIDE_PX
    scale = rng.uniform(0.3, 0.9)
    window_height, window_width = int(photo.shape[0] * scale), int(photo.shape[1] * scale)
    top = int(rng.integers(photo.shape[0] - window_height))
    left = int(rng.integers(photo.shape[1] - window_width))
    window = photo[top : top + window_height, left : left + window_width]
    small = cv2.resize(window, (width, height), interpolation=cv2.INTER_AREA)
    return encode_jpeg(VIEWS["relight"](small, rng), 88)


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def watch(process: subprocess.Popen[bytes], run: Path, every_s: float = 5.0) -> Iterator[dict[str, float]]:
    """Samples of the process and everything it started, until it ends."""
    began = time.monotonic()
    idle_shm = shutil.disk_usage("/dev/shm").used
    while process.poll() is None:
        pids = descendants(process.pid)
        yield {
            "seconds": round(time.monotonic() - began, 1),
            "processes": len(pids),
            "driver_mb": round(resident_mb(process.pid), 1),
            "workers_mb": round(max((resident_mb(pid) for pid in pids if is_actor(pid)), default=0.0), 1),
            "all_mb": round(sum(resident_mb(pid) for pid in pids), 1),
            "open_files": sum(count_open_files(pid) for pid in pids if pid == process.pid or is_actor(pid)),
            "object_store_mb": round((shutil.disk_usage("/dev/shm").used - idle_shm) / 1e6, 1),
            "encoded_shards": len(list((run / "commits" / "encode_images").glob("*.json"))),
        }
        time.sleep(every_s)
    if process.returncode != 0:
        sys.exit(f"the run ended with {process.returncode}")


def descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    found = [root]
    for pid in found:
        found.extend(child for child, parent in parents.items() if parent == pid)
    return found


def is_actor(pid: int) -> bool:
    try:
        return b"ShardActor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def resident_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return 0.0


def count_open_files(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def write_report(rows: list[dict[str, float]], folder: Path, run: Path) -> None:
    with (folder / "long_run.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    command = [str(Path(sys.executable).parent / "ckn-scale"), "status", str(run), "--json"]
    status = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    text = describe(rows, status)
    (folder / "long_run.md").write_text(text)
    print(text)
    draw(rows, folder / "long_run.png")


def describe(rows: list[dict[str, float]], status: dict[str, object]) -> str:
    steps = {step["step"].split("-")[0]: step for step in status["steps"]}  # type: ignore[attr-defined]
    working = [row for row in rows if row["workers_mb"] > 0]
    half = working[len(working) // 2 :]
    lines = [
        "# One long run",
        "",
        f"`python benchmarks/long_run.py`: {status['images']['planned']} images, "  # type: ignore[index]
        f"{rows[-1]['seconds']:.0f} s from start to published version {status['version']}.",
        "",
        "| figure | value |",
        "|---|---|",
        f"| encode, images per second | {steps['encode_images']['images_per_s']:.1f} |",
        f"| images by state | {status['images']['states']} |",  # type: ignore[index]
        f"| largest actor, MB, middle and end | {half[0]['workers_mb']:.0f}, {half[-1]['workers_mb']:.0f} |",
        f"| driver, MB, middle and end | {half[0]['driver_mb']:.0f}, {half[-1]['driver_mb']:.0f} |",
        f"| open files (driver, actors) | {half[0]['open_files']}, {half[-1]['open_files']} |",
        f"| object store, most, MB | {max(row['object_store_mb'] for row in rows):.1f} |",
    ]
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    minutes = [row["seconds"] / 60 for row in rows]
    figure, axes = plt.subplots(4, 1, figsize=(9, 9), sharex=True)
    panels = [
        ("encoded shards", ["encoded_shards"]),
        ("resident memory, MB", ["workers_mb", "driver_mb"]),
        ("open files", ["open_files"]),
        ("object store, MB", ["object_store_mb"]),
    ]
    for axis, (title, names) in zip(axes, panels, strict=True):
        for name in names:
            axis.plot(minutes, [row[name] for row in rows], label=name)
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    axes[-1].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=Path("/tmp/ckn-long-run"))
    parser.add_argument("--report", type=Path, default=Path(__file__).parent)
    return parser.parse_args()


if __name__ == "__main__":
    main()
