"""One query over all shard groups: pin a version, encode, scatter, merge. Knows nothing of Ray.

With verification the groups are asked in rounds, as `search/evidence.py` says: each gives evidence for the
candidates that it owns, and the answer is that of an index opened in one process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_right
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from ckn_scale.core.calibration import Calibration
from ckn_scale.core.evidence import SHORTLIST, Evidence, QueryPoints, choose_head
from ckn_scale.core.ranking import Ranking
from ckn_scale.core.topk import merge_topk
from ckn_scale.search.evidence import RankedCandidate, rank_best
from ckn_scale.search.filters import Filter
from ckn_scale.search.shard import Hit, merge_hits
from ckn_scale.serving.limits import ApiError
from ckn_scale.serving.request_record import note_group_left_out
from ckn_scale.serving.settings import ServeSettings

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Box = tuple[float, float, float, float]
Found: TypeAlias = tuple[np.ndarray, np.ndarray]  # (k',) similarities and ids, best first


@dataclass(frozen=True)
class Encoded:
    vector: np.ndarray  # (D,) float32
    points: QueryPoints | None = None  # where the version has points


@dataclass(frozen=True)
class Rejected:
    """The query's image cannot be used; `state` as in `schemas.IMAGE_STATES`."""

    state: str
    reason: str


@dataclass(frozen=True)
class BadFilter:
    """The filter does not fit the index."""

    reason: str


@dataclass(frozen=True)
class ServedVersion:
    """What the router must know of a version: how many rows each group has, and which group holds an id."""

    number: int
    group_rows: tuple[int, ...]
    id_ranges: tuple[tuple[int, int, int], ...]  # first id, last id, group; ascending, apart from each other
    calibration: Calibration | None = None  # how evidence is judged; None: there are no points

    @property
    def rows(self) -> int:
        return sum(self.group_rows)

    def group_of(self, image_id: int) -> int | None:
        place = bisect_right(self.id_ranges, image_id, key=lambda held: held[0]) - 1
        if place < 0 or image_id > self.id_ranges[place][1]:
            return None
        return self.id_ranges[place][2]


@dataclass(frozen=True)
class SearchAnswer:
    version: int
    hits: list[Hit]
    coverage: float  # share of the index's rows that were searched
    timings_ms: dict[str, float]  # of its phases
    found: bool | None = None  # whether a hit is a match; None when that was not looked at

    @property
    def partial(self) -> bool:
        return self.coverage < 1.0


class EncoderClient(Protocol):
    async def encode(self, version: int, data: bytes, box: Box | None) -> Encoded | Rejected: ...

    async def prepare(self, version: int) -> bool: ...


class GroupClient(Protocol):
    """A group of shards; all but `thumbnail` and `prepare` get ids that the group owns."""

    async def search(
        self, version: int, vector: np.ndarray, k: int, wanted: Filter | None
    ) -> list[Hit] | BadFilter: ...

    async def find(
        self, version: int, vector: np.ndarray, k: int, wanted: Filter | None
    ) -> Found | BadFilter: ...

    async def score(self, version: int, points: QueryPoints, image_ids: np.ndarray) -> np.ndarray: ...

    async def verify(self, version: int, points: QueryPoints, image_ids: np.ndarray) -> list[Evidence]: ...

    async def describe(self, version: int, ranked: Sequence[RankedCandidate]) -> list[Hit]: ...

    async def thumbnail(self, version: int, image_id: int) -> bytes | None: ...

    async def prepare(self, version: int) -> bool: ...


