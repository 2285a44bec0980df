"""Speculation: the worked numbers, and the formulas against a simulated coin."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.errors import ConfigError
from poise.planner.speculation import (
    Costs,
    best_k,
    break_even,
    expected_tokens,
    plan,
    speedup,
)

P, Q = [0.2, 0.5, 0.3], [0.6, 0.3, 0.1]


def test_the_worked_distributions() -> None:
    report = plan(p=P, q=Q)
    assert report.value("accepted_mass") == pytest.approx(60)
    assert report.value("accept_all_error") == pytest.approx(40)
    rows = report.tables[0].rows
    assert [row[3] for row in rows] == pytest.approx([0, 0.5, 0.5])  # residual
    assert [row[4] for row in rows] == pytest.approx(P)  # emitted: exactly the target's
    assert [row[5] for row in rows] == Q  # accepting everything: the draft's instead
    assert report.value("acceptance") == pytest.approx(60)


def test_expected_tokens_is_the_geometric_sum() -> None:
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616)
    assert expected_tokens(0, 4) == 1
    assert expected_tokens(1, 4) == 5


@settings(deadline=None)
@given(st.floats(0, 0.95), st.integers(0, 8))
def test_expected_tokens_by_tossing_coins(acceptance: float, k: int) -> None:
    toss = random.Random(1)
    total = 0
    for _ in range(4000):
        accepted = 0
        while accepted < k and toss.random() < acceptance:
            accepted += 1
        total += accepted + 1
    assert total / 4000 == pytest.approx(expected_tokens(acceptance, k), abs=0.25)


@settings(deadline=None)
@given(
    st.integers(1, 16),
    st.builds(Costs, st.floats(0, 1), st.floats(0.5, 3), st.floats(0, 0.5)),
)
def test_break_even_is_where_the_speedup_is_one(k: int, costs: Costs) -> None:
    even = break_even(k, costs)
    if even is None:
        assert speedup(1, k, costs) < 1
    elif even == 0:
        assert speedup(0, k, costs) >= 1
    else:
        assert speedup(even, k, costs) == pytest.approx(1)


@settings(deadline=None)
@given(st.floats(0, 1), st.builds(Costs, st.floats(0, 1), st.floats(0.5, 3), st.floats(0, 0.5)))
def test_no_k_beats_the_best(acceptance: float, costs: Costs) -> None:
    best = best_k(acceptance, costs)
    assert all(speedup(acceptance, k, costs) <= speedup(acceptance, best, costs) for k in range(65))


def test_a_costly_verification_turns_speculation_off() -> None:
    assert plan(acceptance=0.7, verify_cost=1, verify_cost_per_token=1).value("best_k") == 0


def test_free_drafts_are_called_free() -> None:
    assert any("taken as free" in note for note in plan(acceptance=0.6).notes)
    assert not any("taken as free" in note for note in plan(acceptance=0.6, draft_cost=0.1).notes)


def test_without_drafts_a_step_is_a_plain_step() -> None:
    report = plan(acceptance=0.5, k=0, verify_cost=2)
    assert report.value("step_cost") == 1
    assert report.value("speedup") == 1


probabilities = st.lists(st.floats(0.001, 1), min_size=2, max_size=8)


@settings(deadline=None)
@given(probabilities, st.data())
def test_the_emitted_tokens_follow_the_target(weights: list[float], data: st.DataObject) -> None:
    p = [weight / sum(weights) for weight in weights]
    other = data.draw(st.lists(st.floats(0.001, 1), min_size=len(p), max_size=len(p)))
    q = [weight / sum(other) for weight in other]
    report = plan(p=p, q=q)
    assert [row[4] for row in report.tables[0].rows] == pytest.approx(p)
    distance = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    assert report.value("accept_all_error") / 100 == pytest.approx(distance, abs=1e-9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give --acceptance, or --p and --q"),
        ({"acceptance": "1.2"}, "--acceptance is '1.2'"),
        ({"acceptance": "-0.1"}, "--acceptance is '-0.1'"),
        ({"acceptance": "nan"}, "--acceptance is 'nan'"),
        ({"acceptance": 0.5, "k": "-1"}, "--k is '-1'"),
        ({"acceptance": 0.5, "k": "1e9"}, "--k is '1e9'"),
        ({"acceptance": 0.5, "verify_cost": "0"}, "--verify-cost is '0'"),
        ({"acceptance": 0.5, "draft_cost": "-1"}, "--draft-cost is '-1'"),
        ({"p": P}, "--p and --q belong together"),
        ({"p": P, "q": [0.5, 0.5]}, "--p has 3 entries, --q has 2"),
        ({"p": "0.5,0.6", "q": "0.5,0.5"}, "--p sums to 1.1"),
        ({"p": "", "q": ""}, "--p sums to 0"),
    ],
)
def test_nonsense_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**given)  # type: ignore[arg-type]
