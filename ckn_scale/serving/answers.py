"""What is asked of the router, and what it answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar

from ckn_scale.core.calibration import Calibration
from ckn_scale.search.evidence import RankedCandidate
from ckn_scale.search.filters import Filter
from ckn_scale.search.hit_copies import COPIES_DEPTH
from ckn_scale.search.hits import Hit
from ckn_scale.search.matches import PairMatch

Ranked = TypeVar("Ranked", Hit, RankedCandidate)
Expansion: TypeAlias = Literal[False, True, "discriminative"]


@dataclass(frozen=True)
class SearchOptions:
    """What is asked about an image."""

    k: int = 10
    offset: int = 0
    verify: bool | None = None  # by default where the version has points
    expand: Expansion = False
    wanted: Filter | None = None
    min_score: float | None = None
    group_copies: bool = False
    strict: bool = False  # an error instead of a partial answer

    @property
    def depth(self) -> int:
        """How far down the ranking the answer goes."""
        depth = self.offset + self.k
        return max(depth, COPIES_DEPTH) if self.group_copies else depth

    def keep_strong(self, ranked: Sequence[Ranked]) -> list[Ranked]:
        """Those of a ranking whose score is high enough."""
        return [one for one in ranked if self.min_score is None or one.score >= self.min_score]

    def choose_page(self, ranked: Sequence[Ranked]) -> list[Ranked]:
        return list(ranked[self.offset : self.offset + self.k])


@dataclass(frozen=True)
class SearchAnswer:
    version: int
    hits: list[Hit]
    coverage: float  # share of the index's rows that were searched
    timings_ms: dict[str, float]  # of its phases
    found: bool | None = None  # whether a hit is a match; None when that was not looked at
    decision: Calibration | None = None  # what makes it one
    copies: Mapping[int, list[int]] | None = None  # of each hit that has some; None: not looked for

    @property
    def partial(self) -> bool:
        return self.coverage < 1.0


@dataclass(frozen=True)
class MatchAnswer:
    version: int
    found: PairMatch
    match: bool
    score: float
    decision: Calibration  # what makes it a match
    timings_ms: dict[str, float] = field(default_factory=dict)


class PhaseClock:
    """Milliseconds from one note to the next."""

    def __init__(self) -> None:
        self.spent_ms: dict[str, float] = {}
        self._last = time.perf_counter()

    def note(self, phase: str, spent_ms: float | None = None) -> None:
        """What was spent since the last note, or only the first so many milliseconds of it."""
        now = time.perf_counter()
        if spent_ms is not None:
            now = min(now, self._last + 1e-3 * spent_ms)
        self.spent_ms[phase], self._last = 1e3 * (now - self._last), now
