"""Images per second of the loop, a pool of 2 and Ray with 2 actors, and where the time of an image goes.

    python benchmarks/runner.py [--images FOLDER] [--preset compact] [--seconds 120] [--json FILE]

Only the encode step is timed, in its steady state: from the moment when every worker has finished a
shard until the first worker has finished its last one. Start-up (processes, imports, models) is apart.
Every worker computes on one thread; the loop is held to one core, because its threads that read ahead
would otherwise use the second one. The rates hold on a quiet machine only; the CPU time that an image
costs, in all processes together, is reported as well, and says what the rates would be.

Without --images, views of scikit-image's photographs are rendered.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's workers would yield to everything else

import numpy as np
from cpu_time import CpuTime

from ckn_scale.config import Resources, Settings, load_settings
from ckn_scale.core.augmentations import VIEWS, render_view
from ckn_scale.core.encoder import ImageEncoder
from ckn_scale.core.images import decode_image, encode_jpeg, encode_thumbnail
from ckn_scale.core.numerics import set_compute_threads
from ckn_scale.core.patches import extract_patches
from ckn_scale.core.preprocessor import PreparedImage, detect_keypoints
from ckn_scale.core.vector_codes import VectorCodec, make_codec
from ckn_scale.demo import PHOTOS, read_photo
from ckn_scale.pipeline import sample, train
from ckn_scale.prepare_images import read_planned
from ckn_scale.runners.driver import open_driver
from ckn_scale.steps.encode_images import (
    EncodedRow,
    EncodeImages,
    tabulate_descriptors,
    tabulate_thumbnails,
    tabulate_vectors,
)
from ckn_scale.steps.plan_images import plan_images
from ckn_scale.steps.record_models import adopt_models
from ckn_scale.storage.models import load_models, read_generation
from ckn_scale.storage.plans import PlannedImage, PlanReader, require_segments
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.shards import Commit

CREWS = {
    "loop": Resources(workers=0),
    "pool of 2": Resources(workers=2),
    "Ray, 2 actors": Resources(workers=2, ray="local"),
}
DISTINCT = 200  # rendered images; more are further names of the same files
PROBED = 24  # images whose time is split into parts
Result = TypeVar("Result")


@dataclass(frozen=True)
class Rate:
    startup_s: float
    images_per_s: float
    steady_s: float
    images: int
    cpu_ms: float  # per image, in all processes


def render_images(folder: Path, count: int) -> None:
    folder.mkdir()
    pairs = list(itertools.product(VIEWS, PHOTOS))
    for i in range(count):
        view, photo = pairs[i % len(pairs)]
        (folder / f"{i:04d}.jpg").write_bytes(encode_jpeg(render_view(read_photo(photo), view, seed=i), 90))


def name_images(source: Path, folder: Path, count: int) -> Path:
    """`count` names for the files of `source`, in turn: a collection as large as the time asks for."""
    files = sorted(path for path in source.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    folder.mkdir()
    for i in range(count):
        file = files[i % len(files)]
        (folder / f"{i:06d}{file.suffix}").symlink_to(file.resolve())
    return folder


def prepare_run(source: Path, run: Path, settings: Settings, trained: Path) -> RunFolder:
    """Planned and with models: ready to encode."""
    made = plan_images(str(run), settings, str(source))
    adopt_models(made, str(trained))
    return made


def measure_crew(run: RunFolder, resources: Resources) -> Rate:
    begun = time.time()
    with open_driver(run, resources, lambda progress: None) as driver, CpuTime() as cpu:
        driver.run_step(EncodeImages(driver.run))
    return find_steady_rate(list(run.commits(EncodeImages.name).committed().values()), begun, cpu)


def find_steady_rate(commits: list[Commit], begun: float, cpu: CpuTime) -> Rate:
    """Images that were finished while every worker was at work, by the time between."""
    ends: dict[int, list[float]] = {}
    for commit in commits:
        ends.setdefault(commit.worker["pid"], []).append(commit.started_at + commit.seconds)
    first, last = max(min(each) for each in ends.values()), min(max(each) for each in ends.values())
    images = sum(
        sum(commit.states.values())
        for commit in commits
        if first < commit.started_at + commit.seconds <= last
    )
    startup_s = min(commit.started_at for commit in commits) - begun
    cpu_ms = 1000 * cpu.between(first, last) / max(images, 1)
    return Rate(startup_s, images / max(last - first, 1e-9), last - first, images, cpu_ms)


@contextmanager
def one_core() -> Iterator[None]:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


class Stopwatch:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, name: str, call: Callable[..., Result], *arguments: Any) -> Result:
        begun = time.perf_counter()
        result = call(*arguments)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun
        return result


def split_time(run: RunFolder, settings: Settings) -> dict[str, float]:
    """Milliseconds of each part of an image's way, on one thread, without read-ahead."""
    encoder = ImageEncoder.from_parts(load_models(run.store, read_generation(run).models))
    reader = PlanReader(run, require_segments(run))
    shards = range(-(-PROBED // settings.plan.images_per_shard))
    images = [image for shard in shards for image in reader.read_shard(shard)][:PROBED]
    set_compute_threads(1)
    _walk(images[:2], encoder, settings, run, Stopwatch())  # the first calls are not typical
    watch = Stopwatch()
    _walk(images, encoder, settings, run, watch)
    return {name: 1000 * seconds / len(images) for name, seconds in watch.seconds.items()}


def _walk(
    images: list[PlannedImage], encoder: ImageEncoder, settings: Settings, run: RunFolder, watch: Stopwatch
) -> None:
    prepared, small = [], []
    for image in images:
        data = watch.time("read", read_planned, image)
        pixels = watch.time("decode", decode_image, data, settings.images)
        points = watch.time("detect", detect_keypoints, pixels, settings.keypoints)
        patches = watch.time("extract", extract_patches, pixels, points, settings.patches)
        prepared.append(PreparedImage(pixels, points, patches, pixels.shape[1::-1]))
        small.append(watch.time("thumbnail", encode_thumbnail, pixels, settings.encode.thumbnail_side_px))
    encoded = watch.time("encode", encoder.encode_prepared, prepared)
    codec = make_codec(settings.reduction.stored, encoder.dim)
    codes = [code.tobytes() for code in codec.encode(np.stack([one.vector for one in encoded]))]
    columns = zip(images, encoded, [None] * len(images), small, codes, strict=True)
    watch.time("write", _write, [EncodedRow(*row) for row in columns], run, codec)


def _write(rows: list[EncodedRow], run: RunFolder, codec: VectorCodec) -> None:
    attempt = os.urandom(8).hex()
    run.write_table("vectors", 0, attempt, tabulate_vectors(rows, codec))
    run.write_table("descriptors", 0, attempt, tabulate_descriptors(rows))
    run.write_table("thumbnails", 0, attempt, tabulate_thumbnails(rows))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    settings = load_settings(options.preset, None, options.set)
    source = options.images
    if source is None:
        source = folder / "rendered"
        render_images(source, DISTINCT)
    trained = folder / "trained"
    run = plan_images(str(trained), settings, str(name_images(source, folder / "sample", DISTINCT)))
    with open_driver(run, CREWS["pool of 2"], lambda progress: None) as driver:
        sample(driver)
        train(driver)
    parts_ms = split_time(run, settings)
    alone = 1000 / sum(parts_ms.values())
    print(f"one image on one thread: {sum(parts_ms.values()):.0f} ms", flush=True)
    rates = {name: _measure_named(name, source, folder, settings, options.seconds * alone) for name in CREWS}
    return {"preset": options.preset, "parts_ms": parts_ms, "rates": {k: vars(v) for k, v in rates.items()}}


def _measure_named(name: str, source: Path, folder: Path, settings: Settings, per_worker: float) -> Rate:
    resources, place = CREWS[name], folder / str(list(CREWS).index(name))
    place.mkdir()
    count = max(4 * settings.plan.images_per_shard, int(per_worker * max(resources.workers, 1)))
    images = name_images(source, place / "images", count)
    run = prepare_run(images, place / "run", settings, folder / "trained")
    with one_core() if resources.workers == 0 else nullcontext():
        rate = measure_crew(run, resources)
    print(describe(name, rate), flush=True)
    return rate


def describe(name: str, rate: Rate) -> str:
    return (
        f"{name:<16}{rate.images_per_s:8.2f} images/s over {rate.steady_s:.0f} s "
        f"({rate.images} images), {rate.cpu_ms:.0f} ms of CPU an image, start-up {rate.startup_s:.1f} s"
    )


def show(result: dict[str, Any]) -> None:
    rates = {name: rate["images_per_s"] for name, rate in result["rates"].items()}
    print(f"pool of 2 / loop   {rates['pool of 2'] / rates['loop']:.2f}   (wanted: at least 1.8)")
    print(f"Ray / pool of 2    {rates['Ray, 2 actors'] / rates['pool of 2']:.2f}   (wanted: at least 0.9)")
    costs = {name: rate["cpu_ms"] for name, rate in result["rates"].items()}
    print(f"by CPU time: pool of 2 / loop {2 * costs['loop'] / costs['pool of 2']:.2f}, ", end="")
    print(f"Ray / pool of 2 {costs['pool of 2'] / costs['Ray, 2 actors']:.2f}")
    total = sum(result["parts_ms"].values())
    for name, ms in result["parts_ms"].items():
        print(f"  {name:<10}{ms:8.2f} ms an image  {ms / total:6.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--preset", default="compact")
    parser.add_argument("--set", action="append", default=["plan.images_per_shard=16"])
    parser.add_argument("--seconds", type=float, default=120.0, help="steady state of each executor")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckn-bench-") as folder:
        result = measure(options, Path(folder))
    show(result)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
