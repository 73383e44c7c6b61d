"""What is done to a VLAD before it is stored: mAP outside the images it was learned on, against bytes.

    python benchmarks/reduction.py --data DATA --train-images PHOTOS --others OTHER_PHOTOS [--seeds 1]

DATA holds the folders holidays, oxford5k_mini and ukbench; networks and words are learned on PHOTOS, the
forms of the vector on OTHER_PHOTOS, which are in no set. UKBench's score is in percent. Five tables:
forms (VLAD, flattened, PCA), bytes an image, how many photographs it is learned on, what a few bits lose over
several rotations, and collections that have nothing but themselves to learn on.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything that starts a thread pool

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckn_scale.config import load_settings
from ckn_scale.core.faiss_library import import_faiss
from ckn_scale.core.flattening import fit_flattening, learn_flattening
from ckn_scale.core.numerics import set_compute_threads
from ckn_scale.core.pca import fit_projection_of_columns, split_columns
from ckn_scale.core.rotation import Rotation
from ckn_scale.core.specs import ProjectionSpec
from ckn_scale.evaluate.cache import ContentCache
from ckn_scale.evaluate.descriptors import parse_requests
from ckn_scale.evaluate.image_sets import ImageSet, Query, read_image_set
from ckn_scale.evaluate.image_table import ImageTable, Place, score_rankings
from ckn_scale.evaluate.reductions import keep_signs
from ckn_scale.evaluate.regions import ImageFile
from ckn_scale.evaluate.report import format_table
from ckn_scale.evaluate.training_images import TrainingPatches, find_images

SETS = {"holidays": "holidays", "oxford5k_mini": "oxford", "ukbench": "ukbench"}
LEARNED_ON = (50, 100, 200, 400, 800)
ROTATIONS = 6
GROUP = 8  # numbers that a vector quantiser encodes together, in as many bits
LOST = f"points lost, bytes an image: mean and deviation over {ROTATIONS} rotations and all seeds"
Store = Callable[[np.ndarray], np.ndarray]  # (N, D) rows → what is left of them
Scores = dict[str, dict[str, list[float]]]  # by row and set, one for each seed


@dataclass(frozen=True)
class Vectors:
    """A set, and the VLADs (N, D) of `images.images` in that order."""

    images: ImageSet
    rows: np.ndarray

    def split(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        position = {file: row for row, file in enumerate(self.images.images)}
        queries = rows[[position[query.image] for query in self.images.queries]]
        return queries, rows[[position[file] for file in self.images.database]]

    def score(self, rows: np.ndarray, store: Store | None = None) -> float:
        """In percent; queries stay as they are."""
        queries, database = self.split(rows)
        return self.score_similarities(queries @ (database if store is None else store(database)).T)

    def score_similarities(self, similarities: np.ndarray) -> float:
        return score_rankings(self.images, similarities) * (25 if self.images.protocol == "ukbench" else 100)

    def cut(self, queries: Sequence[Query]) -> Vectors:
        """Some queries, and of the database only what belongs to them: a collection of few places."""
        kept = sorted({place for query in queries for place in (*query.relevant, *query.ignored)})
        kept = sorted({*kept, *(self._position(query) for query in queries)} - {-1})
        new = {old: position for position, old in enumerate(kept)}
        moved = [
            Query(one.image, frozenset(new[i] for i in one.relevant), frozenset(new[i] for i in one.ignored))
            for one in queries
        ]
        images = ImageSet(
            self.images.protocol, tuple(self.images.database[old] for old in kept), tuple(moved)
        )
        row = {file: position for position, file in enumerate(self.images.images)}
        return Vectors(images, self.rows[[row[file] for file in images.images]])

    def _position(self, query: Query) -> int:
        database = self.images.database
        return database.index(query.image) if query.image in database else -1


def describe_set(
    name: str, arguments: argparse.Namespace, seed: int, others: Sequence[Path]
) -> tuple[Vectors, np.ndarray]:
    """The VLADs of a set, and of the other photographs."""
    settings = load_settings("compact")
    images = read_image_set(arguments.data / name, SETS[name])
    train = find_images(arguments.train_images)
    requests = parse_requests("ckn", lambda _: settings)
    table = ImageTable(
        images,
        requests,
        settings,
        train,
        ContentCache(arguments.cache, 16 << 30),
        report_progress,
        seeds=[seed],
        intra_choices=[True],
        workers=arguments.workers,
        reduction_images=others,
    )
    place = Place(settings.patches.region, None)
    training = TrainingPatches(train, table.reader, report_progress)
    members = [table.compare(member, place, training) for member in requests[0].members]
    vlads = table.mix_vlads(members, images.images, place, seed, True)
    files = [ImageFile(path) for path in others]
    return Vectors(images, vlads), table.mix_vlads(members, files, place, seed, True)


def score_forms(one: Vectors, others: np.ndarray) -> Iterator[tuple[str, float]]:
    """Each form learned on all other photographs, in floats."""
    yield "VLAD", one.score(one.rows)
    yield "centred", one.score(fit_flattening(others, 0).apply(one.rows))
    for count in (8, 32, 128):
        yield f"{count} directions flattened", one.score(fit_flattening(others, count).apply(one.rows))
    for dim in (128, 512):
        projection = fit_projection_of_columns(split_columns(others), ProjectionSpec(dim=dim, whitening=1.0))
        yield f"PCA to {dim}, whitened", one.score(projection.apply(one.rows))


def score_stored(one: Vectors, others: np.ndarray) -> Iterator[tuple[str, float]]:
    """Bytes an image, after the default flattening."""
    flattening = learn_flattening(others, background=True, min_images=2)
    flat, learned = flattening.apply(one.rows), flattening.apply(others)
    dim = flat.shape[1]
    yield f"floats, {4 * dim:,}", one.score(flat)
    for bits in (8, 4, 2):
        yield f"{bits} bits, {bits * dim // 8:,}", one.score(flat, lambda rows: quantise(rows, bits))  # noqa: B023
    size, similarities = keep_signs(*one.split(flat))
    yield f"signs, {size:,}", one.score_similarities(similarities)
    for size in (4096, 2048, 1024, 512):
        yield f"4-bit PQ, {size:,}", one.score(flat, fit_pq(learned, size))


def score_learned_on(one: Vectors, others: np.ndarray) -> Iterator[tuple[str, float]]:
    yield "VLAD", one.score(one.rows)
    chosen = np.random.default_rng(0).permutation(len(others))
    for count in (*(count for count in LEARNED_ON if count < len(others)), len(others)):
        learned = learn_flattening(others[chosen[:count]], background=True, min_images=2)
        yield f"{count} photographs", one.score(learned.apply(one.rows))


def score_lost(one: Vectors, others: np.ndarray) -> Iterator[tuple[str, float]]:
    """Points that few bits cost, once for each of several rotations: one alone says little."""
    flat = learn_flattening(others, background=True, min_images=2).apply(one.rows)
    exact, codebook = one.score(flat), fit_groups()
    for seed in range(ROTATIONS):
        flips = np.random.default_rng(seed).choice(np.float32([-1, 1]), flat.shape[1])
        turned = flat * flips  # other signs before the fixed transform are another rotation
        for bits in (1, 2):
            left = one.score(turned, lambda rows: quantise(rows, bits))  # noqa: B023
            name = "signs" if bits == 1 else f"{bits} bits"
            yield f"{name}, {bits * flat.shape[1] // 8:,}", exact - left
        left = one.score(turned, lambda rows: quantise_groups(rows, codebook))
        yield f"{GROUP} numbers in {GROUP} bits, {flat.shape[1] // 8:,}", exact - left


def score_itself(name: str, one: Vectors) -> Iterator[tuple[str, list[float]]]:
    """VLAD, flattened by what the collection itself teaches, and the same with equal weights."""
    for title, part in cut_collections(name, one):
        learned = learn_flattening(part.rows, background=False, min_images=2)
        equal = fit_flattening(part.rows, len(learned.factors))
        forms = [part.rows, learned.apply(part.rows), equal.apply(part.rows)]
        title = f"{title}: {len(part.images.images)} images, {len(learned.factors)} directions"
        yield title, [part.score(rows) for rows in forms]


def cut_collections(name: str, one: Vectors) -> Iterator[tuple[str, Vectors]]:
    """Large to small; the last of Oxford is one building."""
    queries = one.images.queries
    yield name, one
    if name == "oxford5k_mini":
        yield f"{name}, buildings only", one.cut(queries)
        yield f"{name}, one building", one.cut(queries[:5])
        return
    step = 4 if name == "ukbench" else 1  # a group of UKBench is four queries
    for share in (2, 10):
        yield f"{name}, 1/{share} of the groups", one.cut(queries[: step * (len(queries) // step // share)])


def quantise(rows: np.ndarray, bits: int) -> np.ndarray:
    """Levels that are best for a normal distribution."""
    levels = fit_levels(bits)
    borders = (levels[1:] + levels[:-1]) / 2
    return keep_nearest(rows, lambda scaled: levels[np.searchsorted(borders, scaled)])


def quantise_groups(rows: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    """Groups of numbers as their nearest vector of the (2^bits, GROUP) codebook."""
    offsets = np.sum(codebook**2, axis=1) / 2

    def nearest(scaled: np.ndarray) -> np.ndarray:
        found = [np.argmax(row.reshape(-1, GROUP) @ codebook.T - offsets, axis=1) for row in scaled]
        return codebook[np.stack(found)].reshape(scaled.shape)

    return keep_nearest(rows, nearest)


def keep_nearest(rows: np.ndarray, nearest: Store) -> np.ndarray:
    """What `nearest` leaves of rows after a rotation, which makes normal variables of any vector."""
    rotation = Rotation(rows.shape[1])
    rotated = rotation.apply(rows)
    scale = np.sqrt(np.mean(rotated**2, axis=1, keepdims=True))
    left = nearest(rotated / scale).astype(np.float32) * scale
    factors = np.sum(rotated * rotated, axis=1) / np.sum(left * rotated, axis=1)  # unbiased, as for signs
    return rotation.undo(left * factors[:, None])


def fit_groups() -> np.ndarray:
    points = np.random.default_rng(0).standard_normal((60_000, GROUP)).astype(np.float32)
    clusters = import_faiss().Kmeans(GROUP, 2**GROUP, niter=30, seed=0)
    clusters.train(points)
    return clusters.centroids


def fit_levels(bits: int) -> np.ndarray:
    """Lloyd's algorithm on quantiles of the normal distribution."""
    from statistics import NormalDist

    points = np.array([NormalDist().inv_cdf((i + 0.5) / 20_000) for i in range(20_000)])
    levels = np.quantile(points, (np.arange(2**bits) + 0.5) / 2**bits)
    for _ in range(200):
        nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, points)
        levels = np.bincount(nearest, points, 2**bits) / np.bincount(nearest, minlength=2**bits)
    return levels


