"""Comparing two servers: paired log ratios, an interval by bootstrap, and a verdict in words.

Pure functions over recorded pairs of blocks; what ran them is in `paired_runs`. A pair is one schedule sent to A and to B, one
after the other; the pair is the unit, not the request. Invariant: nothing is claimed under the noise floor that two identical
servers (A against A) showed, and one seed gives one result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
FEWEST_PAIRS = 6
NUM_RESAMPLES = 4999

Better = Literal["higher", "lower"]
Arm = Literal["A", "B"]
Verdict = Literal["better", "worse", "no difference found", "under the noise floor", "undecided"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A quantity that is compared: its name in a block's values, and which direction is good."""

    name: str
    unit: str
    better: Better


class Pair(msgspec.Struct, frozen=True):
    """One schedule sent to both arms; `first` was measured before the other. A value is None where nothing was observed.

    `failures` says which gates a block failed; such a pair is left out.
    """

    seed: int
    schedule_sha256: str
    first: Arm
    a: dict[str, float | None]
    b: dict[str, float | None]
    failures: list[str] = []


class Interval(msgspec.Struct, frozen=True):
    """A mean log ratio of B to A with its interval and the p-value of "no difference"; all None below FEWEST_PAIRS pairs."""

    num_pairs: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None


class MetricResult(msgspec.Struct, frozen=True):
    """What can be said of one metric. `ratio`, `low`, `high` are B ÷ A; `noise_floor` is a ratio above 1 of either direction."""

    metric: str
    unit: str
    better: Better
    num_pairs: int
    num_left_out: int
    verdict: Verdict
    words: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    confidence: float = CONFIDENCE
    p_value: float | None = None
    """Of a difference other than none, adjusted for the number of metrics (Holm)."""
    noise_floor: float | None = None


def log_ratios(pairs: Sequence[Pair], metric: str) -> list[float]:
    """ln(B ÷ A) of each pair without failures that has a positive value on both sides."""
    ratios = []
    for pair in pairs:
        a, b = pair.a.get(metric), pair.b.get(metric)
        if not pair.failures and a is not None and b is not None and a > 0 and b > 0:
            ratios.append(math.log(b / a))
    return ratios


def bootstrap_interval(
    ratios: Sequence[float], *, seed: int, confidence: float = CONFIDENCE
) -> Interval:
    """Mean of log ratios with a symmetric bootstrap-t interval (Hall, Annals of Statistics 16, 1988).

    Chosen because it keeps its level with ten pairs, where percentile and BCa intervals are too narrow. The p-value inverts it: it is
    below 1 − confidence exactly where the interval leaves 0 out.
    """
    n = len(ratios)
    if n < FEWEST_PAIRS:
        return Interval(n)
    values = np.asarray(ratios, dtype=np.float64)
    mean, error = float(values.mean()), _standard_error(values[None])[0]
    if error < 1e-12:  # the pairs agree to rounding
        return Interval(n, mean, mean, mean, 1.0 if abs(mean) < 1e-12 else 1 / (NUM_RESAMPLES + 1))
    picks = np.random.default_rng(seed).integers(0, n, size=(NUM_RESAMPLES, n))
    resamples = values[picks]
    errors = np.maximum(_standard_error(resamples), 1e-12 * error)
    distances = np.sort(np.abs(resamples.mean(axis=1) - mean) / errors)
    rank = math.ceil(confidence * (NUM_RESAMPLES + 1))
    half = float(distances[rank - 1]) * float(error)
    reached = NUM_RESAMPLES - int(np.searchsorted(distances, abs(mean) / error, side="left"))
    return Interval(n, mean, mean - half, mean + half, (1 + reached) / (NUM_RESAMPLES + 1))


