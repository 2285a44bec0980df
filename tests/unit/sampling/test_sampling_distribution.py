"""Draws follow the softmax and do not know their neighbours. Seeds are fixed, so every outcome is too."""

from __future__ import annotations

import numpy as np
import pytest
from native_sampler import Rows
from numpy.typing import NDArray

from poise.sampling.reference import Row, filter_tokens, processed_logits

LOGITS = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0], np.float32)
DRAWS = 20_000
INDEX = np.arange(DRAWS)
# Quantile 0.999 of chi-square by degrees of freedom.
CRITICAL = {3: 16.27, 7: 24.32, 49: 85.35}


def draw(row: Row, **varied: NDArray[np.int64]) -> NDArray[np.int64]:
    """The tokens of `DRAWS` rows like `row`, with some fields varied."""
    rows = Rows([row], len(LOGITS))
    rows.records = np.repeat(rows.records, DRAWS)
    for name, values in varied.items():
        rows.records[name] = values
    return rows.run(np.tile(LOGITS, (DRAWS, 1)), "baseline")["token_id"].astype(np.int64)


def probabilities(row: Row) -> NDArray[np.float64]:
    z = processed_logits(LOGITS, row)
    weights = np.where(filter_tokens(z, row), np.exp(z.astype(np.float64)), 0)
    return weights / weights.sum()


def chi_square(tokens: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    observed = np.bincount(tokens, minlength=len(expected))
    assert not observed[expected == 0].any()
    possible = expected > 0
    share = expected[possible] * len(tokens)
    return float((((observed[possible] - share) ** 2) / share).sum())


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**64 - 1])
def test_draws_over_positions_follow_the_softmax(seed: int) -> None:
    row = Row(seed=seed)
    tokens = draw(row, position=INDEX)
    assert chi_square(tokens, probabilities(row)) < CRITICAL[7]


def test_draws_over_seeds_follow_the_softmax() -> None:
    tokens = draw(Row(position=100), seed=INDEX)
    assert chi_square(tokens, probabilities(Row())) < CRITICAL[7]


@pytest.mark.parametrize("row", [Row(temperature=0.5), Row(temperature=3.0)])
def test_temperature_reshapes_the_distribution(row: Row) -> None:
    tokens = draw(row, position=INDEX)
    assert chi_square(tokens, probabilities(row)) < CRITICAL[7]


@pytest.mark.parametrize("row", [Row(top_k=4), Row(top_p=0.85), Row(min_p=0.2)])
def test_filters_leave_the_softmax_of_four_tokens(row: Row) -> None:
    assert (probabilities(row) > 0).sum() == 4
    tokens = draw(row, position=INDEX)
    assert chi_square(tokens, probabilities(row)) < CRITICAL[3]


@pytest.mark.parametrize(
    ("row", "positions"),
    [
        (Row(seed=77), 2 * INDEX + 1),
        (Row(seed=78), 2 * INDEX),
        (Row(seed=77, choice=1), 2 * INDEX),
    ],
    ids=["position", "seed", "choice"],
)
def test_neighbouring_draws_are_independent(row: Row, positions: NDArray[np.int64]) -> None:
    pairs = np.zeros((8, 8))
    np.add.at(pairs, (draw(Row(seed=77), position=2 * INDEX), draw(row, position=positions)), 1)
    expected = np.outer(pairs.sum(axis=1), pairs.sum(axis=0)) / DRAWS
    assert ((pairs - expected) ** 2 / expected).sum() < CRITICAL[49]
