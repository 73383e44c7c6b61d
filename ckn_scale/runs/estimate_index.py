"""What the index takes beyond building it: short codes, and rows joined with their neighbours.

Neither is in the rehearsal, which has too few rows for them. Joining compares every row with every other, so
its time grows with the square of the images: one comparison is timed. Codes are made row by row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ckn_scale.config import Settings
from ckn_scale.core.coarse_lists import ITERATIONS, VECTORS_PER_LIST, choose_codec
from ckn_scale.core.neighbour_sums import Part, augment_index
from ckn_scale.core.short_codes import Quantiser, count_pieces, learn_quantiser
from ckn_scale.core.vector_codes import VectorCodec, make_codec
from ckn_scale.core.vector_index import KINDS, build_index
from ckn_scale.runs.step_sizes import StepCost
from ckn_scale.search.shortlist import predict_memory
from ckn_scale.steps.learn_quantiser import (
    choose_kind,
    count_lists,
    count_vectors,
    predict_learning_memory,
)
from ckn_scale.storage.index_files import IndexManifest
from ckn_scale.storage.run_folder import AUGMENT_INDEX, LEARN_QUANTISER, MAKE_CODES

TIMED_ROWS = 32
COMPARED_ROWS = 1024


@dataclass(frozen=True)
class IndexCosts:
    """Costs by step; memory while the quantiser is learned, and of one group that holds all codes."""

    steps: dict[str, StepCost] = field(default_factory=dict)
    kind: str | None = None
    code_bytes: int = 0
    learning_bytes: int = 0
    serving_bytes: int = 0

    def lines(self) -> list[str]:
        lines = []
        if self.kind is not None:
            lines.append(
                f"short codes ({self.kind}): {self.code_bytes} bytes an image in memory, in one group "
                f"{self.serving_bytes / 1e6:.0f} MB; several share them"
            )
        if AUGMENT_INDEX in self.steps:
            hours = self.steps[AUGMENT_INDEX].seconds / 3600
            lines.append(
                f"joining rows with their neighbours compares all pairs: {hours:.2g} h of one worker"
            )
        return lines


def estimate_index(settings: Settings, num_images: int, dim: int) -> IndexCosts:
    """For vectors of `dim` numbers."""
    codec, wanted = make_codec(settings.reduction.stored, dim), settings.index
    steps = {}
    if wanted.augment and num_images:
        steps[AUGMENT_INDEX] = StepCost(
            _augment_s(codec, num_images, wanted.augment), num_images * (codec.code_bytes + 8)
        )
    kind = choose_kind(wanted.kind, IndexManifest("", dim, num_images, {}, (), KINDS[codec.name]))
    if kind is None:
        return IndexCosts(steps)
    lists, code_bytes = count_lists(kind, num_images), count_pieces(dim) // 2
    steps |= _coding_costs(codec, num_images, min(lists, num_images))
    return IndexCosts(
        steps,
        kind,
        code_bytes,
        predict_learning_memory(dim, codec.code_bytes, lists),
        predict_memory(num_images, code_bytes, lists),
    )


def _augment_s(codec: VectorCodec, rows: int, neighbours: int) -> float:
    """All pairs compared; then what is done for each row, once."""
    codes = _some_codes(codec, COMPARED_ROWS)
    index, few = (
        build_index(codec, codes[:count], np.arange(count)) for count in (COMPARED_ROWS, TIMED_ROWS)
    )
    queries = few.vectors_at(np.arange(TIMED_ROWS))
    pair_s = _spent_s(lambda: index.search(queries, neighbours + 1)) / (TIMED_ROWS * COMPARED_ROWS)
    row_s = _spent_s(lambda: augment_index(few, [lambda: Part(few, None)], neighbours, codec)) / TIMED_ROWS
    return rows * rows * pair_s + rows * row_s


def _coding_costs(codec: VectorCodec, rows: int, lists: int) -> dict[str, StepCost]:
    codes = _some_codes(codec, TIMED_ROWS)
    vectors = codec.decode(codes)
    learned = []
    learn_s = (
        _spent_s(lambda: learned.append(learn_quantiser(vectors, 0))) * count_vectors(codec.dim) / TIMED_ROWS
    )
    centroids = np.resize(
        choose_codec(codec.dim).encode(vectors), (lists, choose_codec(codec.dim).code_bytes)
    )
    quantiser = Quantiser(codec.dim, learned[0].centroids, centroids) if lists else learned[0]
    quantiser.assign(vectors)
    decode_s = _spent_s(lambda: codec.decode(codes)) / TIMED_ROWS
    assign_s = _spent_s(lambda: quantiser.assign(vectors)) / TIMED_ROWS
    code_s = _spent_s(lambda: quantiser.encode(vectors)) / TIMED_ROWS
    learn_s += ITERATIONS * VECTORS_PER_LIST * lists * (decode_s + assign_s)
    stored = quantiser.centroids.nbytes + quantiser.coarse.nbytes
    return {
        LEARN_QUANTISER: StepCost(learn_s, stored),
        MAKE_CODES: StepCost(rows * (decode_s + assign_s + code_s), rows * (quantiser.code_bytes + 4)),
    }


def _some_codes(codec: VectorCodec, rows: int) -> np.ndarray:
    """Codes of some random vectors, over and over."""
    vectors = np.random.default_rng(0).standard_normal((TIMED_ROWS, codec.dim)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.resize(codec.encode(vectors), (rows, codec.code_bytes))


def _spent_s(call: Callable[[], object]) -> float:
    begun = time.process_time()
    call()
    return time.process_time() - begun
