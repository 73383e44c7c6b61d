"""Stages of an answer on image sets: vectors, selective matching, geometry, expansion (`core/ranking.py`).

The vectors are those of a row of the image table; the codes of points may be another descriptor's, so that
descriptors are compared at equal bytes: `ckn` (the preset's channels of points), `rootsift`, `rootsift@6.5`
(at another region than the preset's).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ckn_scale.config import Settings, find_channels
from ckn_scale.core.evidence import MATCHED_ASSIGNMENTS, Evidence, QueryPoints, score_shortlist, verify_head
from ckn_scale.core.expansion import NUM_VERIFIERS, make_hit_points
from ckn_scale.core.flattening import learn_flattening
from ckn_scale.core.packed_points import pack_codes, pack_frames, unpack_frames
from ckn_scale.core.pca import fit_projection_of_columns, split_columns
from ckn_scale.core.points import fit_point_words
from ckn_scale.core.ranking import Ranking, expand_ranking, rank_candidates
from ckn_scale.core.selective_matching import PointSets, encode_query
from ckn_scale.core.specs import PointsSpec, ProjectionSpec
from ckn_scale.core.vector_codes import HalfCodec, SignCodec, VectorCodec
from ckn_scale.core.vlad import assign_words
from ckn_scale.errors import InputError
from ckn_scale.evaluate.descriptors import Member, fit_member
from ckn_scale.evaluate.image_table import Compared, ImageTable, Place, score_query
from ckn_scale.evaluate.parallel import describe_files
from ckn_scale.evaluate.regions import ImageFile, KeyedDescriptor, RegionReader, describe_regions
from ckn_scale.evaluate.report import format_table, points
from ckn_scale.evaluate.training_images import TrainingPatches

STAGES = ("vlad", "selective", "verified", "expanded")
SIFTS = ("sift", "rootsift")
SIFT_WHITENING = 0.5  # its best (benchmarks/README.md)


@dataclass(frozen=True)
class PointsRequest:
    """Which descriptors make the codes of points, and at which region; none: the preset's."""

    name: str
    members: tuple[Member, ...]
    region: float | None


def parse_points(text: str, settings: Settings, weights: Sequence[str] = ()) -> list[PointsRequest]:
    """`ckn,rootsift@6.5` → requests; InputError for another descriptor or region."""
    found = []
    for name in (part.strip() for part in text.split(",") if part.strip()):
        kind, at, region = name.partition("@")
        try:
            side = float(region) if at else None
        except ValueError:
            side = -1.0
        if side is not None and not 0.5 <= side <= 100:
            raise InputError(f"--points {name}: the region must be a number from 0.5 to 100")
        found.append(PointsRequest(name, _list_members(kind, settings, weights), side))
    if not found:
        raise InputError("--points names no descriptor")
    return found


def _list_members(kind: str, settings: Settings, weights: Sequence[str]) -> tuple[Member, ...]:
    chosen = find_channels(settings, kind, weights)
    if kind == "ckn":
        chosen = tuple(one for one in chosen if one.name in settings.points.channels)
    spec: PointsSpec = settings.points
    members = []
    for one in chosen:
        whitening = SIFT_WHITENING if one.name in SIFTS else spec.whitening
        projection = ProjectionSpec(spec.dim, whitening, num_descriptors=settings.training.num_patches)
        members.append(Member(f"points-{one.label}", settings, replace(one, projection=projection)))
    return tuple(members)


@dataclass(frozen=True)
class ImagePoints:
    """The points of one image: as they are stored, sorted by word, and as a query has them."""

    stored: PointSets
    frames: np.ndarray  # (N, 9) uint8, in the order of `stored`
    size_px: tuple[int, int]
    query: QueryPoints

    @property
    def stored_bytes(self) -> int:
        return self.stored.words.nbytes + self.stored.codes.nbytes + self.frames.nbytes