class SearchRouter:
    """Asks the encoder and the shard groups; `version` is what new requests are answered from."""

    def __init__(
        self,
        settings: ServeSettings,
        version: ServedVersion,
        encoder: EncoderClient,
        groups: Sequence[GroupClient],
    ) -> None:
        self.settings = settings
        self.version = version
        self._encoder = encoder
        self._groups = list(groups)

    async def search(
        self,
        data: bytes,
        k: int,
        box: Box | None,
        *,
        strict: bool = False,
        verify: bool | None = None,
        wanted: Filter | None = None,
    ) -> SearchAnswer:
        """The best `k` hits for an image file's bytes, of the groups that answer in time.

        `verify` by default where the version has points. ApiError 400 when it has none, or the filter does
        not fit; 422 when the image cannot be used; 503 when the encoder or every group is missing, or any
        group with `strict`.
        """
        version = self.version  # pinned: a switch meanwhile does not touch this request
        if verify and version.calibration is None:
            message = "this index has no points to verify by: leave verify out, or false"
            raise ApiError(400, "bad_request", message)
        clock = _Clock()
        encoded = await self._encode(version.number, data, box)
        clock.note("encode")
        round_ = _Round(self, version)
        if version.calibration is None or encoded.points is None or verify is False:
            hits, found = await self._search_vectors(round_, encoded.vector, k, wanted), None
            clock.note("search")
        else:
            candidates = await self._find(round_, encoded.vector, max(k, SHORTLIST), wanted)
            clock.note("search")
            gathered = await self._gather(round_, encoded.points, *candidates)
            ranked = rank_best(gathered, version.calibration, k)
            hits = await self._describe(round_, ranked)
            found = any(hit.match for hit in hits)
            clock.note("evidence")
        coverage = self._check_coverage(version, round_.answering, strict)
        return SearchAnswer(version.number, hits, coverage, clock.spent_ms, found)

    async def _search_vectors(
        self, round_: _Round, vector: np.ndarray, k: int, wanted: Filter | None
    ) -> list[Hit]:
        number = round_.version.number
        calls = dict.fromkeys(round_.answering, (number, vector, k, wanted))
        found = await round_.ask("search", calls)
        return merge_hits([_require_fit(hits) for hits in found.values()], k)

    async def _find(
        self, round_: _Round, vector: np.ndarray, count: int, wanted: Filter | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids and similarities of the shortlist of all groups."""
        number = round_.version.number
        found = await round_.ask("find", dict.fromkeys(round_.answering, (number, vector, count, wanted)))
        parts = [_require_fit(part) for part in found.values()]
        if not parts:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        similarity, ids = merge_topk(
            [values[None] for values, _ in parts],
            [ids[None] for _, ids in parts],
            count,
            larger_is_better=True,
        )
        return ids[0], similarity[0]

    async def _gather(
        self, round_: _Round, points: QueryPoints, image_ids: np.ndarray, similarity: np.ndarray
    ) -> Ranking:
        """Evidence of the groups that own the candidates; what a group owns that fails is left out."""
        number = round_.version.number
        owned = round_.split(image_ids)
        scores = await round_.ask(
            "score", {one: (number, points, image_ids[rows]) for one, rows in owned.items()}
        )
        selective = np.zeros(len(image_ids))
        for group, values in scores.items():
            selective[owned[group]] = values
        head = choose_head(image_ids, similarity, selective)
        chosen = {one: image_ids[head[rows]] for one, rows in round_.split(image_ids[head]).items()}
        verified = await round_.ask(
            "verify", {one: (number, points, ids) for one, ids in chosen.items() if one in scores}
        )
        evidence = {
            image_id: one
            for group, found in verified.items()
            for image_id, one in zip(chosen[group].tolist(), found, strict=True)
        }
        kept = np.sort(np.concatenate([owned[one] for one in owned if one in round_.answering] or [head[:0]]))
        return Ranking(image_ids[kept], similarity[kept], selective[kept], evidence, {})

    async def _describe(self, round_: _Round, ranked: Sequence[RankedCandidate]) -> list[Hit]:
        owned = round_.split(np.array([one.image_id for one in ranked], np.int64))
        calls = {
            group: (round_.version.number, [ranked[row] for row in rows.tolist()])
            for group, rows in owned.items()
        }
        found = await round_.ask("describe", calls)
        by_id = {hit.image_id: hit for hits in found.values() for hit in hits}
        return [by_id[one.image_id] for one in ranked if one.image_id in by_id]

    async def thumbnail(self, image_id: int) -> bytes | None:
        """A JPEG; None when the version has no such image; ApiError 503 when its group is missing."""
        version = self.version
        group = version.group_of(image_id)
        if group is None:
            return None
        answer = self._groups[group].thumbnail(version.number, image_id)
        try:
            return await asyncio.wait_for(answer, self.settings.shard_timeout_s)
        except Exception as error:
            logger.warning("group %d gave no thumbnail: %r", group, error)
            raise unavailable(f"the part of the index that holds image {image_id} is unavailable") from None

    async def check_ready(self) -> list[str]:
        """Names of the parts that are not ready for the current version."""
        parts = {"encoder": self._encoder.prepare(self.version.number)}
        for number, group in enumerate(self._groups):
            parts[f"shards-{number}"] = group.prepare(self.version.number)
        ready = await asyncio.gather(*(self._is_ready(answer) for answer in parts.values()))
        return [name for name, is_ready in zip(parts, ready, strict=True) if not is_ready]

    async def switch_when_ready(self, version: ServedVersion) -> bool:
        """Have every part load `version` in the background; use it once all hold it."""
        asked = [self._encoder.prepare(version.number)]
        asked += [group.prepare(version.number) for group in self._groups]
        if not all(await asyncio.gather(*(self._is_ready(answer) for answer in asked))):
            return False
        logger.info("serving version %d (was %d)", version.number, self.version.number)
        self.version = version
        return True

    async def _encode(self, version: int, data: bytes, box: Box | None) -> Encoded:
        try:
            encoded = await asyncio.wait_for(
                self._encoder.encode(version, data, box), self.settings.encode_timeout_s
            )
        except Exception as error:
            logger.warning("the encoder did not answer: %r", error)
            raise unavailable("the encoder does not answer: try again in a few seconds") from None
        if isinstance(encoded, Rejected):
            message = f"the image cannot be used ({encoded.state}): {encoded.reason}"
            raise ApiError(422, "image_rejected", message, state=encoded.state, reason=encoded.reason)
        return encoded

    async def ask_group(self, number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        """What one group answers; None when it is dead, slow or has not loaded the version."""
        answer = getattr(self._groups[number], method)(*arguments)
        try:
            return await asyncio.wait_for(answer, self.settings.shard_timeout_s)
        except Exception as error:
            logger.warning("group %d left out of an answer: %r", number, error)
            note_group_left_out(number)
            return None

    def _check_coverage(self, version: ServedVersion, answering: Collection[int], strict: bool) -> float:
        answered = [rows for group, rows in enumerate(version.group_rows) if not rows or group in answering]
        coverage = sum(answered) / version.rows if version.rows else 1.0
        if not answered or (version.rows and coverage == 0):
            raise unavailable("no part of the index answers: try again in a few seconds")
        if strict and coverage < 1:
            raise unavailable(f"only {coverage:.1%} of the index answers, and the request asked for all")
        return coverage

    async def _is_ready(self, answer: Awaitable[bool]) -> bool:
        try:
            return await asyncio.wait_for(answer, self.settings.shard_timeout_s)
        except Exception as error:
            logger.warning("a part is not ready: %r", error)
            return False


class _Round:
    """The groups of a version that have answered so far; one that fails is not asked again."""

    def __init__(self, router: SearchRouter, version: ServedVersion) -> None:
        self.router, self.version = router, version
        self.answering = {group for group, rows in enumerate(version.group_rows) if rows}

    async def ask(self, method: str, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """The answers by group, in the order of groups."""
        groups = sorted(calls)
        answers = await asyncio.gather(*(self.router.ask_group(one, method, calls[one]) for one in groups))
        found = {one: answer for one, answer in zip(groups, answers, strict=True) if answer is not None}
        self.answering -= calls.keys() - found.keys()
        return found

    def split(self, image_ids: np.ndarray) -> dict[int, np.ndarray]:
        """Positions of ids by the group that owns them."""
        owners = np.array([self.version.group_of(one) for one in image_ids.tolist()], dtype=object)
        return {one: np.flatnonzero(owners == one) for one in sorted(self.answering) if (owners == one).any()}


class _Clock:
    """Milliseconds from one note to the next."""

    def __init__(self) -> None:
        self.spent_ms: dict[str, float] = {}
        self._last = time.perf_counter()

    def note(self, phase: str) -> None:
        now = time.perf_counter()
        self.spent_ms[phase], self._last = 1e3 * (now - self._last), now


def _require_fit(answer: Answer | BadFilter) -> Answer:
    if isinstance(answer, BadFilter):
        raise ApiError(400, "bad_request", answer.reason)
    return answer


def unavailable(message: str) -> ApiError:
    return ApiError(503, "unavailable", message).with_headers({"retry-after": "2"})