def fit_pq(learned: np.ndarray, size: int) -> Store:
    faiss = import_faiss()
    quantiser = faiss.ProductQuantizer(learned.shape[1], 2 * size, 4)
    quantiser.train(np.ascontiguousarray(learned))
    return lambda rows: quantiser.decode(quantiser.compute_codes(np.ascontiguousarray(rows)))


def report_progress(what: str, done: int, total: int) -> None:
    if done == total:
        print(f"  {what}: {total}", flush=True)


def print_table(title: str, scores: Scores, *, spread: bool = False) -> None:
    names = list(SETS)
    rows = [[row, *(show(found[name], spread) for name in names)] for row, found in scores.items()]
    print(f"\n{title}\n\n{format_table(['', *names], rows)}", flush=True)


def show(scores: Sequence[float], spread: bool) -> str:
    return f"{np.mean(scores):.2f} ± {np.std(scores):.2f}" if spread else f"{np.mean(scores):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--train-images", type=Path, required=True)
    parser.add_argument("--others", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1, help="codebooks to average over")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cache", type=Path)
    arguments = parser.parse_args()
    set_compute_threads(1)
    others = find_images(arguments.others)
    tables = {
        f"forms, learned on {len(others)} other photographs": score_forms,
        "bytes an image, flattened on the same": score_stored,
        "how many photographs it is learned on": score_learned_on,
        LOST: score_lost,
    }
    scores: dict[str, Scores] = {title: defaultdict(lambda: defaultdict(list)) for title in tables}
    own: dict[str, list[list[float]]] = defaultdict(list)
    for seed in range(arguments.seeds):
        for name in SETS:
            one, learned = describe_set(name, arguments, seed, others)
            for title, measure in tables.items():
                for row, score in measure(one, learned):
                    scores[title][row][name].append(score)
            for row, found in score_itself(name, one):
                own[row].append(found)
    for title, table in scores.items():
        print_table(title, table, spread=title == LOST)
    rows = [[row, *(f"{score:.1f}" for score in np.mean(found, axis=0))] for row, found in own.items()]
    header = ["", "VLAD", "flattened", "with equal weights"]
    print(f"\ncollections with nothing but themselves to learn on\n\n{format_table(header, rows)}")


if __name__ == "__main__":
    main()