@dataclass(frozen=True)
class ArrayCandidates:
    """Images in memory as candidates: ids are positions in the database."""

    vectors: np.ndarray  # (N, D) float32, as decoded from what is stored
    images: Sequence[ImagePoints]
    centroids: np.ndarray

    def find(self, vector: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        similarity = self.vectors @ vector
        order = np.argsort(-similarity, kind="stable")[:k]
        return order, similarity[order]

    def compare(self, vector: np.ndarray, image_ids: np.ndarray) -> np.ndarray:
        similarity: np.ndarray = (self.vectors @ vector)[image_ids]
        return similarity

    def score(self, query: QueryPoints, image_ids: np.ndarray) -> np.ndarray:
        if 2 * len(image_ids) > len(self.images):  # a score does not depend on the others
            scores: np.ndarray = score_shortlist(query, self._all)[image_ids]
            return scores
        return score_shortlist(query, self._gather(image_ids))

    def verify(self, query: QueryPoints, image_ids: np.ndarray) -> list[Evidence]:
        if len(image_ids) == 0:
            return []
        chosen = [self.images[one] for one in image_ids.tolist()]
        frames = np.concatenate([one.frames for one in chosen])
        return verify_head(query, self._gather(image_ids), frames, np.array([one.size_px for one in chosen]))

    def load_hits(
        self, image_ids: np.ndarray, evidence: Sequence[Evidence]
    ) -> tuple[np.ndarray, list[QueryPoints]]:
        hits = []
        for place, (image_id, one) in enumerate(zip(image_ids.tolist(), evidence, strict=True)):
            image, words = self.images[image_id], self.centroids if place < NUM_VERIFIERS else None
            assert one.box is not None  # a hit has inliers
            hits.append(make_hit_points(image.stored, image.frames, image.size_px, one.box, words))
        return self.vectors[image_ids], hits

    def load_vectors(self, image_ids: np.ndarray) -> np.ndarray:
        vectors: np.ndarray = self.vectors[image_ids]
        return vectors

    @cached_property
    def _all(self) -> PointSets:
        return _concatenate([image.stored for image in self.images])

    def _gather(self, image_ids: np.ndarray) -> PointSets:
        return _concatenate([self.images[one].stored for one in image_ids.tolist()])


def _concatenate(parts: Sequence[PointSets]) -> PointSets:
    offsets = np.cumsum([0, *(len(part.words) for part in parts)])
    return PointSets(
        np.concatenate([part.words for part in parts]),
        np.concatenate([part.codes for part in parts]),
        offsets,
    )


class Measured(NamedTuple):
    """One stage with one codebook, by query."""

    scores: list[float]
    milliseconds: list[float]  # of CPU


@dataclass
class EvidenceTable:
    """Stages for each row of an image table and each kind of codes."""

    table: ImageTable
    requests: Sequence[PointsRequest]
    expand: bool
    discriminative: bool = False

    def measure(self, place: Place) -> list[dict[str, Any]]:
        """A result for each stage, kind of codes, and row of vectors."""
        table = self.table
        training = TrainingPatches(table.train_images, table.reader, table.on_progress)
        described = {one.name: self._describe(one, place, training) for one in self.requests}
        return [
            result
            for request in table.requests
            for result in self._measure_vectors(
                request.name,
                [table.compare(member, place, training) for member in request.members],
                described,
                place,
            )
        ]

    def _measure_vectors(
        self,
        name: str,
        members: Sequence[Compared],
        described: Mapping[str, Mapping[str | ImageFile, np.ndarray]],
        place: Place,
    ) -> list[dict[str, Any]]:
        table = self.table
        scores: dict[tuple[str, str, int, str], list[Measured]] = defaultdict(list)
        sizes: dict[tuple[str, str, int, str], int] = {}
        for seed in table.seeds:
            for form, dim, code_bytes, queries, database in self._make_vectors(members, place, seed):
                for codes, rows in described.items():
                    found, point_bytes = self._measure_codes(codes, rows, queries, database, seed)
                    for stage, measured in found.items():
                        scores[codes, form, dim, stage].append(measured)
                        sizes[codes, form, dim, stage] = code_bytes + (stage != "vlad") * point_bytes
        return [
            _summarise(name, key, measured, sizes[key], table.images.protocol)
            for key, measured in scores.items()
        ]

    def _make_vectors(
        self, members: Sequence[Compared], place: Place, seed: int
    ) -> Iterator[tuple[str, int, int, np.ndarray, np.ndarray]]:
        """The form's name, its dimension and bytes, exact queries, and the database as decoded from codes."""
        table = self.table
        intra = table.intra_choices[-1]
        queries, columns = table.split(table.mix_vlads(members, table.images.images, place, seed, intra))
        database = np.ascontiguousarray(columns.T)
        if not table.reduction_images:
            yield _store("none", HalfCodec(queries.shape[1]), queries, database)
            return
        others = table.mix_vlads(
            members, [ImageFile(path) for path in table.reduction_images], place, seed, intra
        )
        if table.dims:
            for dim in table.dims:
                spec = ProjectionSpec(dim=dim, whitening=1.0)
                pca = fit_projection_of_columns(split_columns(others), spec)
                yield _store("pca", HalfCodec(pca.dim), pca.apply(queries), pca.apply(database))
            return
        flat = learn_flattening(others, background=True, min_images=2)
        yield _store("signs", SignCodec(flat.dim), flat.apply(queries), flat.apply(database))

    def _describe(
        self, request: PointsRequest, place: Place, training: TrainingPatches
    ) -> dict[str | ImageFile, np.ndarray]:
        """Projected descriptors of every image's strongest points; those to learn on under "train"."""
        table, spec = self.table, self.table.settings.points
        region = request.region or place.region
        reader = table.reader.with_region(region)
        source = training.source(region, table.settings.sample)
        parts: dict[str | ImageFile, list[np.ndarray]] = defaultdict(list)
        for member in request.members:
            keyed = fit_member(member, None, source, table.cache)
            what = f"points by {request.name}, region {region:g}"
            describe_files(table.images.images, reader, keyed, what, table.on_progress, workers=table.workers)
            for key, rows in self._list_rows(keyed, source(spec.num_descriptors), reader):
                parts[key].append(rows)
        return {key: np.concatenate(rows, axis=1) for key, rows in parts.items()}

    def _list_rows(
        self, keyed: KeyedDescriptor, patches: np.ndarray, reader: RegionReader
    ) -> Iterator[tuple[str | ImageFile, np.ndarray]]:
        spec = self.table.settings.points
        yield "train", keyed.descriptor.describe(patches)
        for file in self.table.images.images:
            yield file, describe_regions(reader, file, keyed)[0][: spec.max_points]

    def _measure_codes(
        self,
        name: str,
        described: Mapping[str | ImageFile, np.ndarray],
        queries: np.ndarray,
        database: np.ndarray,
        seed: int,
    ) -> tuple[dict[str, Measured], int]:
        """What each stage does, and the mean bytes of an image's points."""
        table = self.table
        spec = replace(table.settings.points, seed=table.settings.points.seed + seed)
        centroids = fit_point_words(described["train"], len(table.train_images), spec)
        images = {file: self._make_points(file, described[file], centroids) for file in table.images.images}
        candidates = ArrayCandidates(database, [images[file] for file in table.images.database], centroids)
        stages: dict[str, Measured] = defaultdict(lambda: Measured([], []))
        for done, (query, vector) in enumerate(zip(table.images.queries, queries, strict=True)):
            for stage, order, seconds in rank_stages(
                candidates,
                vector,
                images[query.image].query,
                expand=self.expand,
                discriminative=self.discriminative,
            ):
                score = score_query(query, _place_scores(order, len(database)), table.images.protocol)
                stages[stage].scores.append(score)
                stages[stage].milliseconds.append(1e3 * seconds)
            table.on_progress(f"answers with codes of {name}", done + 1, len(queries))
        point_bytes = np.mean([image.stored_bytes for image in candidates.images])
        return dict(stages), int(point_bytes)

    def _make_points(self, file: ImageFile, rows: np.ndarray, centroids: np.ndarray) -> ImagePoints:
        detected = self.table.reader.detect(file)
        size = (detected.width_px, detected.height_px)
        packed = pack_frames(detected.keypoints, *size)[: len(rows)]
        words = assign_words(rows, centroids).astype(np.uint16)
        codes = pack_codes(rows, words, centroids)
        order = np.argsort(words, kind="stable")
        stored = PointSets(words[order], codes[order], np.array([0, len(words)]))
        number = min(MATCHED_ASSIGNMENTS, len(centroids))
        query = QueryPoints(
            *encode_query(rows, centroids, num_assignments=number), unpack_frames(packed, *size).frames, size
        )
        return ImagePoints(stored, packed[order], size, query)


def rank_stages(
    candidates: ArrayCandidates,
    vector: np.ndarray,
    query: QueryPoints,
    *,
    expand: bool,
    discriminative: bool = False,
) -> Iterator[tuple[str, np.ndarray, float]]:
    """Each stage's order of image ids, and the CPU seconds from the shortlist on."""
    image_ids, similarity = candidates.find(vector, len(candidates.images))
    yield "vlad", image_ids, 0.0
    started = time.process_time()
    selective = candidates.score(query, image_ids)
    scored = Ranking(image_ids, similarity, selective, {}, {})
    yield "selective", scored.image_ids[scored.order()], time.process_time() - started
    started = time.process_time()
    first = rank_candidates(candidates, vector, query)
    yield "verified", first.image_ids[first.order()], time.process_time() - started
    if expand:
        wider = expand_ranking(candidates, vector, query, first, discriminative=discriminative)
        yield "expanded", wider.image_ids[wider.order()], time.process_time() - started


def _place_scores(order: np.ndarray, count: int) -> np.ndarray:
    """(count,) similarities that put images in this order; those not in it come last."""
    scores = np.full(count, -1.0)
    scores[order] = np.arange(len(order), 0, -1)
    return scores


def _store(
    form: str, codec: VectorCodec, queries: np.ndarray, database: np.ndarray
) -> tuple[str, int, int, np.ndarray, np.ndarray]:
    return form, queries.shape[1], codec.code_bytes, queries, codec.decode(codec.encode(database))


def _summarise(
    descriptor: str,
    key: tuple[str, str, int, str],
    measured: Sequence[Measured],
    stored_bytes: int,
    protocol: str,
) -> dict[str, Any]:
    codes, form, dim, stage = key
    seeds = [float(np.mean(one.scores)) for one in measured]
    return {
        "descriptor": descriptor,
        "points": codes,
        "stage": stage,
        "reduction": form,
        "dim": dim,
        "bytes": stored_bytes,
        "score" if protocol == "ukbench" else "map": float(np.mean(seeds)),
        "spread": float(np.std(seeds, ddof=1)) if len(seeds) > 1 else 0.0,
        "seeds": seeds,
        "ms": round(float(np.mean([one.milliseconds for one in measured])), 1),
        "by_query": np.mean([one.scores for one in measured], axis=0).round(4).tolist(),
    }


def format_stages(results: Sequence[Mapping[str, Any]]) -> str:
    """What the command prints below the table of vectors."""
    measure = "score" if "score" in results[0] else "map"

    def number(value: float) -> str:
        return f"{value:.3f}" if measure == "score" else points(value)

    header = ["stage", "codes of", "vector", "dim", "bytes", measure, "±", "ms a query"]
    rows = [
        [
            one["stage"],
            one["points"],
            f"{one['descriptor']}, {one['reduction']}",
            str(one["dim"]),
            str(one["bytes"]),
            number(one[measure]),
            number(one["spread"]),
            f"{one['ms']:.0f}",
        ]
        for one in sorted(results, key=lambda one: (one["dim"], STAGES.index(one["stage"])))
    ]
    return format_table(header, rows)
