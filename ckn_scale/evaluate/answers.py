"""What queries of an image set find: recall by depth, and the best and the worst answers as examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ckn_scale.evaluate.image_sets import ImageSet, Query

DEPTHS = (1, 2, 5, 10, 20, 50, 100)
NUM_EXAMPLES = 3  # of either kind
SHOWN = 5  # images of an example's answer


def summarise_answers(images: ImageSet, similarities: np.ndarray, scores: Sequence[float]) -> dict[str, Any]:
    """`similarities` (Q, N) and the score of each query: what --json writes of them."""
    rankings = [rank_images(query, row) for query, row in zip(images.queries, similarities, strict=True)]
    depths = [depth for depth in DEPTHS if depth <= len(images.database)]
    order = np.argsort(scores, kind="stable").tolist()
    worst = order[:NUM_EXAMPLES]
    best = [one for one in reversed(order) if one not in worst][:NUM_EXAMPLES]
    return {
        "recall_at": {str(depth): measure_recall(images.queries, rankings, depth) for depth in depths},
        "examples": [
            {"score": float(scores[one]), **_describe(images, images.queries[one], rankings[one])}
            for one in (*worst, *best)
        ],
    }


def rank_images(query: Query, similarities: np.ndarray) -> np.ndarray:
    """Positions in the database, best first, without those that do not count; ties go by position."""
    ranking = np.argsort(-similarities, kind="stable")
    kept: np.ndarray = ranking[~np.isin(ranking, list(query.ignored))]
    return kept


def measure_recall(queries: Sequence[Query], rankings: Sequence[np.ndarray], depth: int) -> float:
    """The mean share of what a query should find that is among its first `depth`."""
    shares = [
        len(query.relevant.intersection(ranking[:depth].tolist())) / len(query.relevant)
        for query, ranking in zip(queries, rankings, strict=True)
        if query.relevant
    ]
    return float(np.mean(shares)) if shares else 0.0


def _describe(images: ImageSet, query: Query, ranking: np.ndarray) -> dict[str, Any]:
    answer = [
        {"image": str(images.database[one].path.absolute()), "right": one in query.relevant}
        for one in ranking[:SHOWN].tolist()
    ]
    return {
        "query": str(query.image.path.absolute()),
        "box": query.image.box,
        "relevant": len(query.relevant),
        "answer": answer,
    }
