"""Descriptors on image sets: VLAD vectors compared by their inner product, codebooks of several seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ckn_scale.config import Settings
from ckn_scale.core.specs import VladSpec
from ckn_scale.core.vlad import aggregate_vlad, fit_codebook
from ckn_scale.evaluate.answers import rank_images, summarise_answers
from ckn_scale.evaluate.cache import ContentCache, hash_code, make_key
from ckn_scale.evaluate.descriptors import Member, Request, fit_member, list_members
from ckn_scale.evaluate.image_sets import ImageSet, Query
from ckn_scale.evaluate.metrics import average_precision, count_in_top
from ckn_scale.evaluate.parallel import describe_files
from ckn_scale.evaluate.reductions import check_dims, reduce_vectors
from ckn_scale.evaluate.regions import ImageFile, KeyedDescriptor, RegionReader, describe_regions
from ckn_scale.evaluate.report import format_table, points
from ckn_scale.evaluate.training_images import Progress, TrainingPatches

Similarities = dict[tuple[int, bool], np.ndarray]  # (Q, N) by seed and intra-normalisation
Row = tuple[str, str]  # a descriptor and what is done to its VLAD: none, flatten, signs, pca-512


@dataclass(frozen=True)
class Place:
    """A place of the grid; a smoothing of none is the descriptor's own."""

    region: float
    smoothing_px: float | None


