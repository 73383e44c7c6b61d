"""What unrelated images cost: the stages of an answer for a set alone, and among thousands of others.

    python benchmarks/distractors.py DATA --protocol holidays --others OTHERS… --count 10000 \\
      --train-images PHOTOS --reduction-images MORE

The images of OTHERS join the database, and so many collages that there are `--count` distractors: collage n
has the points of windows of two to five images of OTHERS, moved and scaled to where the window lies, at most
as many as an image has. They are put together from points that are described already, because describing
10,000 images takes an hour of CPU. All is in memory: vectors as an index stores them (signs), points with
words and codes. A shortlist has 1,000 images, as of a search; `codes` makes it by short codes (`index.kind =
pq`), of which the best 2,000 are compared.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything that starts a thread pool

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from evidence import make_table

from ckn_scale.core.evidence import MATCHED_ASSIGNMENTS, SHORTLIST, QueryPoints
from ckn_scale.core.flattening import Flattening, learn_flattening
from ckn_scale.core.keypoints import Keypoints
from ckn_scale.core.numerics import set_compute_threads
from ckn_scale.core.packed_points import pack_codes, pack_frames, unpack_frames
from ckn_scale.core.points import fit_point_words
from ckn_scale.core.ranking import Ranking, expand_ranking, rank_candidates
from ckn_scale.core.selective_matching import PointSets, encode_query
from ckn_scale.core.short_codes import CodeScan, learn_quantiser
from ckn_scale.core.vector_codes import SignCodec
from ckn_scale.core.vlad import aggregate_vlad, assign_words
from ckn_scale.evaluate.evidence_table import ArrayCandidates, EvidenceTable, ImagePoints, parse_points
from ckn_scale.evaluate.image_sets import ImageSet, read_image_set
from ckn_scale.evaluate.image_table import Place, score_query
from ckn_scale.evaluate.regions import ImageFile, describe_regions
from ckn_scale.evaluate.training_images import TrainingPatches, find_images

CANVAS_PX = (640, 480)
WINDOWS = (2, 6)  # of a collage: at least, less than
CODE_DEPTH, LEARNED_FROM = 2000, 2048  # of short codes


@dataclass(frozen=True)
class Described:
    """One image: its points, strongest first, and what describes them."""

    frames: np.ndarray  # (N, 2, 3)
    size_px: tuple[int, int]
    channels: tuple[np.ndarray, ...]  # (N, D) or fewer rows of each channel of the vector
    rows: np.ndarray  # (N, 128): what words and codes of points are made of


@dataclass(frozen=True)
class Models:
    """What was learned for one codebook seed."""

    words: tuple[np.ndarray, ...]  # of the vector's channels
    weights: tuple[float, ...]
    flattening: Flattening
    centroids: np.ndarray  # of points

    def make_vlad(self, image: Described) -> np.ndarray:
        blocks = [
            np.float32(np.sqrt(weight)) * aggregate_vlad(rows, words, intra_normalise=True)
            for rows, words, weight in zip(image.channels, self.words, self.weights, strict=True)
        ]
        vlad: np.ndarray = np.concatenate(blocks) / np.float32(np.sqrt(sum(self.weights)))
        return vlad


@dataclass
class Database:
    """Images as an index keeps them, added one after the other."""

    models: Models
    codes: list[np.ndarray] = field(default_factory=list)
    points: list[ImagePoints] = field(default_factory=list)

    def add(self, images: Sequence[Described]) -> None:
        flat = self.models.flattening.apply(np.stack([self.models.make_vlad(one) for one in images]))
        self.codes.append(SignCodec(flat.shape[1]).encode(flat))
        self.points += [make_points(one, self.models.centroids) for one in images]

    def open(self) -> ArrayCandidates:
        codes = np.concatenate(self.codes)
        return ArrayCandidates(
            SignCodec(self.models.flattening.dim).decode(codes), self.points, self.models.centroids
        )


@dataclass(frozen=True)
class CodedCandidates(ArrayCandidates):
    """The same with a shortlist by short codes."""

    scan: CodeScan

    def find(self, vector: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        (rows,) = self.scan.shortlist(vector[None], max(k, CODE_DEPTH), k)
        similarity = self.vectors[rows] @ vector
        order = np.lexsort((rows, -similarity))[:k]
        return rows[order], similarity[order]


def make_points(image: Described, centroids: np.ndarray) -> ImagePoints:
    """As they are stored, sorted by word; the query's form is made for queries alone."""
    words = assign_words(image.rows, centroids).astype(np.uint16)
    codes, order = pack_codes(image.rows, words, centroids), np.argsort(words, kind="stable")
    packed = pack_frames(Keypoints(image.frames, np.zeros(len(image.frames), np.float32)), *image.size_px)
    stored = PointSets(words[order], codes[order], np.array([0, len(words)]))
    return ImagePoints(stored, packed[order], image.size_px, None)  # type: ignore[arg-type]


