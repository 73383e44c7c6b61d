"""What router, encoder and shard groups tell each other. Knows nothing of Ray."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from ckn_scale.core.calibration import Calibration
from ckn_scale.core.evidence import Evidence, QueryPoints
from ckn_scale.search.evidence import RankedCandidate, RankedHits
from ckn_scale.search.filters import Filter
from ckn_scale.search.hits import Hit, IndexedImage
from ckn_scale.search.matches import PairMatch

Box = tuple[float, float, float, float]
Found: TypeAlias = tuple[np.ndarray, np.ndarray]  # (k',) similarities and ids, best first


@dataclass(frozen=True)
class Encoded:
    vector: np.ndarray  # (D,) float32
    points: QueryPoints | None = None  # where the version has points


@dataclass(frozen=True)
class Shortlisted:
    """Candidates of a group for geometry, and what is known of them without."""

    image_ids: np.ndarray  # (N,)
    similarity: np.ndarray  # (N,)
    selective: np.ndarray  # (N,)


@dataclass(frozen=True)
class Judgement:
    """How hits are ranked and how many are wanted."""

    calibration: Calibration
    k: int


@dataclass(frozen=True)
class VerifiedSearch:
    """All rounds of a search, for a group that is alone."""

    query: Encoded
    count: int  # of the shortlist
    wanted: Filter | None
    without: int | None  # an image that no answer holds
    judgement: Judgement


@dataclass(frozen=True)
class Rejected:
    """An image cannot be used; `state` as in `schemas.IMAGE_STATES`."""

    state: str
    reason: str


@dataclass(frozen=True)
class Preview:
    """A JPEG for a browser, and the size of the upright original."""

    jpeg: bytes
    size_px: tuple[int, int]  # width, height


@dataclass(frozen=True)
class BadFilter:
    """The filter does not fit the index."""

    reason: str


@dataclass(frozen=True)
class Deleted:
    """An image whose row is still in the index, and in no answer: nothing is said of it."""


@dataclass(frozen=True)
class DrawnImages:
    """Some images of a group, by hash: those of all groups with the lowest priorities are a sample."""

    priorities: np.ndarray  # (N,) uint64, ascending
    image_ids: np.ndarray  # (N,) int64
    uris: list[str]


@dataclass(frozen=True)
class VersionSummary:
    """One published version, as `GET /v1/versions` lists it."""

    version: int
    rows: int
    build: str


@dataclass(frozen=True)
class IndexSummary:
    """What a version says of itself."""

    dim: int = 0
    kind: str = ""
    shards: int = 0
    pixel_cap: int = 0  # of an image, before it is decoded
    certificate: Mapping[str, Any] | None = None  # None: it was asked nothing
    published: tuple[VersionSummary, ...] = ()  # those that were published when it was taken up


@dataclass(frozen=True)
class ServedVersion:
    """What the router must know of a version: how many rows each group has, and which group holds an id."""

    number: int
    group_rows: tuple[int, ...]
    id_ranges: tuple[tuple[int, int, int], ...]  # first id, last id, group; ascending, apart from each other
    calibration: Calibration | None = None  # how evidence is judged; None: there are no points
    summary: IndexSummary = field(default_factory=IndexSummary)

    @property
    def rows(self) -> int:
        return sum(self.group_rows)

    def group_of(self, image_id: int) -> int | None:
        place = bisect_right(self.id_ranges, image_id, key=lambda held: held[0]) - 1
        if place < 0 or image_id > self.id_ranges[place][1]:
            return None
        return self.id_ranges[place][2]


class EncoderClient(Protocol):
    async def encode(self, version: int, data: bytes, box: Box | None) -> Encoded | Rejected: ...

    async def match(
        self, version: int, data: bytes, other: bytes, box: Box | None
    ) -> PairMatch | Rejected: ...

    async def widen(self, version: int, hits: Sequence[QueryPoints]) -> list[QueryPoints]: ...

    async def preview(self, version: int, data: bytes) -> Preview | Rejected: ...

    async def prepare(self, version: int) -> bool: ...


class GroupClient(Protocol):
    """A group of shards; where several ids are given the group owns them all."""

    async def search(
        self, version: int, vector: np.ndarray, k: int, wanted: Filter | None
    ) -> list[Hit] | BadFilter: ...

    async def find(
        self, version: int, vector: np.ndarray, k: int, wanted: Filter | None
    ) -> Found | BadFilter: ...

    async def compare(self, version: int, vector: np.ndarray, image_ids: np.ndarray) -> np.ndarray: ...

    async def score(self, version: int, points: QueryPoints, image_ids: np.ndarray) -> np.ndarray: ...

    async def verify(self, version: int, points: QueryPoints, image_ids: np.ndarray) -> list[Evidence]: ...

    async def verify_best(
        self, version: int, points: QueryPoints, candidates: Shortlisted, judgement: Judgement
    ) -> RankedHits: ...

    async def rank(self, version: int, asked: VerifiedSearch) -> tuple[RankedHits, float] | BadFilter: ...

    async def describe(self, version: int, ranked: Sequence[RankedCandidate]) -> list[Hit]: ...

    async def load_hits(
        self, version: int, image_ids: np.ndarray, evidence: Sequence[Evidence]
    ) -> tuple[np.ndarray, list[QueryPoints]]: ...

    async def load_vectors(self, version: int, image_ids: np.ndarray) -> np.ndarray: ...

    async def load_rows(self, version: int, image_ids: np.ndarray) -> np.ndarray: ...

    async def load_query(self, version: int, image_id: int) -> Encoded | None: ...

    async def match(self, version: int, image_id: int, query: Encoded) -> PairMatch | None: ...

    async def look_up(self, version: int, image_id: int) -> IndexedImage | Deleted | None: ...

    async def draw(self, version: int, count: int) -> DrawnImages: ...

    async def thumbnail(self, version: int, image_id: int) -> bytes | None: ...

    async def prepare(self, version: int) -> bool: ...
