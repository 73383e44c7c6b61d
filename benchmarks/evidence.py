"""Answers with evidence, stage by stage, against COLMAP's vocabulary tree on the same images in one run.

    python benchmarks/evidence.py DATA --protocol holidays --train-images PHOTOS --reduction-images OTHERS

Ours: vector, selective matching, geometry, expansion (`core/ranking.py`) on what an index stores of each
image; models are learned on PHOTOS, the flattening on OTHERS. Milliseconds are CPU time a query, one thread,
from the shortlist on. The rival (`pip install pycolmap`): its own SIFT, a tree of `--rival-words` words of
PHOTOS, all images verified; a query takes the time of its answer, without extraction. The tree takes long:
with `--rival-tree FILE` it is kept there and used again. `--queries` takes few, evenly spaced; `--no-rival`
leaves it out. Oxford's queries are cut to their box for both; they are few, and `--whole` asks for each image
that is relevant to one instead, as a whole. What kinds of codes differ by is printed with 95 % of
resamplings of the queries.

Reading: the points of all images of DATA as the file of one index shard, 1,000 rows for scores and 100 with
frames, when the file lies in memory and after the kernel was told to forget it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything that starts a thread pool

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa

from ckn_scale.config import load_settings
from ckn_scale.core.numerics import set_compute_threads
from ckn_scale.evaluate.cache import ContentCache
from ckn_scale.evaluate.descriptors import parse_requests
from ckn_scale.evaluate.evidence_table import EvidenceTable, ImagePoints, format_stages, parse_points
from ckn_scale.evaluate.image_sets import ImageSet, read_image_set
from ckn_scale.evaluate.image_table import ImageTable, Place, score_query
from ckn_scale.evaluate.report import format_table
from ckn_scale.evaluate.training_images import find_images
from ckn_scale.schemas import DESCRIPTORS
from ckn_scale.storage.point_files import PointFile, serialise_points

SCORED, VERIFIED = 1000, 100  # rows that a query reads


def take_queries(images: ImageSet, count: int | None) -> ImageSet:
    """The same database, `count` queries spread over all."""
    if count is None or count >= len(images.queries):
        return images
    chosen = np.linspace(0, len(images.queries) - 1, count).astype(int).tolist()
    return replace(images, queries=tuple(images.queries[one] for one in chosen))


def ask_whole(images: ImageSet) -> ImageSet:
    """Every image that is relevant to a query asks for the others."""
    asked = {
        one: replace(
            query, image=images.database[one], relevant=query.relevant - {one}, ignored=query.ignored | {one}
        )
        for query in images.queries
        for one in sorted(query.relevant)
    }
    return replace(images, queries=tuple(asked.values()))


class TimedTable(EvidenceTable):
    """Keeps the points of the last measurement, to write them into a file."""

    kept: Sequence[ImagePoints] = ()

    def _make_points(self, *arguments: Any) -> ImagePoints:
        image = super()._make_points(*arguments)
        self.kept = [*self.kept, image]
        return image


def make_table(images: ImageSet, arguments: argparse.Namespace, seeds: Sequence[int]) -> ImageTable:
    """The table of `evaluate images` for the preset's own vector."""
    settings = load_settings(arguments.preset, arguments.config, arguments.override)
    return ImageTable(
        images,
        parse_requests("ckn", lambda _: settings),
        settings,
        find_images(arguments.train_images),
        ContentCache(arguments.cache, int(1e9 * arguments.cache_gb)),
        lambda *_: None,
        seeds=seeds,
        intra_choices=[True],
        workers=arguments.workers,
        reduction_images=find_images(arguments.reduction_images),
    )


def measure_ours(images: ImageSet, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], TimedTable]:
    table = make_table(images, arguments, range(arguments.seeds))
    timed = TimedTable(table, parse_points(arguments.points, table.settings), True)
    return timed.measure(Place(table.settings.patches.region, None)), timed


