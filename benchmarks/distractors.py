"""What unrelated images cost: the stages of an answer for a set alone, and among thousands of others.

    python benchmarks/distractors.py SET:PROTOCOL [SET:PROTOCOL …] --others FOLDER… --count 10000 \\
      --train-images PHOTOS --reduction-images MORE --folder WORK

The photographs of OTHERS are distractors, and so many pictures rendered from them that there are `--count`:
picture n is one photograph, seen from elsewhere in another light, with one to four others in it as posters
hang on a wall, tilted, turned, with hard or soft borders. They are JPEG files in WORK. Models are learned on
PHOTOS, the flattening on MORE.

Everything goes through two published runs of the same images: `run-signs` compares all rows (`run-exact`
where reduction.stored is float16), `run-pq` makes a shortlist by short codes (`index.kind`). Images are
encoded once: encoding does not depend on the kind, so the second run gets what the first one encoded as hard
links, and builds, certifies and publishes that itself. Both hold the images of all sets, so for each of them
the other sets are distractors, too. `alone` is a search with a filter for the set's own images,
`photographs` one for all images but the rendered ones.

Milliseconds are CPU time a query with its encoding, one thread. Called again, it goes on where it stopped.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything that starts a thread pool

import argparse
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from evidence import take_queries

from ckn_scale.cli.progress import ProgressDisplay
from ckn_scale.config import Resources, load_settings
from ckn_scale.core.augmentations import crop, relight, tilt, turn
from ckn_scale.core.images import decode_image, encode_jpeg, resize_image
from ckn_scale.core.numerics import set_compute_threads
from ckn_scale.core.specs import ImageSpec
from ckn_scale.core.vector_index import KINDS
from ckn_scale.evaluate.image_sets import ImageSet, read_image_set
from ckn_scale.evaluate.machine import describe_machine
from ckn_scale.evaluate.report import check_writable, format_table, points, write_file, write_json
from ckn_scale.evaluate.through_index import measure_index
from ckn_scale.evaluate.training_images import find_images
from ckn_scale.pipeline import index_images
from ckn_scale.search.engine import Index, open_index
from ckn_scale.search.filters import Condition, Filter
from ckn_scale.search.versions import open_version
from ckn_scale.storage.run_folder import (
    DESCRIPTORS_STAGE,
    ENCODE_IMAGES,
    THUMBNAILS_STAGE,
    VECTORS_STAGE,
    RunFolder,
)

CANVAS_PX = (640, 480)
VIEWS = (tilt, turn, crop)
PHOTOGRAPHS = (2, 6)  # of a rendered picture: at least, less than
WINDOW = (0.35, 0.75)  # the longer side of a pasted one, of the picture's width
JPEG_QUALITY = 90


def read_sets(names: Iterable[str], queries: int | None) -> dict[str, ImageSet]:
    """By SET:PROTOCOL as given."""
    sets = {}
    for name in names:
        data, _, protocol = name.rpartition(":")
        sets[name] = take_queries(read_image_set(Path(data).resolve(), protocol), queries)
    return sets


def render_all(photographs: Sequence[Path], files: Sequence[Path], workers: int) -> None:
    """Picture n as files[n], unless it is there. Threads are enough: OpenCV computes without the GIL."""

    def render(number: int) -> None:
        if not files[number].exists():
            write_file(files[number], encode_jpeg(render_picture(photographs, number), JPEG_QUALITY))

    with ThreadPoolExecutor(max(1, workers)) as pool, ProgressDisplay() as display:
        for done, _ in enumerate(pool.map(render, range(len(files)))):
            display.show_count("rendered pictures", done + 1, len(files))


def render_picture(photographs: Sequence[Path], number: int) -> np.ndarray:
    """(H, W, 3) uint8 RGB: one photograph with others pasted into it; it depends on the number."""
    rng = np.random.default_rng(number)
    chosen = rng.choice(len(photographs), int(rng.integers(*PHOTOGRAPHS)), replace=False)
    seen = [look_at(photographs[one], rng) for one in chosen]
    picture = resize_image(seen[0], CANVAS_PX)
    for window in seen[1:]:
        picture = paste(picture, window, rng)
    return picture


def look_at(path: Path, rng: np.random.Generator) -> np.ndarray:
    """A photograph as another camera would take it: one or two views, and another light."""
    image = decode_image(path.read_bytes(), ImageSpec(max_pixels=CANVAS_PX[0] * CANVAS_PX[1]))
    for one in rng.permutation(len(VIEWS))[: rng.integers(1, 3)]:
        image = VIEWS[one](image, rng)
    return relight(image, rng)


def paste(picture: np.ndarray, window: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The window somewhere in the picture, turned by up to 30 degrees, tilted, with a hard or soft border."""
    height, width = window.shape[:2]
    scale = rng.uniform(*WINDOW) * CANVAS_PX[0] / max(width, height)
    width, height = max(int(scale * width), 8), max(int(scale * height), 8)
    angle_rad, place = rng.uniform(-np.pi / 6, np.pi / 6), rng.uniform(0.15, 0.85, 2) * CANVAS_PX
    axes = np.array([[np.cos(angle_rad), np.sin(angle_rad)], [-np.sin(angle_rad), np.cos(angle_rad)]])
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    centred = (corners - (width / 2, height / 2)) * rng.uniform(0.8, 1.0, (4, 2))
    target = (centred @ axes + place).astype(np.float32)
    matrix = cv2.getPerspectiveTransform(corners, target)
    small = resize_image(window, (width, height))
    drawn = cv2.warpPerspective(small, matrix, CANVAS_PX, borderMode=cv2.BORDER_REPLICATE)
    mask = cv2.fillConvexPoly(np.zeros(CANVAS_PX[::-1], np.float32), np.rint(target).astype(np.int32), 1.0)
    if rng.random() < 0.5:
        mask = cv2.GaussianBlur(mask, (0, 0), float(rng.uniform(1.5, 6.0)))
    return cv2.blendLinear(picture, drawn, 1 - mask, mask)


