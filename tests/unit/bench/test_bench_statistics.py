"""Percentiles against numpy's own, intervals against brute force over the binomial distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.bench.statistics import (
    PercentileChoice,
    distribution,
    effective_sample_size,
    fewest_for_interval,
    percentile,
    percentile_ranks,
    percentile_with_interval,
    wilson_interval,
)

samples = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)
percents = st.one_of(st.floats(0.1, 99.9), st.sampled_from([1.0, 25.0, 50.0, 90.0, 99.0]))


@given(samples, st.sampled_from([1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0]))
def test_type_1_is_numpys_inverted_cdf(values: list[float], percent: float) -> None:
    expected = sorted(values)[max(0, math.ceil(round(len(values) * percent / 100, 9)) - 1)]
    assert percentile(sorted(values), percent, 1) == expected


@given(samples, percents)
def test_type_1_is_the_least_value_with_enough_below(values: list[float], percent: float) -> None:
    found = percentile(sorted(values), percent, 1)
    share = percent / 100
    assert sum(value <= found for value in values) / len(values) >= share - 1e-9
    assert sum(value < found for value in values) / len(values) < share + 1e-9


@given(samples, percents)
def test_type_7_is_numpys_linear(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent, method="linear"))
    assert percentile(sorted(values), percent, 7) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_wrong_types_and_empty_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="type 3"):
        percentile([1.0], 50, 3)
    with pytest.raises(ValueError, match="empty"):
        percentile([], 50)


@given(st.integers(1, 120), st.sampled_from([10.0, 50.0, 90.0, 95.0, 99.0]))
def test_ranks_are_the_tightest_with_each_tail_small_enough(n: int, percent: float) -> None:
    share = percent / 100
    mass = [math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(n + 1)]
    below = [math.fsum(mass[:k]) for k in range(n + 2)]  # P(B < k)
    lows = [rank for rank in range(1, n + 1) if below[rank] <= 0.025]
    highs = [rank for rank in range(1, n + 1) if below[rank] >= 0.975]
    assert percentile_ranks(n, percent) == (
        max(lows) if lows else None,
        min(highs) if highs else None,
    )


@pytest.mark.parametrize(
    ("n", "percent", "ranks"),
    [
        (100, 50.0, (40, 61)),
        (1000, 99.0, (983, 997)),
        (5000, 99.9, (4990, 5000)),
        (10000, 95.0, (9457, 9543)),
        (100, 99.0, (97, None)),
        (1, 50.0, (None, None)),
        (0, 50.0, (None, None)),
    ],
)
def test_known_ranks(n: int, percent: float, ranks: tuple[int | None, int | None]) -> None:
    assert percentile_ranks(n, percent) == ranks


def test_the_fewest_values_for_an_interval() -> None:
    known = {50.0: 6, 90.0: 36, 95.0: 72, 99.0: 368, 99.9: 3688}
    assert {percent: fewest_for_interval(percent) for percent in known} == known


def test_one_value_is_given_with_a_note() -> None:
    found = percentile_with_interval([0.5], 99.0, PercentileChoice())
    assert found.value == 0.5
    assert found.high is None
    assert found.note == "n too small: 1 of 368"


def test_misses_count_as_infinitely_late() -> None:
    found = distribution([1.0] * 90, "x", PercentileChoice((50.0, 95.0)), num_missed=10)
    assert found.n == 100
    assert found.num_missed == 10
    assert found.percentiles[0].value == 1.0
    assert found.percentiles[1].value is None
    assert "failed" in (found.percentiles[1].note or "")
    assert found.maximum == 1.0


def test_an_empty_distribution_has_no_values() -> None:
    found = distribution([], "x", PercentileChoice((50.0,)))
    assert (found.n, found.mean, found.minimum, found.maximum) == (0, None, None, None)
    assert found.percentiles[0].value is None


@given(st.integers(1, 200), st.data())
def test_wilson_holds_the_share(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, n))
    low, high = wilson_interval(successes, n)
    assert low is not None
    assert high is not None
    assert 0.0 <= low <= successes / n <= high <= 1.0


def test_wilson_is_the_published_one() -> None:
    low, high = wilson_interval(81, 263)  # Newcombe, Statistics in Medicine 17 (1998), table I
    assert low == pytest.approx(0.2553, abs=5e-5)
    assert high == pytest.approx(0.3662, abs=5e-5)
    assert wilson_interval(0, 0) == (None, None)


def test_autocorrelation_shrinks_the_sample() -> None:
    steps = [float(index // 50) for index in range(200)]
    effective = effective_sample_size(steps)
    assert effective is not None
    assert effective < 20
    assert effective_sample_size([1.0] * 30) == 30
    assert effective_sample_size([1.0, -1.0] * 30) == 60
    assert effective_sample_size([1.0] * 9) is None
