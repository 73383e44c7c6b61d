"""An image set asked of a published index: what codes, shards and the engine itself cost."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ckn_scale.core.evidence import SHORTLIST
from ckn_scale.core.ranking import Ranking
from ckn_scale.evaluate.image_sets import ImageSet
from ckn_scale.evaluate.image_table import score_query
from ckn_scale.evaluate.report import format_table, points
from ckn_scale.evaluate.training_images import Progress
from ckn_scale.search.engine import Index
from ckn_scale.search.evidence import Query, score_points_of
from ckn_scale.search.filters import FilterLike, as_filter

STAGES = ("vlad", "selective", "verified", "expanded")


def measure_index(
    images: ImageSet,
    index: Index,
    descriptor: str,
    on_progress: Progress,
    *,
    filter: FilterLike | None = None,
) -> list[dict[str, Any]]:
    """A result for each stage of a search; what the index holds beside `images` is a distractor.

    An answer has as many hits as a shortlist; what lies behind them counts as found last.
    """
    position = {str(file.path): row for row, file in enumerate(images.database)}
    measured: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for done, query in enumerate(images.queries):
        started = time.process_time()
        encoded = index.encode_query(query.image.path, query.image.box)
        encode_s = time.process_time() - started
        for stage, uris, seconds in _answer(index, encoded, filter):
            score = score_query(query, place_scores(uris, position), images.protocol)
            measured[stage].append((score, 1e3 * (encode_s + seconds)))
        on_progress("answers of the index", done + 1, len(images.queries))
    return [
        {
            "descriptor": descriptor,
            "points": descriptor,
            "stage": stage,
            "reduction": "index",
            "dim": index.dim,
            "score" if images.protocol == "ukbench" else "map": float(np.mean(rows, axis=0)[0]),
            "ms": round(float(np.mean(rows, axis=0)[1]), 1),
        }
        for stage, rows in measured.items()
    ]


def _answer(index: Index, query: Query, filter: FilterLike | None) -> Iterator[tuple[str, list[str], float]]:
    """Each stage's URIs, best first, and its CPU seconds."""
    for stage in STAGES if index.can_verify else STAGES[:1]:
        started = time.process_time()
        if stage == "selective":
            hits = _search_selective(index, query, filter)
        else:
            verify, expand = stage != "vlad", stage == "expanded"
            answers = index.search_queries([query], SHORTLIST, verify=verify, expand=expand, filter=filter)
            hits = [hit.uri for hit in answers[0]]
        yield stage, hits, time.process_time() - started


def _search_selective(index: Index, query: Query, filter: FilterLike | None) -> list[str]:
    """The shortlist by vector and words, before geometry: no answer that a user gets."""
    group, chosen = index.shards, as_filter(filter)
    allowed = None if chosen is None else group.allow(chosen)
    (similarity,), (image_ids,) = group.find(query.vector[None], SHORTLIST, allowed=allowed)
    assert query.points is not None  # the index has points, so its encoder has words
    scored = Ranking(image_ids, similarity, score_points_of(group, query.points, image_ids), {}, {})
    order = scored.order()
    return [hit.uri for hit in group.describe(image_ids[order], scored.strength[order])]


def place_scores(uris: Sequence[str], position: dict[str, int]) -> np.ndarray:
    """Similarities that put images in this order; those that are not of the set have the last positions."""
    others = [uri for uri in uris if uri not in position]
    places = {**position, **{uri: len(position) + row for row, uri in enumerate(others)}}
    scores = np.full(len(places), -1.0)
    scores[[places[uri] for uri in uris]] = np.arange(len(uris), 0, -1)
    return scores


def format_answers(results: Sequence[dict[str, Any]]) -> str:
    """What the command prints."""
    measure = "score" if "score" in results[0] else "map"
    shown = [f"{one['score']:.3f}" if measure == "score" else points(one["map"]) for one in results]
    rows = [
        [one["stage"], str(one["dim"]), number, f"{one['ms']:.0f}"]
        for one, number in zip(results, shown, strict=True)
    ]
    return format_table(["stage", "dim", measure, "ms a query, encoding included"], rows)
