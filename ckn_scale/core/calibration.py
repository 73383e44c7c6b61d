"""When evidence is a match: how many inliers two unrelated images have by chance, and a score from 0 to 1.

Inliers of random pairs of a collection's own images fall off geometrically. The tail is fitted, and says how
many are needed so that one pair in a thousand, or in a million, has them by chance. Some random pairs do show
the same thing, one in fifty where places or products recur: the tail is fitted value by value, and what lies
beyond does not count once it expects none of it, or far fewer. Where few pairs were looked at, measured
defaults do (`PRIOR_PAIRS` pairs of them are added to any collection's own).

A score is the probability that a candidate shows the same thing if one candidate in a thousand does, by how
often a random pair is as strong; planted views, which do, get at least one half but for a few.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

FALSE_ALARM_RATES = (1e-3, 1e-4, 1e-6)
DECISION_RATE = 1e-6  # of a match: chance makes one of so many random pairs one
TAIL_SHARE, TAIL_PAIRS = 0.05, 30  # of random pairs that the tail is fitted to, at least
MIN_TAIL_START = 2  # one match alone proposes a transform and agrees with it
PRIOR_TAIL_START = 4
PRIOR_PAIRS = 75.0
PRIOR_SHARE = 0.2  # of pairs in the tail
PRIOR_EXCESS = 0.5  # inliers beyond its start, on average
OUTLIER_COUNT = 0.1  # pairs beyond the value from which on a tail expects fewer than this are no chance
OUTLIER_DEVIATIONS = 4.0  # nor are they where there are so many more than it expects
MARGIN_DEVIATIONS = 2.0  # by which the tail is taken to be longer than it was measured
MAX_RATIO = 0.99  # of a tail, from one value to the next
STRENGTH_STEPS = 4  # strengths are counted in quarters
PRIOR_STRENGTH, PRIOR_STRENGTH_EXCESS = -46, 1.5  # of that tail, in steps: as above
REAL_SHARE = 1e-3  # of candidates that a score takes to show the same thing
WEAK_PLANTED = 0.05  # of planted views that may have less than one half


@dataclass(frozen=True)
class Tail:
    """P(inliers ≥ x) = share · ratio^(x − start) for a random pair, from `start` on."""

    start: int
    share: float
    ratio: float
    pairs: int  # that it was fitted to
    outliers: int  # of them, that were taken for real matches

    def rate(self, inliers: int) -> float:
        """How likely a random pair has so many inliers or more."""
        return 1.0 if inliers < self.start else self.share * self.ratio ** (inliers - self.start)

    def threshold(self, rate: float) -> int:
        """The least number of inliers that at most this share of random pairs reaches."""
        if not 0 < rate < 1:
            raise ValueError(f"a false-alarm rate lies between 0 and 1, got {rate}")
        steps = math.ceil(math.log(rate / self.share) / math.log(self.ratio) - 1e-9)
        return self.start + max(steps, 0)


def fit_tail(
    histogram: Mapping[int, int],
    *,
    first: int = MIN_TAIL_START,
    prior_start: int = PRIOR_TAIL_START,
    prior_excess: float = PRIOR_EXCESS,
) -> Tail:
    """Of random pairs by their number of inliers; without any, the defaults.

    `first` is where a tail may begin at the earliest; `prior_start` and `prior_excess` are the defaults.
    """
    pairs = sum(histogram.values())
    start = _find_start(histogram, first, prior_start)
    counts = [histogram.get(value, 0) for value in range(start, max(histogram, default=start) + 1)]
    prior, width = PRIOR_PAIRS * PRIOR_SHARE, math.inf
    for known in range(2, len(counts)):
        inside, beyond = sum(counts[:known]), sum(counts[known:])
        ratio = _lengthen(_fit_ratio(counts[:known], known, prior_excess), known, inside)
        expected = _expect_beyond(ratio, known, inside)
        if expected < OUTLIER_COUNT or beyond > expected + OUTLIER_DEVIATIONS * (1 + math.sqrt(expected)):
            counts, width = counts[:known], known  # what lies beyond is no chance
            break
    ratio, inside = _fit_ratio(counts, width, prior_excess), sum(counts)
    chance = inside + _expect_beyond(ratio, width, inside)
    outliers = max(_count_from(histogram, start) - round(chance), 0)
    share = min(1.0, (chance + prior) / (pairs - outliers + PRIOR_PAIRS))
    return Tail(start, share, _lengthen(ratio, width, inside), pairs, outliers)


def _find_start(histogram: Mapping[int, int], first: int, prior_start: int) -> int:
    """The largest value that enough pairs reach to see how their number falls off."""
    pairs = sum(histogram.values())
    if pairs < TAIL_PAIRS:
        return prior_start
    start = first
    while _count_from(histogram, start + 1) >= max(TAIL_PAIRS, TAIL_SHARE * pairs):
        start += 1
    return start


def _count_from(histogram: Mapping[int, int], inliers: int) -> int:
    return sum(count for one, count in histogram.items() if one >= inliers)


def _fit_ratio(counts: Sequence[int], width: float, prior_excess: float) -> float:
    """How fast counts of successive values fall off, the prior's included: the most likely ratio.

    They are those of a geometric distribution of 0 … width − 1: of larger values nothing is known.
    """
    total, prior = sum(counts), PRIOR_PAIRS * PRIOR_SHARE
    wanted = sum(value * count for value, count in enumerate(counts)) + prior * prior_excess
    low, high = 1e-6, MAX_RATIO
    for _ in range(60):
        ratio = (low + high) / 2
        if total * _moments(ratio, width)[0] + prior * _moments(ratio, math.inf)[0] < wanted:
            low = ratio
        else:
            high = ratio
    return float(ratio)


def _lengthen(ratio: float, width: float, total: int) -> float:
    """The ratio of a tail whose mean is some deviations longer than was measured on so many pairs."""
    mean, variance = _moments(ratio, math.inf)
    information = total * _moments(ratio, width)[1] + PRIOR_PAIRS * PRIOR_SHARE * variance  # on log ratio
    mean += MARGIN_DEVIATIONS * variance / math.sqrt(information)
    return min(mean / (1 + mean), MAX_RATIO)


def _expect_beyond(ratio: float, width: float, inside: int) -> float:
    """How many values of a geometric distribution are `width` or larger where `inside` are smaller."""
    return float(inside * ratio**width / (1 - ratio**width))


def _moments(ratio: float, width: float) -> tuple[float, float]:
    """Mean and variance of a geometric distribution of 0 … width − 1."""
    mean, variance = ratio / (1 - ratio), ratio / (1 - ratio) ** 2
    cut = ratio**width
    if math.isinf(width):
        return mean, variance
    return mean - width * cut / (1 - cut), variance - width**2 * cut / (1 - cut) ** 2


@dataclass(frozen=True)
class Calibration:
    """How a version judges evidence; without arguments by the defaults, before anything was measured."""

    thresholds: Mapping[str, int] = field(
        default_factory=lambda: list_thresholds(fit_tail({}))
    )  # inliers by false-alarm rate
    slope: float = field(default_factory=lambda: fit_score({}, np.empty(0), np.empty(0))[0])
    middle: float = field(  # the strength at which the score is one half
        default_factory=lambda: fit_score({}, np.empty(0), np.empty(0))[1]
    )

    @property
    def false_alarm_rate(self) -> float:
        """The share of random pairs that chance makes a match."""
        return DECISION_RATE

    @property
    def min_inliers(self) -> int:
        """Of a match."""
        return self.thresholds[name_rate(DECISION_RATE)]

    def is_match(self, inliers: np.ndarray) -> np.ndarray:
        """(C,) bool."""
        matches: np.ndarray = inliers >= self.min_inliers
        return matches

    def score(self, strength: np.ndarray) -> np.ndarray:
        """(C,) float64 from 0 to 1, larger with the strength of `join_evidence`."""
        scores: np.ndarray = 1 / (1 + np.exp(-self.slope * (strength - self.middle)))
        return scores


def name_rate(rate: float) -> str:
    return f"{rate:.0e}"


def list_thresholds(tail: Tail) -> dict[str, int]:
    return {name_rate(rate): tail.threshold(rate) for rate in FALSE_ALARM_RATES}


def fit_calibration(histogram: Mapping[int, int], planted: np.ndarray, random: np.ndarray) -> Calibration:
    """From inliers of random pairs, and strengths (P,) of planted views and (R,) of random pairs."""
    slope, middle = fit_score(histogram, planted, random)
    return Calibration(list_thresholds(fit_tail(histogram)), slope, middle)


def fit_score(histogram: Mapping[int, int], planted: np.ndarray, random: np.ndarray) -> tuple[float, float]:
    """Slope and middle of the curve; arguments as of `fit_calibration`.

    With P(random pair ≥ s) = share · ratio^(s − start) the odds of a candidate are REAL_SHARE over that: a
    logistic curve. Pairs that geometry takes for real are among the strongest, and are left out.
    """
    real = _count_from(histogram, fit_tail(histogram).threshold(REAL_SHARE))
    steps = np.sort(np.floor(random * STRENGTH_STEPS).astype(np.int64))[: max(len(random) - real, 0)]
    tail = fit_tail(
        Counter(steps.tolist()),
        first=int(steps.min(initial=PRIOR_STRENGTH)),
        prior_start=PRIOR_STRENGTH,
        prior_excess=PRIOR_STRENGTH_EXCESS,
    )
    decay = math.log(tail.ratio)
    middle = (tail.start + math.log(REAL_SHARE / tail.share) / decay) / STRENGTH_STEPS
    if len(planted):
        middle = min(middle, float(np.quantile(planted, WEAK_PLANTED)))
    return -decay * STRENGTH_STEPS, middle