def _standard_error(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the mean of each row."""
    error: NDArray[np.float64] = rows.std(axis=1, ddof=1) / math.sqrt(rows.shape[1])
    return error


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values (Scandinavian Journal of Statistics 6, 1979): each can be held against the whole level."""
    adjusted: dict[str, float] = {}
    highest = 0.0
    ordered = sorted(p_values, key=lambda name: (p_values[name], name))
    for position, name in enumerate(ordered):
        highest = max(highest, min(1.0, p_values[name] * (len(ordered) - position)))
        adjusted[name] = highest
    return adjusted


def compare(
    metrics: Sequence[Metric],
    pairs: Sequence[Pair],
    null_pairs: Sequence[Pair],
    *,
    seed: int,
    confidence: float = CONFIDENCE,
    least_effect: float = 0.0,
) -> list[MetricResult]:
    """A verdict for each metric. `null_pairs` are A against A; `least_effect` (0.02: 2 %) is what would matter to the reader."""
    intervals = {}
    nulls = {}
    for metric in metrics:
        ratios = log_ratios(pairs, metric.name)
        intervals[metric.name] = bootstrap_interval(ratios, seed=seed, confidence=confidence)
        ratios = log_ratios(null_pairs, metric.name)
        nulls[metric.name] = bootstrap_interval(ratios, seed=seed, confidence=confidence)
    p_values = holm({name: i.p_value for name, i in intervals.items() if i.p_value is not None})
    results = []
    for metric in metrics:
        interval, null = intervals[metric.name], nulls[metric.name]
        p_value = p_values.get(metric.name)
        verdict, words = _verdict(metric, interval, null, p_value, 1 - confidence, least_effect)
        results.append(
            MetricResult(
                metric=metric.name,
                unit=metric.unit,
                better=metric.better,
                num_pairs=interval.num_pairs,
                num_left_out=len(pairs) - interval.num_pairs,
                verdict=verdict,
                words=words,
                ratio=_ratio(interval.mean),
                low=_ratio(interval.low),
                high=_ratio(interval.high),
                confidence=confidence,
                p_value=p_value,
                noise_floor=_ratio(noise_floor(null)),
            )
        )
    return results


def noise_floor(null: Interval) -> float | None:
    """The largest log ratio, of either sign, that A against A did not exclude."""
    if null.low is None or null.high is None:
        return None
    return max(abs(null.low), abs(null.high))


def _verdict(
    metric: Metric,
    interval: Interval,
    null: Interval,
    p_value: float | None,
    level: float,
    least_effect: float,
) -> tuple[Verdict, str]:
    name = metric.name
    for what, found in (("pairs", interval), ("pairs of A against A", null)):
        if found.mean is None:
            return "undecided", (
                f"{name}: {found.num_pairs} {what} with a value are too few, at least "
                f"{FEWEST_PAIRS} are needed; nothing is claimed"
            )
    assert interval.mean is not None
    assert null.p_value is not None
    assert p_value is not None
    floor = noise_floor(null)
    assert floor is not None
    span = f"{percent(interval.low)} to {percent(interval.high)}"
    if null.p_value <= level:
        return "undecided", (
            f"{name}: A differed from itself by {percent(null.mean)} ({percent(null.low)} to "
            f"{percent(null.high)}); drift or order disturbs this machine, nothing is claimed"
        )
    if p_value > level:
        return "no difference found", (
            f"{name}: no difference found; B lies {span} from A, and A may differ from itself by "
            f"±{math.expm1(floor):.1%}"
        )
    if abs(interval.mean) <= floor:
        return "under the noise floor", (
            f"{name}: B is {percent(interval.mean)} ({span}), which is not more than the "
            f"±{math.expm1(floor):.1%} that A may differ from itself; nothing is claimed"
        )
    if abs(math.expm1(interval.mean)) < least_effect:
        return "under the noise floor", (
            f"{name}: B is {percent(interval.mean)} ({span}), less than the {least_effect:.1%} "
            "that were said to matter"
        )
    is_better = (interval.mean > 0) == (metric.better == "higher")
    verdict: Verdict = "better" if is_better else "worse"
    return verdict, (
        f"{name}: B is {verdict}: {percent(interval.mean)} ({span}; noise floor "
        f"±{math.expm1(floor):.1%})"
    )


def percent(log_ratio: float | None) -> str:
    """A log ratio as a change: "+10.0 %"."""
    return "unknown" if log_ratio is None else f"{math.expm1(log_ratio) * 100:+.1f} %"


def _ratio(log_ratio: float | None) -> float | None:
    return None if log_ratio is None else math.exp(log_ratio)