def measure_reading(images: Sequence[ImagePoints], folder: Path) -> list[dict[str, Any]]:
    """Milliseconds and bytes of reading what a query reads, from memory and from the disk."""
    path = folder / "points"
    sizes = np.array([image.size_px for image in images], np.int32)
    rows = pa.table({"image_id": np.arange(len(images)), "width_px": sizes[:, 0], "height_px": sizes[:, 1]})
    records = [
        {
            "image_id": number,
            "num_points": len(image.frames),
            "frames": image.frames.tobytes(),
            "words": image.stored.words.tobytes(),
            "codes": image.stored.codes.tobytes(),
        }
        for number, image in enumerate(images)
    ]
    path.write_bytes(serialise_points(rows, pa.Table.from_pylist(records, schema=DESCRIPTORS)))
    chosen = np.random.default_rng(0).permutation(len(images))
    found = []
    for name, cold in (("in memory", False), ("on disk", True)):
        taken = []
        for _ in range(5):
            if cold:
                forget(path)
            file, started = PointFile(path), time.perf_counter()
            scored = file.read_points(chosen[:SCORED])
            frames = file.read_frames(chosen[:VERIFIED])
            taken.append(1e3 * (time.perf_counter() - started))
        read = scored.words.nbytes + scored.codes.nbytes + frames.nbytes
        found.append({"file": name, "ms": float(np.median(taken)), "bytes": read})
    return found


def forget(path: Path) -> None:
    """Nothing of the file stays in the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def measure_rival(
    images: ImageSet, train: Sequence[Path], num_words: int, folder: Path, tree: Path
) -> dict[str, Any]:
    """Score and CPU milliseconds a query of pycolmap's vocabulary tree, all images verified."""
    import pycolmap

    pycolmap.logging.minloglevel = 3
    if not tree.exists():
        features = extract(pycolmap, list(map(read_pixels, train)), folder / "train")
        build_tree(pycolmap, features, num_words, tree)
    pixels = [read_pixels(file.path) for file in images.database]
    asked = [read_pixels(query.image.path, query.image.box) for query in images.queries]
    started = time.process_time()
    database = extract(pycolmap, [*pixels, *asked], folder / "set")
    extracted = 1e3 * (time.process_time() - started) / (len(pixels) + len(asked))
    by_name = {image.name: image.image_id for image in database.read_all_images()}
    position = {by_name.get(f"{row:06d}.png"): row for row in range(len(pixels))}
    options = pycolmap.VocabTreePairingOptions()
    options.vocab_tree_path, options.num_threads = tree, 1
    options.num_images = options.num_images_after_verification = len(pixels) + len(asked)
    numbers = [by_name[f"{len(pixels) + row:06d}.png"] for row in range(len(asked))]
    started = time.process_time()
    answers = pycolmap.VocabTreePairGenerator(options, database, numbers)
    indexed = 1e3 * (time.process_time() - started) / len(by_name)
    scores, started = [], time.process_time()
    for query in images.queries:
        ranking = [position[other] for _, other in answers.next() if other in position]
        similarities = np.full(len(pixels), -1.0)
        similarities[ranking] = np.arange(len(ranking), 0, -1)
        scores.append(score_query(query, similarities, images.protocol))
    taken = 1e3 * (time.process_time() - started) / len(images.queries)
    return {"score": float(np.mean(scores)), "ms": taken, "extract_ms": extracted, "index_ms": indexed}


def read_pixels(path: Path, box: Sequence[float] | None = None) -> np.ndarray:
    pixels = cv2.imread(str(path))
    if box is None:
        return pixels
    x1, y1, x2, y2 = (round(value) for value in box)
    return pixels[max(y1, 0) : y2 + 1, max(x1, 0) : x2 + 1]


