"""Comparisons keep their level on noise, find what was planted, and claim nothing under the noise floor."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.bench.compare import (
    FEWEST_PAIRS,
    Arm,
    Metric,
    Pair,
    bootstrap_interval,
    compare,
    holm,
    log_ratios,
    noise_floor,
)
from poise.bench.paired_runs import read_comparison

RECORDS = Path(__file__).parents[3] / "docs" / "records"
RATE = Metric("output_throughput", "tok/s", "higher")
TTFT = Metric("ttft_p50", "s", "lower")


def synthetic_pairs(
    seed: int, num: int, *, effect: float = 1.0, noise: float = 0.02, drift: float = 0.001
) -> list[Pair]:
    """Blocks as a machine gives them: log-normal noise, a slow drift, and what both blocks of a pair share; B is A × effect."""
    rng = random.Random(seed)
    pairs = []
    for index in range(num):
        first: Arm = "A" if index % 2 == 0 else "B"
        shared = rng.gauss(0, 0.1)
        values = {}
        for position, arm in enumerate(first + ("B" if first == "A" else "A")):
            level = shared + drift * (2 * index + position) + rng.gauss(0, noise)
            values[arm] = math.exp(level + (math.log(effect) if arm == "B" else 0))
        rates = {arm: 500 * value for arm, value in values.items()}
        times = {arm: 0.2 / value for arm, value in values.items()}
        a, b = ({"output_throughput": rates[arm], "ttft_p50": times[arm]} for arm in "AB")
        pairs.append(Pair(index, f"{index:x}", first, dict(a), dict(b)))
    return pairs


def binomial_range(n: int, share: float, tail: float = 0.005) -> tuple[int, int]:
    """The counts that a binomial law gives with all but `tail` on either side."""
    mass = [math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(n + 1)]
    total = np.cumsum(mass)
    return int(np.searchsorted(total, tail)), int(np.searchsorted(total, 1 - tail))


def resampled_null(ratios: Sequence[float], num_pairs: int, rng: random.Random) -> list[float]:
    """Log ratios of a comparison that truly has none: recorded ones, drawn again, each arm called A or B by chance."""
    return [rng.choice(ratios) * rng.choice((-1, 1)) for _ in range(num_pairs)]


def self_comparisons() -> Iterator[list[float]]:
    """Log ratios of a server and itself: synthetic ones, and those of every such record of a real machine."""
    yield log_ratios(synthetic_pairs(5, 60), RATE.name)
    for path in sorted(RECORDS.glob("compare-*-self.json")):
        comparison = read_comparison(path)
        yield log_ratios([*comparison.null_pairs, *comparison.pairs], RATE.name)


@pytest.mark.parametrize("num_pairs", [6, 10, 20])
@pytest.mark.parametrize("recorded", list(self_comparisons()))
def test_400_resampled_comparisons_of_a_server_with_itself_keep_five_percent(
    recorded: list[float], num_pairs: int
) -> None:
    rng = random.Random(11)
    claims = 0
    for seed in range(400):
        interval = bootstrap_interval(resampled_null(recorded, num_pairs, rng), seed=seed)
        assert interval.low is not None
        assert interval.high is not None
        assert interval.p_value is not None
        outside = interval.low > 0 or interval.high < 0
        assert outside == (interval.p_value <= 0.05)
        claims += outside
    low, high = binomial_range(400, 0.05)
    assert low <= claims <= high


def test_verdicts_on_noise_claim_even_less_than_that() -> None:
    claims = 0
    for seed in range(200):
        pairs, nulls = synthetic_pairs(seed, 10), synthetic_pairs(seed + 1000, 10)
        results = compare([RATE, TTFT], pairs, nulls, seed=seed)
        claims += any(result.verdict in ("better", "worse") for result in results)
    assert claims <= binomial_range(200, 0.05)[1]


def test_a_planted_slow_down_of_a_tenth_is_found_with_its_size() -> None:
    found = 0
    for seed in range(50):
        pairs = synthetic_pairs(seed, 10, effect=0.9)
        results = compare([RATE, TTFT], pairs, synthetic_pairs(seed + 1000, 10), seed=seed)
        rate, ttft = results
        assert rate.low is not None
        assert rate.high is not None
        found += (rate.verdict, ttft.verdict) == ("worse", "worse") and rate.low < 0.9 < rate.high
    assert found >= 42  # 5 % of intervals miss, and so do 5 % of the noise floors


def test_the_words_say_what_was_found() -> None:
    pairs, nulls = synthetic_pairs(3, 12, effect=1.25), synthetic_pairs(4, 12)
    rate, ttft = compare([RATE, TTFT], pairs, nulls, seed=1)
    assert rate.verdict == "better"
    assert rate.words.startswith("output_throughput: B is better: +2")
    assert ttft.verdict == "better"
    assert ttft.words.startswith("ttft_p50: B is better: -")
    assert rate.noise_floor is not None
    assert 1 < rate.noise_floor < 1.05


def test_nothing_is_claimed_under_the_noise_floor() -> None:
    pairs = [Pair(i, "", "A", {"x": 100.0}, {"x": 101.0 + i / 100}) for i in range(10)]
    noisy = [Pair(i, "", "A", {"x": 100.0}, {"x": 100.0 + (-1) ** i * 9}) for i in range(10)]
    (result,) = compare([Metric("x", "", "higher")], pairs, noisy, seed=1)
    assert result.p_value is not None
    assert result.p_value < 0.05
    assert result.verdict == "under the noise floor"
    assert "nothing is claimed" in result.words


def test_nothing_is_claimed_less_than_what_matters() -> None:
    quiet = [Pair(i, "", "A", {"x": 100.0}, {"x": 100.0 + (-1) ** i / 99}) for i in range(10)]
    pairs = [Pair(i, "", "A", {"x": 100.0}, {"x": 101.0 + i / 100}) for i in range(10)]
    metric = Metric("x", "", "higher")
    assert compare([metric], pairs, quiet, seed=1)[0].verdict == "better"
    (result,) = compare([metric], pairs, quiet, seed=1, least_effect=0.02)
    assert result.verdict == "under the noise floor"
    assert "less than the 2.0% that were said to matter" in result.words


def test_a_server_that_differs_from_itself_decides_nothing() -> None:
    pairs, biased = synthetic_pairs(1, 10, effect=0.5), synthetic_pairs(2, 10, effect=1.2)
    (result,) = compare([RATE], pairs, biased, seed=1)
    assert result.verdict == "undecided"
    assert "A differed from itself" in result.words


@pytest.mark.parametrize(("num_pairs", "num_nulls"), [(FEWEST_PAIRS - 1, 10), (10, 0)])
def test_too_few_pairs_decide_nothing(num_pairs: int, num_nulls: int) -> None:
    pairs = synthetic_pairs(1, num_pairs, effect=0.5)
    (result,) = compare([RATE], pairs, synthetic_pairs(2, num_nulls), seed=1)
    assert result.verdict == "undecided"
    assert "too few" in result.words


def test_pairs_without_a_value_are_left_out_and_counted() -> None:
    pairs = synthetic_pairs(1, 10, effect=0.5)
    pairs[0].a["ttft_p50"] = None
    pairs[1].b["ttft_p50"] = 0.0
    (result,) = compare([TTFT], pairs, synthetic_pairs(2, 10), seed=1)
    assert (result.num_pairs, result.num_left_out) == (8, 2)
    assert result.verdict == "worse"


def test_pairs_that_agree_exactly() -> None:
    same = [Pair(i, "", "A", {"x": 3.0}, {"x": 3.0}) for i in range(8)]
    double = [Pair(i, "", "A", {"x": 3.0}, {"x": 6.0}) for i in range(8)]
    metric = Metric("x", "", "lower")
    assert compare([metric], same, same, seed=1)[0].verdict == "no difference found"
    (result,) = compare([metric], double, same, seed=1)
    assert result.verdict == "worse"
    assert result.ratio == pytest.approx(2.0)


def test_one_seed_gives_one_result() -> None:
    ratios = log_ratios(synthetic_pairs(1, 10), RATE.name)
    assert bootstrap_interval(ratios, seed=3) == bootstrap_interval(ratios, seed=3)
    assert bootstrap_interval(ratios, seed=3) != bootstrap_interval(ratios, seed=4)


@given(st.lists(st.floats(-0.5, 0.5), min_size=FEWEST_PAIRS, max_size=15), st.floats(-1, 1))
def test_swapping_the_arms_mirrors_the_interval(ratios: list[float], shift: float) -> None:
    there = bootstrap_interval([ratio + shift for ratio in ratios], seed=1)
    back = bootstrap_interval([-ratio - shift for ratio in ratios], seed=1)
    assert there.mean is not None
    assert there.low is not None
    assert there.high is not None
    assert there.low <= there.mean <= there.high
    assert back.low == pytest.approx(-there.high, abs=1e-9)
    assert back.p_value == there.p_value
    floor = noise_floor(there)
    assert floor is not None
    assert floor >= abs(there.mean)


def test_holm() -> None:
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({}) == {}
