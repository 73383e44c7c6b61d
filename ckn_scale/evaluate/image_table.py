"""Descriptors on image sets: VLAD vectors compared by their inner product, codebooks of several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ckn_scale.config import Settings
from ckn_scale.core.codebook import fit_codebook
from ckn_scale.core.specs import VladSpec
from ckn_scale.core.vlad import aggregate_vlad
from ckn_scale.evaluate.cache import ContentCache, hash_code, make_key
from ckn_scale.evaluate.descriptors import Member, Request, fit_member, list_members
from ckn_scale.evaluate.image_sets import ImageSet, Query
from ckn_scale.evaluate.metrics import average_precision, count_in_top
from ckn_scale.evaluate.parallel import describe_files
from ckn_scale.evaluate.regions import ImageFile, KeyedDescriptor, RegionReader, describe_regions
from ckn_scale.evaluate.training_images import Progress, TrainingPatches

Similarities = dict[tuple[int, bool], np.ndarray]  # (Q, N) by seed and intra-normalisation


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
    train_seconds: float
    describe_seconds: float

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
    keyed: KeyedDescriptor
    weight: float
    num_words: int
    seconds: float


@dataclass
class ImageTable:
    images: ImageSet
    requests: Sequence[Request]
    settings: Settings
    train_images: Sequence[Path]
    cache: ContentCache
    on_progress: Progress
    seeds: Sequence[int] = (0, 1, 2)
    intra_choices: Sequence[bool] = (False, True)
    workers: int = 1
    reader: RegionReader = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.reader = RegionReader(settings.images, settings.keypoints, settings.patches, self.cache)

    def measure(self, places: Sequence[Place]) -> dict[str, list[ImageCell]]:
        cells: dict[str, list[ImageCell]] = {request.name: [] for request in self.requests}
        training = TrainingPatches(self.train_images, self.reader, self.on_progress)
        for place in places:
            compared = {
                member.label: self._compare(member, place, training) for member in list_members(self.requests)
            }
            for request in self.requests:
                members = [compared[member.label] for member in request.members]
                cells[request.name] += [self._score(members, place, intra) for intra in self.intra_choices]
        return cells

    def _compare(self, member: Member, place: Place, training: TrainingPatches) -> Compared:
        source = training.source(place.region, member.settings.sample)
        keyed = fit_member(member, place.smoothing_px, source, self.cache)
        reader, vlad = self.reader.with_region(place.region), member.settings.vlad
        what = f"{member.label}, region {place.region:g}"
        files = self.images.images
        seconds = describe_files(files, reader, keyed, what, self.on_progress, workers=self.workers)
        similarities: Similarities = {}
        for seed in self.seeds:
            centroids = self._fit_words(keyed, source(vlad.num_descriptors), vlad, seed)
            for intra in self.intra_choices:
                vectors = {
                    file: aggregate_vlad(
                        describe_regions(reader, file, keyed)[0], centroids, intra_normalise=intra
                    )
                    for file in files
                }
                similarities[seed, intra] = self._measure_similarities(vectors)
        return Compared(similarities, keyed, member.weight, vlad.num_words, seconds)

    def _fit_words(
        self, keyed: KeyedDescriptor, patches: np.ndarray, vlad: VladSpec, seed: int
    ) -> np.ndarray:
        """The k-means words of one seed, or those the cache knows."""
        facts = (vlad.num_words, vlad.kmeans_iterations, vlad.seed + seed)
        key = make_key("codebook", hash_code(True), keyed.key, patches, facts)
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

    def _measure_similarities(self, vectors: dict[ImageFile, np.ndarray]) -> np.ndarray:
        queries = np.stack([vectors[query.image] for query in self.images.queries])
        return queries @ np.stack([vectors[file] for file in self.images.database]).T

    def _score(self, members: Sequence[Compared], place: Place, intra: bool) -> ImageCell:
        """Vectors of several members side by side have the weighted mean of their similarities."""
        scores = []
        for seed in self.seeds:
            parts = [one.similarities[seed, intra] for one in members]
            similarities = np.average(parts, axis=0, weights=[one.weight for one in members])
            scores.append(score_rankings(self.images, similarities))
        return ImageCell(
            place,
            intra,
            tuple(scores),
            dim=sum(one.num_words * one.keyed.dim for one in members),
            train_seconds=sum(one.keyed.train_seconds for one in members),
            describe_seconds=sum(one.seconds for one in members),
        )


def score_rankings(images: ImageSet, similarities: np.ndarray) -> float:
    """Mean average precision, or UKBench's mean number of group members among the first four."""
    scores = [
        score_query(query, row, images.protocol)
        for query, row in zip(images.queries, similarities, strict=True)
    ]
    return float(np.mean(scores))


def score_query(query: Query, similarities: np.ndarray, protocol: str) -> float:
    """`similarities` (N,) to the database, larger is better; ties go by position."""
    ranking = np.argsort(-similarities, kind="stable")
    if protocol == "ukbench":
        return float(count_in_top(ranking, set(query.relevant)))
    kept = ranking[~np.isin(ranking, list(query.ignored))]
    return average_precision(np.isin(kept, list(query.relevant)), len(query.relevant))