def make_query(image: Described, centroids: np.ndarray) -> QueryPoints:
    packed = pack_frames(Keypoints(image.frames, np.zeros(len(image.frames), np.float32)), *image.size_px)
    number = min(MATCHED_ASSIGNMENTS, len(centroids))
    words_and_codes = encode_query(image.rows, centroids, num_assignments=number)
    return QueryPoints(*words_and_codes, unpack_frames(packed, *image.size_px).frames, image.size_px)


def make_collage(sources: Sequence[Described], seed: int) -> Described:
    """Points of windows of some images, each window at another place and size; it depends on the seed."""
    rng, parts = np.random.default_rng(seed), []
    for number in rng.choice(len(sources), int(rng.integers(*WINDOWS)), replace=False):
        source = sources[number]
        side, corner = rng.uniform(0.4, 0.9), rng.random(2)
        scale, place = rng.uniform(0.5, 1.0), rng.random(2)
        size = side * np.array(source.size_px)
        first = corner * (np.array(source.size_px) - size)
        target = place * np.maximum(np.array(CANVAS_PX) - scale * size, 0)
        centres = source.frames[:, :, 2]
        inside = np.flatnonzero(((centres >= first) & (centres < first + size)).all(axis=1))
        frames = scale * source.frames[inside]
        frames[:, :, 2] += target - scale * first
        there = ((frames[:, :, 2] >= 0) & (frames[:, :, 2] < np.array(CANVAS_PX) - 1)).all(axis=1)
        parts.append((source, inside[there], frames[there]))
    most = max(len(source.frames) for source, _, _ in parts)
    return _join_parts(parts, most)


def _join_parts(parts: Sequence[tuple[Described, np.ndarray, np.ndarray]], most: int) -> Described:
    """The points of all parts, the strongest of each first, at most so many."""
    ranks = np.concatenate([np.arange(len(chosen)) for _, chosen, _ in parts])
    owners = np.repeat(np.arange(len(parts)), [len(chosen) for _, chosen, _ in parts])
    kept = np.sort(np.argsort(ranks, kind="stable")[:most])
    counts = np.bincount(owners[kept], minlength=len(parts))  # each part's first ones
    taken = [
        (source, chosen[:n], moved[:n]) for (source, chosen, moved), n in zip(parts, counts, strict=True)
    ]
    channels = []
    for one in range(len(parts[0][0].channels)):
        described = [(source.channels[one], chosen) for source, chosen, _ in taken]
        channels.append(np.concatenate([rows[chosen[chosen < len(rows)]] for rows, chosen in described]))
    return Described(
        np.concatenate([moved for _, _, moved in taken]),
        CANVAS_PX,
        tuple(channels),
        np.concatenate([source.rows[chosen] for source, chosen, _ in taken]),
    )


def measure(
    images: ImageSet,
    described: Mapping[ImageFile, Described],
    others: Sequence[Described],
    models: Models,
    count: int,
) -> Iterator[dict[str, Any]]:
    """Scores of each stage for the set alone, among `others`, and among `count` distractors."""
    database, collages = Database(models), (make_collage(others, seed) for seed in range(count - len(others)))
    database.add([described[file] for file in images.database])
    yield from _ask(images, described, database.open(), models, distractors=0)
    database.add(others)
    yield from _ask(images, described, database.open(), models, distractors=len(others))
    while block := [one for one, _ in zip(collages, range(256), strict=False)]:
        database.add(block)
    whole = database.open()
    yield from _ask(images, described, whole, models, distractors=count)
    drawn = np.random.default_rng(0).permutation(len(whole.vectors))[:LEARNED_FROM]
    quantiser = learn_quantiser(whole.vectors[np.sort(drawn)], 0)
    codes = quantiser.encode(whole.vectors)
    scan = CodeScan(quantiser, [codes], [np.zeros(len(codes), np.int32)], 1)
    coded = CodedCandidates(whole.vectors, whole.images, whole.centroids, scan)
    yield from _ask(images, described, coded, models, distractors=count, codes=True)


