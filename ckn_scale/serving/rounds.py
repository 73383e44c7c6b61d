"""The groups of one version, asked round by round for one query; one that fails is left out of all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from ckn_scale.core.evidence import QueryPoints, choose_head
from ckn_scale.core.ranking import Ranking
from ckn_scale.core.sampling import smallest
from ckn_scale.core.topk import merge_topk
from ckn_scale.search.evidence import RankedCandidate, RankedHits, leave_out
from ckn_scale.search.filters import Filter
from ckn_scale.search.shard import Hit, merge_hits
from ckn_scale.serving.answers import PhaseClock
from ckn_scale.serving.limits import ApiError
from ckn_scale.serving.messages import (
    BadFilter,
    DrawnImages,
    Encoded,
    Judgement,
    ServedVersion,
    Shortlisted,
    VerifiedSearch,
)

Answer = TypeVar("Answer")
# A group's number, a method and its arguments → what it answers; None when it is dead or slow.
AskGroup: TypeAlias = Callable[[int, str, tuple[Any, ...]], Awaitable[Any]]


class Rounds:
    """`answering` are the groups that have answered so far; one that fails is not asked again."""

    def __init__(
        self,
        ask_group: AskGroup,
        version: ServedVersion,
        wanted: Filter | None = None,
        without: int | None = None,
    ) -> None:
        self._ask_group, self.version = ask_group, version
        self._wanted, self._without = wanted, without  # `without` is an image that no answer holds
        self.answering = {group for group, rows in enumerate(version.group_rows) if rows}

    async def search_vectors(self, vector: np.ndarray, k: int) -> list[Hit]:
        """The best of all groups by vectors alone."""
        count = k + (self._without is not None)
        found = await self.ask("search", dict.fromkeys(self.answering, (vector, count, self._wanted)))
        hits = merge_hits([_require_fit(hits) for hits in found.values()], count)
        return [hit for hit in hits if hit.image_id != self._without][:k]

    async def find(self, vector: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and similarities of the shortlist of all groups."""
        asked = count + (self._without is not None)
        found = await self.ask("find", dict.fromkeys(self.answering, (vector, asked, self._wanted)))
        parts = [_require_fit(part) for part in found.values()]
        if not parts:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        similarity, ids = merge_topk(
            [values[None] for values, _ in parts],
            [ids[None] for _, ids in parts],
            asked,
            larger_is_better=True,
        )
        return leave_out(ids[0], similarity[0], self._without, count)

    async def rank(
        self, query: Encoded, count: int, judgement: Judgement, clock: PhaseClock
    ) -> list[Hit] | None:
        """The best verified hits, in few calls: groups verify and describe what they own of the head of a
        shortlist of `count`. None when a group was lost on the way: `gather` has more than the head.
        """
        if len(self.answering) == 1:
            return await self._rank_alone(query, count, judgement, clock)
        ids, similarity = await self.find(query.vector, count)
        clock.note("search")
        asked, points = set(self.answering), query.points
        assert points is not None
        selective = await self._score(points, ids)
        head = choose_head(ids, similarity, selective)
        shares = {one: head[rows] for one, rows in self.split(ids[head]).items()}
        calls = {
            one: (points, Shortlisted(ids[rows], similarity[rows], selective[rows]), judgement)
            for one, rows in shares.items()
        }
        found = await self.ask("verify_best", calls)
        clock.note("evidence")
        return _merge_ranked(list(found.values()), judgement.k) if self.answering == asked else None

    async def _rank_alone(
        self, query: Encoded, count: int, judgement: Judgement, clock: PhaseClock
    ) -> list[Hit]:
        """All rounds in one call: there is no other group whose candidates could be better."""
        asked = VerifiedSearch(query, count, self._wanted, self._without, judgement)
        found = await self.ask("rank", dict.fromkeys(self.answering, (asked,)))
        if not found:
            return []
        best, find_ms = _require_fit(next(iter(found.values())))
        clock.note("search", find_ms)
        clock.note("evidence")
        hits: list[Hit] = best.hits
        return hits

    async def _score(self, points: QueryPoints, image_ids: np.ndarray) -> np.ndarray:
        owned = self.split(image_ids)
        scores = await self.ask("score", {one: (points, image_ids[rows]) for one, rows in owned.items()})
        selective = np.zeros(len(image_ids))
        for group, values in scores.items():
            selective[owned[group]] = values
        return selective

    async def gather(self, points: QueryPoints, image_ids: np.ndarray, similarity: np.ndarray) -> Ranking:
        """Evidence of the groups that own the candidates; what a group owns that fails is left out."""
        owned = self.split(image_ids)
        selective = await self._score(points, image_ids)
        head = choose_head(image_ids, similarity, selective)
        chosen = {one: image_ids[head[rows]] for one, rows in self.split(image_ids[head]).items()}
        verified = await self.ask("verify", {one: (points, ids) for one, ids in chosen.items()})
        evidence = {
            image_id: one
            for group, found in verified.items()
            for image_id, one in zip(chosen[group].tolist(), found, strict=True)
        }
        kept = np.sort(np.concatenate([owned[one] for one in owned if one in self.answering] or [head[:0]]))
        return Ranking(image_ids[kept], similarity[kept], selective[kept], evidence, {})

    def keep_answering(self, ranking: Ranking) -> Ranking:
        """Without what is owned by groups that were lost since."""
        kept = np.sort(np.concatenate([np.empty(0, np.int64), *self.split(ranking.image_ids).values()]))
        ids = ranking.image_ids[kept]
        evidence = {one: ranking.evidence[one] for one in ids.tolist() if one in ranking.evidence}
        return Ranking(ids, ranking.similarity[kept], ranking.selective[kept], evidence, {})

    async def describe(self, ranked: Sequence[RankedCandidate]) -> list[Hit]:
        owned = self.split(np.array([one.image_id for one in ranked], np.int64))
        calls = {group: ([ranked[row] for row in rows.tolist()],) for group, rows in owned.items()}
        found = await self.ask("describe", calls)
        by_id = {hit.image_id: hit for hits in found.values() for hit in hits}
        return [by_id[one.image_id] for one in ranked if one.image_id in by_id]

    async def draw(self, count: int) -> DrawnImages:
        """Some images of all groups: the same however they lie."""
        found: dict[int, DrawnImages] = await self.ask("draw", dict.fromkeys(self.answering, (count,)))
        parts = list(found.values())
        priorities = np.concatenate([np.empty(0, np.uint64), *(part.priorities for part in parts)])
        image_ids = np.concatenate([np.empty(0, np.int64), *(part.image_ids for part in parts)])
        uris = [uri for part in parts for uri in part.uris]
        chosen = smallest(priorities, count)
        return DrawnImages(priorities[chosen], image_ids[chosen], [uris[row] for row in chosen.tolist()])

    async def ask(self, method: str, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """The answers by group, in the order of groups."""
        groups, number = sorted(calls), self.version.number
        answers = await asyncio.gather(
            *(self._ask_group(one, method, (number, *calls[one])) for one in groups)
        )
        found = {one: answer for one, answer in zip(groups, answers, strict=True) if answer is not None}
        self.answering -= calls.keys() - found.keys()
        return found

    def split(self, image_ids: np.ndarray) -> dict[int, np.ndarray]:
        """Positions of ids by the group that owns them, of those that answer."""
        owners = np.array([self.version.group_of(one) for one in image_ids.tolist()], dtype=object)
        return {one: np.flatnonzero(owners == one) for one in sorted(self.answering) if (owners == one).any()}


def _merge_ranked(parts: Sequence[RankedHits], k: int) -> list[Hit]:
    """The best of all groups, equals by ascending id."""
    hits = [hit for part in parts for hit in part.hits]
    strength = np.concatenate([np.empty(0), *(part.strength for part in parts)])
    order = np.lexsort((np.array([hit.image_id for hit in hits], np.int64), -strength))
    return [hits[place] for place in order[:k].tolist()]


def _require_fit(answer: Answer | BadFilter) -> Answer:
    if isinstance(answer, BadFilter):
        raise ApiError(400, "bad_request", answer.reason)
    return answer