def write_list(path: Path, images: Iterable[Path]) -> None:
    """What the runs hold. A run's plan is frozen, so another list needs another folder."""
    text = "".join(f"{image}\n" for image in images).encode()
    if path.exists() and path.read_bytes() != text:
        raise SystemExit(f"{path} lists other images than these sets, others and count: use another --folder")
    write_file(path, text)


def make_runs(listed: Path, arguments: argparse.Namespace) -> list[Path]:
    """Two published runs of the listed images: all rows compared, and a shortlist by short codes."""
    stored = load_settings(arguments.preset, None, arguments.override).reduction.stored
    models, first, second = (arguments.folder / name for name in ("models", f"run-{KINDS[stored]}", "run-pq"))
    photos, background = (str(one.resolve()) for one in (arguments.train_images, arguments.reduction_images))
    make_run(photos, models, "auto", arguments, background=background)
    make_run(str(listed), first, KINDS[stored], arguments, models=str(models))
    link_encoded(first, second)
    make_run(str(listed), second, "pq", arguments, models=str(models))
    return [first, second]


def make_run(source: str, run: Path, kind: str, arguments: argparse.Namespace, **learned: Any) -> None:
    settings = load_settings(arguments.preset, None, [*arguments.override, f"index.kind={kind}"])
    resources, started = Resources(workers=arguments.workers), time.monotonic()
    with ProgressDisplay() as display:
        report = index_images(
            source, str(run), settings, resources, accept=True, on_progress=display.show_step, **learned
        )
    print(f"{run.name}: {report.states} after {time.monotonic() - started:.0f} s", flush=True)


