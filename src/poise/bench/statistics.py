"""Percentiles, their intervals and intervals of shares, each by a named method.

Pure functions on sequences of numbers. Invariant: no distribution is assumed; where a sample is too small for an interval, the
interval's end is None, never a guess. Misses enter as infinity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from poise.bench.record import Distribution, Percentile

HYNDMAN_FAN_TYPES = (1, 7)
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class PercentileChoice:
    """Which percentiles are given, and by which of Hyndman and Fan's definitions (The American Statistician 50, 1996)."""

    percents: tuple[float, ...] = (50.0, 90.0, 95.0, 99.0)
    hyndman_fan_type: int = 1
    confidence: float = CONFIDENCE


def percentile(ordered: Sequence[float], percent: float, hyndman_fan_type: int = 1) -> float:
    """Percentile of a sorted, non-empty sample: type 1 is the inverse of the empirical distribution, type 7 numpy's line.

    Raises ValueError on an empty sample or an unknown type.
    """
    n = len(ordered)
    if n == 0:
        raise ValueError("no percentile of an empty sample")
    if hyndman_fan_type == 1:
        return ordered[max(0, _ceiling(n * percent, 100.0) - 1)]
    if hyndman_fan_type != 7:
        raise ValueError(f"percentile type {hyndman_fan_type}, not one of {HYNDMAN_FAN_TYPES}")
    position = (n - 1) * percent / 100.0
    below = min(int(position), n - 1)
    share = position - below
    low = ordered[below]
    if share == 0.0 or below + 1 >= n:
        return low
    high = ordered[below + 1]
    return low if low == high else low + share * (high - low)


def _ceiling(product: float, divisor: float) -> int:
    """ceil(product / divisor), where a quotient that is whole but for rounding counts as whole."""
    quotient = product / divisor
    nearest = round(quotient)
    return nearest if abs(quotient - nearest) < 1e-9 * max(1.0, quotient) else math.ceil(quotient)


@lru_cache(maxsize=4096)
def percentile_ranks(
    n: int, percent: float, confidence: float = CONFIDENCE
) -> tuple[int | None, int | None]:
    """Ranks (from 1) of the order statistics that enclose a percentile, with at most half of 1 − confidence in each tail.

    Low is the largest l with P(B < l) ≤ α/2 and high the smallest u with P(B ≥ u) ≤ α/2, for B ~ Binomial(n, percent/100);
    None where no rank of the sample is far enough out.
    """
    share = percent / 100.0
    tail = (1.0 - confidence) / 2.0
    if n == 0 or not 0.0 < share < 1.0:
        return None, None
    first, cumulative = _binomial_cdf(n, share)
    # P(B ≤ k) for k = first …; below `first` it is 0 to double precision
    low = first + int(np.searchsorted(cumulative, tail, side="right"))  # P(B ≤ low − 1) ≤ tail
    high = first + int(np.searchsorted(cumulative, 1.0 - tail, side="left")) + 1
    return (low if low >= 1 else None), (high if high <= n else None)


def _binomial_cdf(n: int, share: float) -> tuple[int, NDArray[np.float64]]:
    """The cumulative distribution over the counts that have any weight, and the first of them."""
    spread = 14.0 * math.sqrt(n * share * (1.0 - share)) + 40.0
    first = max(0, int(n * share - spread))
    last = min(n, int(n * share + spread))
    counts = np.arange(first, last, dtype=np.float64)
    start = (
        math.lgamma(n + 1)
        - math.lgamma(first + 1)
        - math.lgamma(n - first + 1)
        + first * math.log(share)
        + (n - first) * math.log1p(-share)
    )
    steps = np.log((n - counts) / (counts + 1.0)) + math.log(share) - math.log1p(-share)
    logarithms = start + np.concatenate(([0.0], np.cumsum(steps)))
    return first, np.cumsum(np.exp(logarithms))


def fewest_for_interval(percent: float, confidence: float = CONFIDENCE) -> int:
    """The smallest sample whose order statistics enclose the percentile two-sidedly (368 for p99 at 95 %)."""
    share = percent / 100.0
    n = math.ceil(math.log((1.0 - confidence) / 2.0) / math.log(max(share, 1.0 - share)) - 1e-9)
    while None in percentile_ranks(n, percent, confidence):
        n += 1
    return n


def percentile_with_interval(
    ordered: Sequence[float], percent: float, choice: PercentileChoice
) -> Percentile:
    """A percentile of a sorted sample in which misses are infinite; such a value is given as None with a note."""
    n = len(ordered)
    low_rank, high_rank = percentile_ranks(n, percent, choice.confidence)
    value = percentile(ordered, percent, choice.hyndman_fan_type) if n else None
    note = None
    if low_rank is None or high_rank is None:
        note = f"n too small: {n} of {fewest_for_interval(percent, choice.confidence)}"
    if value is not None and math.isinf(value):
        note = "lies among the failed requests, which count as infinitely late"
    return Percentile(
        percent=percent,
        value=_finite(value),
        low=_finite(ordered[low_rank - 1]) if low_rank else None,
        high=_finite(ordered[high_rank - 1]) if high_rank else None,
        confidence=choice.confidence,
        hyndman_fan_type=choice.hyndman_fan_type,
        note=note,
    )


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


def distribution(
    values: Sequence[float],
    definition: str,
    choice: PercentileChoice,
    *,
    unit: str = "s",
    num_missed: int = 0,
) -> Distribution:
    """Summary of values given in order of arrival; `num_missed` failures join them as infinite."""
    ordered = sorted(values) + [math.inf] * num_missed
    return Distribution(
        definition=definition,
        unit=unit,
        n=len(ordered),
        mean=math.fsum(values) / len(values) if values else None,
        minimum=ordered[0] if values else None,
        maximum=max(values) if values else None,
        percentiles=[percentile_with_interval(ordered, p, choice) for p in choice.percents],
        num_missed=num_missed,
        effective_n=effective_sample_size(values),
    )


def effective_sample_size(values: Sequence[float]) -> float | None:
    """n (1 − ρ₁) / (1 + ρ₁) with the lag-one autocorrelation of the sequence, at most n; None below 10 values."""
    n = len(values)
    if n < 10:
        return None
    centred = np.asarray(values, dtype=np.float64)
    centred = centred - centred.mean()
    variance = float(np.dot(centred, centred))
    if variance == 0.0:
        return float(n)
    correlation = float(np.dot(centred[:-1], centred[1:])) / variance
    return float(min(n, n * (1.0 - correlation) / (1.0 + correlation)))


def wilson_interval(
    successes: int, n: int, confidence: float = CONFIDENCE
) -> tuple[float | None, float | None]:
    """Wilson's score interval of a share (JASA 22, 1927); (None, None) for n = 0."""
    if n == 0:
        return None, None
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high