def _ask(
    images: ImageSet,
    described: Mapping[ImageFile, Described],
    candidates: ArrayCandidates,
    models: Models,
    **about: Any,
) -> Iterator[dict[str, Any]]:
    scores: dict[str, list[float]] = defaultdict(list)
    for query in images.queries:
        image = described[query.image]
        vector = models.flattening.apply(models.make_vlad(image)[None])[0]
        for stage, order in rank_stages(candidates, vector, make_query(image, models.centroids)):
            placed = np.full(len(candidates.images), -1.0)
            placed[order] = np.arange(len(order), 0, -1)
            scores[stage].append(score_query(query, placed, images.protocol))
    for stage, found in scores.items():
        yield {**about, "stage": stage, "score": float(np.mean(found)), "queries": len(found)}


def rank_stages(
    candidates: ArrayCandidates, vector: np.ndarray, query: QueryPoints
) -> Iterator[tuple[str, np.ndarray]]:
    """Each stage's order of the shortlist."""
    image_ids, similarity = candidates.find(vector, SHORTLIST)
    yield "vlad", image_ids
    scored = Ranking(image_ids, similarity, candidates.score(query, image_ids), {}, {})
    yield "selective", image_ids[scored.order()]
    first = rank_candidates(candidates, vector, query)
    yield "verified", first.image_ids[first.order()]
    wider = expand_ranking(candidates, vector, query, first)
    yield "expanded", wider.image_ids[wider.order()]


class Describer:
    """Models and described images by the functions of `evaluate images --verify`, kept in its cache."""

    def __init__(self, images: ImageSet, arguments: argparse.Namespace) -> None:
        self.table = make_table(images, arguments, [arguments.seed])
        settings = self.table.settings
        self._seed, self._place = arguments.seed, Place(settings.patches.region, None)
        self._training = TrainingPatches(self.table.train_images, self.table.reader, lambda *_: None)
        (request,) = self.table.requests
        self._members = [self.table.compare(one, self._place, self._training) for one in request.members]
        evidence = EvidenceTable(self.table, parse_points("ckn", settings), True)
        self._rows = evidence._describe(evidence.requests[0], self._place, self._training)

    def learn(self) -> Models:
        table, spec = self.table, self.table.settings.points
        others = [ImageFile(path) for path in table.reduction_images]
        vlads = table.mix_vlads(self._members, others, self._place, self._seed, True)
        return Models(
            tuple(one.words[self._seed] for one in self._members),
            tuple(one.weight for one in self._members),
            learn_flattening(vlads, background=True, min_images=2),
            fit_point_words(
                self._rows["train"], len(table.train_images), replace(spec, seed=spec.seed + self._seed)
            ),
        )

    def describe(self, file: ImageFile) -> Described:
        reader = self.table.reader.with_region(self._place.region)
        detected, rows = reader.detect(file), self._rows[file]
        channels = [describe_regions(reader, file, one.keyed)[0][: one.max_points] for one in self._members]
        size = (detected.width_px, detected.height_px)
        return Described(detected.keypoints.frames[: len(rows)], size, tuple(channels), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--protocol", required=True, choices=["holidays", "ukbench", "oxford", "groups"])
    parser.add_argument("--others", type=Path, nargs="+", required=True)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--train-images", type=Path, required=True)
    parser.add_argument("--reduction-images", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of the codebooks")
    parser.add_argument("--preset", default="compact")
    parser.add_argument("--config")
    parser.add_argument("--set", dest="override", action="append", default=[])
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    set_compute_threads(1)
    images = read_image_set(arguments.data.absolute(), arguments.protocol)
    others = [ImageFile(path) for folder in arguments.others for path in find_images(folder.absolute())]
    describer = Describer(replace(images, database=(*images.database, *others)), arguments)
    described = {file: describer.describe(file) for file in images.images}
    unrelated = [describer.describe(file) for file in others]
    for one in measure(images, described, unrelated, describer.learn(), arguments.count):
        print(json.dumps(one), flush=True)


if __name__ == "__main__":
    main()
