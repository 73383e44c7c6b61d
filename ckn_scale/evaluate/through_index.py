"""An image set asked of a published index: what codes, shards and the engine itself cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ckn_scale.errors import InputError
from ckn_scale.evaluate.image_sets import ImageSet
from ckn_scale.evaluate.image_table import score_query
from ckn_scale.evaluate.report import format_table, points
from ckn_scale.evaluate.training_images import Progress
from ckn_scale.search.engine import Index

STAGES = ("vlad", "verified", "expanded")


def measure_index(
    images: ImageSet, index: Index, descriptor: str, on_progress: Progress
) -> list[dict[str, Any]]:
    """A result for each stage that a search answers by; `images` are those that were indexed."""
    position = {str(file.path): row for row, file in enumerate(images.database)}
    results = []
    for stage in STAGES:
        scores, started = [], time.process_time()
        for done, query in enumerate(images.queries):
            verify, expand = stage != "vlad", stage == "expanded"
            image, k = query.image, len(position)
            answer = index.search(image.path, k, image.box, verify=verify, expand=expand)
            ranking = _locate([hit.uri for hit in answer], position)
            similarities = np.full(len(position), -1.0)
            similarities[ranking] = np.arange(len(ranking), 0, -1)
            scores.append(score_query(query, similarities, images.protocol))
            on_progress(f"answers of the index, {stage}", done + 1, len(images.queries))
        results.append(
            {
                "descriptor": descriptor,
                "points": descriptor,
                "stage": stage,
                "reduction": "index",
                "dim": index.dim,
                "score" if images.protocol == "ukbench" else "map": float(np.mean(scores)),
                "ms": round(1e3 * (time.process_time() - started) / len(images.queries), 1),
            }
        )
    return results


def _locate(uris: Sequence[str], position: dict[str, int]) -> list[int]:
    unknown = [uri for uri in uris if uri not in position]
    if unknown:
        raise InputError(f"the index holds {unknown[0]}, which is no image of the set")
    return [position[uri] for uri in uris]


def format_answers(results: Sequence[dict[str, Any]]) -> str:
    """What the command prints."""
    measure = "score" if "score" in results[0] else "map"
    shown = [f"{one['score']:.3f}" if measure == "score" else points(one["map"]) for one in results]
    rows = [
        [one["stage"], str(one["dim"]), number, f"{one['ms']:.0f}"]
        for one, number in zip(results, shown, strict=True)
    ]
    return format_table(["stage", "dim", measure, "ms a query, encoding included"], rows)