def link_encoded(run: Path, other: Path) -> None:
    """What one run encoded becomes the other's, of the same images and models; records last, as ever.

    Other settings or models would have other fingerprints, and the other run would refuse them.
    """
    for stage in (VECTORS_STAGE, DESCRIPTORS_STAGE, THUMBNAILS_STAGE, f"commits/{ENCODE_IMAGES}"):
        (other / stage).mkdir(parents=True, exist_ok=True)
        for file in (run / stage).iterdir():
            if not (other / stage / file.name).exists():
                os.link(file, other / stage / file.name)


def measure(
    sets: Mapping[str, ImageSet], photographs: Sequence[Path], plain: Index, coded: Index
) -> Iterator[dict[str, Any]]:
    """A result for each set, company and stage."""
    for index in (plain, coded):  # what the first query loads or compiles is no part of any figure
        measure_index(take_queries(next(iter(sets.values())), 1), index, "ckn", lambda *_: None)
    for name, images in sets.items():
        own = [file.path for file in images.database]
        companies = [
            ("alone", plain, only(own), len(own)),
            ("photographs", plain, only(photographs), len(photographs)),
            ("all", plain, None, len(plain)),
            ("short codes", coded, None, len(coded)),
        ]
        for company, index, wanted, count in companies:
            with ProgressDisplay() as display:
                results = measure_index(images, index, "ckn", display.show_count, filter=wanted)
            yield from ({"set": name, "company": company, "images": count, **one} for one in results)


def only(files: Iterable[Path]) -> Filter:
    """The filter that admits these images."""
    return Filter((Condition("uri", "in", tuple(map(str, files))),))


def format_results(results: Sequence[Mapping[str, Any]]) -> str:
    """A row for each set and stage: in each company mAP (of 100, UKBench: of 4) and CPU milliseconds."""
    rows: dict[tuple[str, str], list[str]] = {}
    for one in results:
        score = f"{one['score']:.3f}" if "score" in one else points(one["map"])
        rows.setdefault((one["set"], one["stage"]), []).extend([score, f"{one['ms']:.0f}"])
    companies = dict.fromkeys(one["company"] for one in results)
    header = ["set", "stage", *(title for company in companies for title in (company, "ms"))]
    return format_table(header, [[*names, *cells] for names, cells in rows.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sets", nargs="+", metavar="SET:PROTOCOL", help="a folder, and how it is scored")
    parser.add_argument("--others", type=Path, nargs="+", required=True, help="of no set")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--train-images", type=Path, required=True)
    parser.add_argument("--reduction-images", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where everything lies, and stays")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--set", dest="override", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--queries", type=int, help="of each set, evenly spaced")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    check_writable(arguments.json)
    set_compute_threads(1)
    arguments.folder = arguments.folder.resolve()
    sets = read_sets(arguments.sets, arguments.queries)
    known = dict.fromkeys(file.path for images in sets.values() for file in images.database)
    found = [path for folder in arguments.others for path in find_images(folder.resolve())]
    others = [path for path in dict.fromkeys(found) if path not in known]
    rendered = arguments.folder / "rendered"
    pictures = [rendered / f"{number:06d}.jpg" for number in range(arguments.count - len(others))]
    rendered.mkdir(parents=True, exist_ok=True)
    listed = arguments.folder / "images.txt"
    write_list(listed, [*known, *others, *pictures])
    render_all(others, pictures, arguments.workers)
    runs = make_runs(listed, arguments)
    plain, coded = map(open_index, runs)
    shortlist = open_version(RunFolder.open(str(runs[1]))).record.certificate.shortlist
    counts = {"sets": len(known), "photographs": len(others), "rendered": len(pictures), "rows": len(plain)}
    print(f"{counts}; short codes: {shortlist}\n", flush=True)
    results = list(measure(sets, [*known, *others], plain, coded))
    print(format_results(results))
    if arguments.json is not None:
        queries = {name: len(images.queries) for name, images in sets.items()}
        about = {"preset": arguments.preset, "set": arguments.override, "queries": queries, "counts": counts}
        machine = {"shortlist": shortlist, "machine": describe_machine()}
        write_json(arguments.json, {"results": results, **about, **machine})


if __name__ == "__main__":
    main()
