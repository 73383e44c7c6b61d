"""One query over all shard groups: pin a version, encode, scatter, merge. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_right
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from ckn_scale.search.shard import Hit, merge_hits
from ckn_scale.serving.limits import ApiError
from ckn_scale.serving.settings import ServeSettings

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Encoded:
    vector: np.ndarray  # (D,) float32


@dataclass(frozen=True)
class Rejected:
    """The query's image cannot be used; `state` as in `schemas.IMAGE_STATES`."""

    state: str
    reason: str


@dataclass(frozen=True)
class ServedVersion:
    """What the router must know of a version: how many rows each group has, and which group holds an id."""

    number: int
    group_rows: tuple[int, ...]
    id_ranges: tuple[tuple[int, int, int], ...]  # first id, last id, group; ascending, apart from each other

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
    encode_ms: float
    search_ms: float

    @property
    def partial(self) -> bool:
        return self.coverage < 1.0


class EncoderClient(Protocol):
    async def encode(self, version: int, data: bytes, box: Box | None) -> Encoded | Rejected: ...

    async def prepare(self, version: int) -> bool: ...


class GroupClient(Protocol):
    async def search(self, version: int, vector: np.ndarray, k: int) -> list[Hit]: ...

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

    async def search(self, data: bytes, k: int, box: Box | None, *, strict: bool) -> SearchAnswer:
        """The best `k` hits for an image file's bytes, of the groups that answer in time.

        ApiError 422 when the image cannot be used; 503 when the encoder or every group is missing, or any
        group with `strict`.
        """
        version = self.version  # pinned: a switch meanwhile does not touch this request
        started = time.perf_counter()
        vector = await self._encode(version.number, data, box)
        encoded = time.perf_counter()
        found = await self._scatter(version, vector, k)
        finished = time.perf_counter()
        return SearchAnswer(
            version=version.number,
            hits=merge_hits([hits for hits in found if hits is not None], k),
            coverage=self._check_coverage(version, found, strict),
            encode_ms=1e3 * (encoded - started),
            search_ms=1e3 * (finished - encoded),
        )

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

    async def _encode(self, version: int, data: bytes, box: Box | None) -> np.ndarray:
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
        return encoded.vector

    async def _scatter(self, version: ServedVersion, vector: np.ndarray, k: int) -> list[list[Hit] | None]:
        """Each group's hits; None where a group is dead, slow or has not loaded the version."""
        asked = [self._ask_group(number, version, vector, k) for number in range(len(self._groups))]
        return list(await asyncio.gather(*asked))

    async def _ask_group(
        self, number: int, version: ServedVersion, vector: np.ndarray, k: int
    ) -> list[Hit] | None:
        if version.group_rows[number] == 0:
            return []
        answer = self._groups[number].search(version.number, vector, k)
        try:
            return await asyncio.wait_for(answer, self.settings.shard_timeout_s)
        except Exception as error:
            logger.warning("group %d left out of an answer: %r", number, error)
            return None

    def _check_coverage(
        self, version: ServedVersion, found: Sequence[list[Hit] | None], strict: bool
    ) -> float:
        answered = [rows for rows, hits in zip(version.group_rows, found, strict=True) if hits is not None]
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


def unavailable(message: str) -> ApiError:
    return ApiError(503, "unavailable", message).with_headers({"retry-after": "2"})