@dataclass(frozen=True)
class ImageCell:
    """One descriptor at one place, with or without intra-normalisation: a score per codebook seed."""

    place: Place
    intra_normalise: bool
    seed_scores: tuple[float, ...]
    dim: int
    stored_bytes: int  # of one image's vector
    train_seconds: float
    describe_seconds: float
    answers: dict[str, Any] = field(default_factory=dict)  # of the first seed, see `answers.py`

    @property
    def mean_score(self) -> float:
        return float(np.mean(self.seed_scores))

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds."""
        return float(np.std(self.seed_scores, ddof=1)) if len(self.seed_scores) > 1 else 0.0


@dataclass(frozen=True)
class Compared:
    """What one member says about all pairs of query and database image."""

    similarities: Similarities
    words: dict[int, np.ndarray]  # (K, D) by seed
    keyed: KeyedDescriptor
    weight: float
    num_words: int
    seconds: float
    max_points: int | None = None  # of an image, the strongest


@dataclass
class ImageTable:
    """A table of descriptors on one image set: its rows, the grid, and where patches and results are kept."""

    images: ImageSet
    requests: Sequence[Request]
    settings: Settings
    train_images: Sequence[Path]
    cache: ContentCache
    on_progress: Progress
    seeds: Sequence[int] = (0, 1, 2)
    intra_choices: Sequence[bool] = (False, True)
    workers: int = 1
    reduction_images: Sequence[Path] = ()  # others than those of the set, to learn reductions on
    dims: Sequence[int] = ()  # of PCAs learned on them
    reader: RegionReader = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        if self.dims:
            check_dims(self.dims, len(self.reduction_images))
        self.reader = RegionReader(settings.images, settings.keypoints, settings.patches, self.cache)

    def measure(self, places: Sequence[Place]) -> dict[Row, list[ImageCell]]:
        """Every row's cells over the grid: the VLAD of each request as it is, and its reduced forms."""
        cells: dict[Row, list[ImageCell]] = defaultdict(list)
        training = TrainingPatches(self.train_images, self.reader, self.on_progress)
        for place in places:
            compared = {
                member.label: self.compare(member, place, training) for member in list_members(self.requests)
            }
            for request in self.requests:
                members = [compared[member.label] for member in request.members]
                for intra in self.intra_choices:
                    cells[request.name, "none"].append(self._score(members, place, intra))
                    for form, cell in self._score_reduced(members, place, intra):
                        cells[request.name, form].append(cell)
        return dict(cells)

    def compare(self, member: Member, place: Place, training: TrainingPatches) -> Compared:
        """Similarities of all queries and images by one member, learned and described as needed."""
        source = training.source(place.region, member.settings.sample)
        keyed = fit_member(member, place.smoothing_px, source, self.cache)
        reader, vlad = self.reader.with_region(place.region), member.settings.vlad
        max_points = member.channel.max_points
        what = f"{member.label}, region {place.region:g}"
        files = self.images.images
        seconds = describe_files(files, reader, keyed, what, self.on_progress, workers=self.workers)
        others, what = [ImageFile(path) for path in self.reduction_images], f"{what}, other images"
        describe_files(others, reader, keyed, what, self.on_progress, workers=self.workers)
        words = {
            seed: self._fit_words(keyed, source(vlad.num_descriptors), vlad, seed) for seed in self.seeds
        }
        similarities: Similarities = {}
        for seed in self.seeds:
            for intra in self.intra_choices:
                vectors = _aggregate_files(reader, files, keyed, words[seed], intra, max_points)
                similarities[seed, intra] = np.matmul(*self.split(vectors))
        return Compared(
            similarities, words, keyed, member.channel.weight, vlad.num_words, seconds, max_points
        )

    def _fit_words(
        self, keyed: KeyedDescriptor, patches: np.ndarray, vlad: VladSpec, seed: int
    ) -> np.ndarray:
        """The k-means words of one seed, or those the cache knows."""
        settings = (vlad.num_words, vlad.kmeans_iterations, vlad.seed + seed)
        key = make_key("codebook", hash_code(), keyed.key, patches, settings)
        arrays = self.cache.load(key)
        if arrays is None:
            rows = self._describe_training(keyed, patches)
            words = fit_codebook(
                rows, vlad.num_words, iterations=vlad.kmeans_iterations, seed=vlad.seed + seed
            )
            arrays = {"centroids": words}
            self.cache.save(key, arrays)
        return arrays["centroids"]

    def _describe_training(self, keyed: KeyedDescriptor, patches: np.ndarray) -> np.ndarray:
        key = make_key("training rows", keyed.key, patches)
        arrays = self.cache.load(key)
        if arrays is None:
            arrays = {"rows": keyed.descriptor.describe(patches)}
            self.cache.save(key, arrays)
        return arrays["rows"]

    def split(self, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of all images of the set → queries (Q, D), and the database as columns (D, N)."""
        position = {file: row for row, file in enumerate(self.images.images)}
        queries = vectors[[position[query.image] for query in self.images.queries]]
        return queries, vectors[[position[file] for file in self.images.database]].T

    def _score(self, members: Sequence[Compared], place: Place, intra: bool) -> ImageCell:
        """Vectors of several members side by side have the weighted mean of their similarities."""
        scores, dim = [], sum(one.num_words * one.keyed.dim for one in members)
        answers: dict[str, Any] = {}
        for seed in self.seeds:
            parts = [one.similarities[seed, intra] for one in members]
            similarities = np.average(parts, axis=0, weights=[one.weight for one in members])
            by_query = score_queries(self.images, similarities)
            scores.append(float(np.mean(by_query)))
            answers = answers or summarise_answers(self.images, similarities, by_query)
        return replace(self._make_cell(members, place, intra, scores, dim, 2 * dim), answers=answers)

    def _score_reduced(
        self, members: Sequence[Compared], place: Place, intra: bool
    ) -> Iterator[tuple[str, ImageCell]]:
        if not self.reduction_images:
            return
        others = [ImageFile(path) for path in self.reduction_images]
        forms: dict[str, tuple[int, int]] = {}
        scores: dict[str, list[float]] = defaultdict(list)
        for seed in self.seeds:
            mixed = self.mix_vlads(members, self.images.images, place, seed, intra)
            queries, database = self.split(mixed)
            learned = self.mix_vlads(members, others, place, seed, intra)
            for one in reduce_vectors(queries, database.T, learned, self.dims):
                form = f"{one.name}-{one.dim}" if one.name == "pca" else one.name
                forms[form] = (one.dim, one.stored_bytes)
                scores[form].append(score_rankings(self.images, one.similarities))
        for form, found in scores.items():
            yield form, self._make_cell(members, place, intra, found, *forms[form])

    def mix_vlads(
        self, members: Sequence[Compared], files: Sequence[ImageFile], place: Place, seed: int, intra: bool
    ) -> np.ndarray:
        """(N, D) VLADs of all members side by side, as the encoder makes them."""
        reader = self.reader.with_region(place.region)
        blocks = [
            np.float32(np.sqrt(one.weight))
            * _aggregate_files(reader, files, one.keyed, one.words[seed], intra, one.max_points)
            for one in members
        ]
        mixed: np.ndarray = np.concatenate(blocks, axis=1) / np.float32(
            np.sqrt(sum(one.weight for one in members))
        )
        return mixed

    def _make_cell(
        self,
        members: Sequence[Compared],
        place: Place,
        intra: bool,
        scores: Sequence[float],
        dim: int,
        stored_bytes: int,
    ) -> ImageCell:
        return ImageCell(
            place,
            intra,
            tuple(scores),
            dim,
            stored_bytes,
            train_seconds=sum(one.keyed.train_seconds for one in members),
            describe_seconds=sum(one.seconds for one in members),
        )


def _aggregate_files(
    reader: RegionReader,
    files: Sequence[ImageFile],
    keyed: KeyedDescriptor,
    centroids: np.ndarray,
    intra: bool,
    max_points: int | None,
) -> np.ndarray:
    """(N, K · D) VLADs of the strongest points, in the order of the files."""
    described = (describe_regions(reader, file, keyed)[0][:max_points] for file in files)
    return np.stack([aggregate_vlad(rows, centroids, intra_normalise=intra) for rows in described])


def score_rankings(images: ImageSet, similarities: np.ndarray) -> float:
    """Mean average precision, or UKBench's mean number of group members among the first four."""
    return float(np.mean(score_queries(images, similarities)))


def score_queries(images: ImageSet, similarities: np.ndarray) -> list[float]:
    """The score of each query; `similarities` (Q, N)."""
    pairs = zip(images.queries, similarities, strict=True)
    return [score_query(query, row, images.protocol) for query, row in pairs]


def score_query(query: Query, similarities: np.ndarray, protocol: str) -> float:
    """`similarities` (N,) to the database, larger is better; ties go by position."""
    ranking = rank_images(query, similarities)
    if protocol == "ukbench":
        return float(count_in_top(ranking, set(query.relevant)))
    return average_precision(np.isin(ranking, list(query.relevant)), len(query.relevant))


def summarise_images(cells: Mapping[Row, Sequence[ImageCell]], protocol: str) -> list[dict[str, Any]]:
    """For each row its best cell, and all of them as `grid`: what --json writes."""
    measure = "score" if protocol == "ukbench" else "map"
    return [_summarise(row, column, measure) for row, column in cells.items()]


def _summarise(row: Row, cells: Sequence[ImageCell], measure: str) -> dict[str, Any]:
    best = max(cells, key=lambda cell: cell.mean_score)
    descriptor, reduction = row
    return {
        "descriptor": descriptor,
        "reduction": reduction.partition("-")[0],
        "dim": best.dim,
        "bytes": best.stored_bytes,
        measure: best.mean_score,
        "spread": best.spread,
        "seeds": list(best.seed_scores),
        **_describe_place(best),
        "train_seconds": round(best.train_seconds, 2),
        "describe_seconds": round(best.describe_seconds, 2),
        **best.answers,
        "grid": [
            {**_describe_place(cell), measure: cell.mean_score, "spread": cell.spread} for cell in cells
        ],
    }


def _describe_place(cell: ImageCell) -> dict[str, Any]:
    return {
        "region": cell.place.region,
        "smoothing_px": cell.place.smoothing_px,
        "intra_normalise": cell.intra_normalise,
    }


def format_image_tables(results: Sequence[dict[str, Any]], num_seeds: int) -> str:
    """What the command prints."""
    unit = "score of 4" if "score" in results[0] else "mean average precision in points"
    codebooks = "one codebook" if num_seeds == 1 else f"mean of {num_seeds} codebooks"
    return "\n".join(
        [
            f"{unit}, {codebooks}, each descriptor at its best place of the grid:",
            "",
            format_image_results(results),
            "",
            "the grid, shared by all (* the best of a column):",
            "",
            format_image_grid(results),
        ]
    )


def format_image_results(results: Sequence[dict[str, Any]]) -> str:
    """Rows by score, best first."""
    measure = "score" if "score" in results[0] else "map"
    header = [
        "descriptor",
        "dim",
        "bytes",
        "region",
        "smooth",
        "intra",
        measure,
        "±",
        "train s",
        "describe s",
    ]
    rows = [
        [
            _name(one),
            str(one["dim"]),
            str(one["bytes"]),
            *_format_place(one),
            _format_score(one, measure, measure),
            _format_score(one, "spread", measure),
            f"{one['train_seconds']:.1f}",
            f"{one['describe_seconds']:.1f}",
        ]
        for one in sorted(results, key=lambda one: -one[measure])
    ]
    return format_table(header, rows)


def format_image_grid(results: Sequence[dict[str, Any]]) -> str:
    """Rows are places, columns descriptors; the best of each is starred."""
    measure = "score" if "score" in results[0] else "map"
    header = ["region  smooth  intra", *map(_name, results)]
    rows = []
    for position, place in enumerate(results[0]["grid"]):
        region, smoothing, intra = _format_place(place)
        cells = [_mark(one, position, measure) for one in results]
        rows.append([f"{region:>6}  {smoothing:>6}  {intra:>5}", *cells])
    return format_table(header, rows)


def _name(result: Mapping[str, Any]) -> str:
    """`ckn`, `ckn, signs`, `ckn, pca 512`."""
    words = {"none": "", "pca": f", pca {result['dim']}"}
    name: str = result["descriptor"] + words.get(result["reduction"], f", {result['reduction']}")
    return name


def _format_place(place: Mapping[str, Any]) -> list[str]:
    smoothing = place["smoothing_px"]
    return [
        f"{place['region']:g}",
        "own" if smoothing is None else f"{smoothing:g}",
        "yes" if place["intra_normalise"] else "no",
    ]


def _mark(result: Mapping[str, Any], position: int, measure: str) -> str:
    cell = result["grid"][position]
    star = "*" if cell[measure] == result[measure] else ""
    return f"{star}{_format_score(cell, measure, measure)} ±{_format_score(cell, 'spread', measure)}"


def _format_score(result: Mapping[str, Any], key: str, measure: str) -> str:
    return f"{result[key]:.3f}" if measure == "score" else points(result[key])