def extract(pycolmap: Any, pixels: Sequence[np.ndarray], folder: Path) -> Any:
    """A database of the images' SIFT features; names are their positions."""
    folder.mkdir()
    for row, image in enumerate(pixels):
        cv2.imwrite(str(folder / f"{row:06d}.png"), image, [cv2.IMWRITE_PNG_COMPRESSION, 0])
    options = pycolmap.FeatureExtractionOptions()
    options.num_threads, options.use_gpu = 1, False
    path = folder.with_suffix(".db")
    pycolmap.extract_features(path, folder, extraction_options=options)
    return pycolmap.Database.open(path)


def build_tree(pycolmap: Any, database: Any, num_words: int, path: Path) -> None:
    found = [database.read_descriptors(one.image_id).to_float() for one in database.read_all_images()]
    rows = found[0]
    kind = rows.type
    joined = type(rows)()
    joined.data, joined.type = np.concatenate([one.data for one in found]), kind
    index = pycolmap.VisualIndex.create(128, 64)
    options = pycolmap.VisualIndex.BuildOptions()
    options.num_visual_words, options.num_threads, options.num_iterations = num_words, 1, 10
    options.num_rounds = 1
    index.build(options, joined)
    index.write(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--protocol", required=True, choices=["holidays", "ukbench", "oxford", "groups"])
    parser.add_argument("--train-images", type=Path, required=True)
    parser.add_argument("--reduction-images", type=Path, required=True)
    parser.add_argument("--queries", type=int)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--seeds", type=int, default=1, help="codebooks to average over")
    parser.add_argument("--points", default="ckn,rootsift@6.5")
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--config")
    parser.add_argument("--set", dest="override", action="append", default=[])
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--cache-gb", type=float, default=16.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rival-words", type=int, default=16_384)
    parser.add_argument("--rival-tree", type=Path)
    parser.add_argument("--no-rival", dest="rival", action="store_false")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    set_compute_threads(1)
    images = read_image_set(arguments.data, arguments.protocol)
    images = take_queries(ask_whole(images) if arguments.whole else images, arguments.queries)
    with tempfile.TemporaryDirectory() as folder:
        content: dict[str, Any] = {"queries": len(images.queries), "images": len(images.database)}
        if arguments.rival:
            content["rival"] = measure_rival(
                images,
                find_images(arguments.train_images),
                arguments.rival_words,
                Path(folder),
                arguments.rival_tree or Path(folder) / "tree.bin",
            )
        content["stages"], timed = measure_ours(images, arguments)
        content["reading"] = measure_reading(timed.kept[: len(images.database)], Path(folder))
    report(content)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


def compare_codes(stages: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What the first kind of codes is ahead of each other kind, with 95 % of resamplings of the queries."""
    rng = np.random.default_rng(0)
    for one in stages:
        ours = next(other for other in stages if other["stage"] == one["stage"])
        if one["stage"] == "vlad" or one is ours:
            continue
        ahead = np.subtract(ours["by_query"], one["by_query"])
        means = ahead[rng.integers(0, len(ahead), (10_000, len(ahead)))].mean(axis=1)
        low, high = np.percentile(means, [2.5, 97.5])
        what = f"{one['stage']}, {ours['points']} − {one['points']}"
        yield f"{what}: {ahead.mean():+.4f} [{low:+.4f}, {high:+.4f}]"


def report(content: dict[str, Any]) -> None:
    print(f"{content['queries']} queries, {content['images']} images\n")
    print(format_stages(content["stages"]), "\n")
    for line in compare_codes(content["stages"]):
        print(line)
    reading = [[one["file"], f"{one['ms']:.1f}", f"{one['bytes'] / 1e6:.1f}"] for one in content["reading"]]
    print(format_table(["points read for a query", "ms", "MB"], reading))
    if "rival" in content:
        rival = content["rival"]
        print(f"\nCOLMAP's vocabulary tree, all verified: {rival['score']:.3f}, {rival['ms']:.0f} ms a query")
        for one in content["stages"]:
            ratio = one["ms"] / rival["ms"]
            measured = one.get("map", one.get("score"))
            print(f"  {one['stage']}, {one['points']}: {measured:.3f}, {ratio:.2f} of its time")


if __name__ == "__main__":
    main()
