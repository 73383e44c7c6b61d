"""Expansion over shard groups: `core/ranking.py` in a thread of its own, which asks the groups what it asks.

So there is one order of an expanded answer, in one process or over many groups. A group that is lost on the
way is left out of all of it: the answer is begun again without what it owns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, TypeAlias, TypeVar

import numpy as np

from ckn_scale.core.evidence import Evidence, QueryPoints
from ckn_scale.core.expansion import NUM_VERIFIERS
from ckn_scale.core.ranking import Ranking, expand_ranking
from ckn_scale.serving.messages import Encoded
from ckn_scale.serving.rounds import Rounds

Answer = TypeVar("Answer")
Widen: TypeAlias = Callable[[Sequence[QueryPoints]], Awaitable[list[QueryPoints]]]


class GroupLost(Exception):
    """A group did not answer in the middle of an expansion."""


async def expand(
    rounds: Rounds,
    encoded: Encoded,
    first: Ranking,
    widen: Widen,
    executor: Executor,
    *,
    discriminative: bool,
) -> Ranking:
    """The answer `first` asked once more with its verified hits, as `expand_ranking` does it."""
    assert encoded.points is not None
    loop = asyncio.get_running_loop()
    candidates = GroupsAsCandidates(rounds, widen, loop)

    def work(begun: Ranking, points: QueryPoints) -> Ranking:
        return expand_ranking(candidates, encoded.vector, points, begun, discriminative=discriminative)

    while True:
        try:
            return await loop.run_in_executor(executor, work, rounds.keep_answering(first), encoded.points)
        except GroupLost:
            continue  # one fewer is asked


class GroupsAsCandidates:
    """The images of all groups that answer, asked from another thread than the loop's."""

    def __init__(self, rounds: Rounds, widen: Widen, loop: asyncio.AbstractEventLoop) -> None:
        self._rounds, self._widen_hits, self._loop = rounds, widen, loop

    def find(self, vector: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        before = set(self._rounds.answering)
        found = self._wait(self._rounds.find(vector, k))
        if self._rounds.answering != before:
            raise GroupLost
        return found

    def compare(self, vector: np.ndarray, image_ids: np.ndarray) -> np.ndarray:
        return self._ask_each("compare", image_ids, np.empty(len(image_ids), np.float32), vector)

    def score(self, query: QueryPoints, image_ids: np.ndarray) -> np.ndarray:
        return self._ask_each("score", image_ids, np.empty(len(image_ids)), query)

    def verify(self, query: QueryPoints, image_ids: np.ndarray) -> list[Evidence]:
        found: np.ndarray = np.empty(len(image_ids), object)
        for rows, evidence in self._ask_owners("verify", image_ids, lambda rows: (query, image_ids[rows])):
            for row, one in zip(rows.tolist(), evidence, strict=True):
                found[row] = one
        return list(found)

    def load_hits(
        self, image_ids: np.ndarray, evidence: Sequence[Evidence]
    ) -> tuple[np.ndarray, list[QueryPoints]]:
        vectors: dict[int, np.ndarray] = {}
        points: dict[int, QueryPoints] = {}
        arguments = lambda rows: (image_ids[rows], [evidence[row] for row in rows.tolist()])  # noqa: E731
        for rows, (loaded, hits) in self._ask_owners("load_hits", image_ids, arguments):
            vectors.update(zip(rows.tolist(), loaded, strict=True))
            points.update(zip(rows.tolist(), hits, strict=True))
        ordered = [points[row] for row in range(len(image_ids))]
        widened = self._wait(self._widen(ordered[:NUM_VERIFIERS]))
        return np.stack([vectors[row] for row in range(len(image_ids))]), widened + ordered[NUM_VERIFIERS:]

    def load_vectors(self, image_ids: np.ndarray) -> np.ndarray:
        vectors: dict[int, np.ndarray] = {}
        for rows, loaded in self._ask_owners("load_vectors", image_ids, lambda rows: (image_ids[rows],)):
            vectors.update(zip(rows.tolist(), loaded, strict=True))
        return np.stack([vectors[row] for row in range(len(image_ids))])

    async def _widen(self, hits: Sequence[QueryPoints]) -> list[QueryPoints]:
        return await self._widen_hits(hits)

    def _ask_each(self, method: str, image_ids: np.ndarray, values: np.ndarray, asked: Any) -> np.ndarray:
        """One number for each id, into `values`."""
        for rows, found in self._ask_owners(method, image_ids, lambda rows: (asked, image_ids[rows])):
            values[rows] = found
        return values

    def _ask_owners(
        self, method: str, image_ids: np.ndarray, arguments: Callable[[np.ndarray], tuple[Any, ...]]
    ) -> list[tuple[np.ndarray, Any]]:
        """What each group that owns some of the ids answers for their rows; GroupLost when one does not."""
        owned = self._rounds.split(image_ids)
        calls = {group: arguments(rows) for group, rows in owned.items()}
        found = self._wait(self._rounds.ask(method, calls))
        if len(found) < len(owned):
            raise GroupLost
        return [(owned[group], answer) for group, answer in found.items()]

    def _wait(self, asked: Coroutine[Any, Any, Answer]) -> Answer:
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()
