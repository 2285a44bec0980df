"""Speculation: the worked numbers, and the formulas against a simulated coin."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.core.step_time import StepCost, StepTimeModel
from poise.errors import ConfigError
from poise.planner.speculation import (
    Costs,
    best_k,
    break_even,
    expected_tokens,
    measured_costs,
    operations,
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


# Leviathan, Kalman and Matias (2023), Table 1: a draft that costs nothing.
@pytest.mark.parametrize(
    ("acceptance", "k", "arithmetic", "speed"),
    [
        (0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69), (0.9, 2, 1.11, 2.71), (0.9, 10, 1.60, 6.86),
    ],
)  # fmt: skip
def test_table_1_of_leviathan(acceptance: float, k: int, arithmetic: float, speed: float) -> None:
    report = plan(acceptance=acceptance, k=k)
    assert report.value("speedup") == pytest.approx(speed, abs=0.005)
    assert report.value("operations") == pytest.approx(arithmetic, abs=0.005)


# Table 4: what their formula predicts for pairs of models, printed with one digit.
@pytest.mark.parametrize(
    ("k", "acceptance", "draft", "speed"),
    [
        (7, 0.75, 0.02, 3.2), (7, 0.8, 0.04, 3.3), (7, 0.82, 0.11, 2.5), (7, 0.62, 0.02, 2.3),
        (5, 0.68, 0.04, 2.4), (3, 0.71, 0.11, 2.0), (5, 0.65, 0.02, 2.4), (5, 0.73, 0.04, 2.6),
        (3, 0.74, 0.11, 2.0), (5, 0.53, 0.02, 1.9), (3, 0.55, 0.04, 1.8), (3, 0.56, 0.11, 1.6),
    ],
)  # fmt: skip
def test_table_4_of_leviathan(k: int, acceptance: float, draft: float, speed: float) -> None:
    """Their acceptances are rounded, too."""
    assert speedup(acceptance, k, Costs(draft)) == pytest.approx(speed, abs=0.08)


@pytest.mark.parametrize(
    ("draft", "best"),
    [
        (0.01, [5, 7, 9, 14, 24, 40]), (0.05, [3, 4, 6, 8, 13, 21]), (0.1, [2, 3, 4, 6, 10, 15]),
        (0.3, [1, 1, 2, 3, 5, 8]), (0.5, [0, 1, 1, 2, 3, 5]),
    ],
)  # fmt: skip
def test_the_best_k_by_cost_of_a_draft(draft: float, best: list[int]) -> None:
    assert [best_k(a, Costs(draft)) for a in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)] == best


def test_arithmetic_grows_with_what_is_drafted_in_vain() -> None:
    assert operations(1, 4) == 1
    assert operations(0, 4) == 5
    assert operations(0, 4, draft=0.5) == 7


TIMES = StepTimeModel(StepCost(per_step=8e-3, per_token=5e-4, per_key=1e-7, per_sampled=5e-4))


def test_measured_steps_are_the_cost_of_verifying() -> None:
    costs = measured_costs(TIMES, 1, 100)
    plain, three = 8e-3 + 1e-3 + 101e-7, 8e-3 + 4e-3 + (101 + 102 + 103 + 104) * 1e-7
    assert costs.of_step(0) == 1
    assert costs.of_step(3) == pytest.approx(three / plain)
    report = plan(acceptance=0.7, k=3, step_times=TIMES, context=100)
    assert report.value("speedup") == pytest.approx(expected_tokens(0.7, 3) * plain / three)
    assert not report.notes[0].startswith("Drafts are taken as free")


def test_in_a_measured_full_batch_drafts_stop_to_pay() -> None:
    gains = [
        plan(acceptance=0.6, step_times=TIMES, batch=batch).value("best_speedup")
        for batch in (1, 4, 16, 64)
    ]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.5
    assert plan(acceptance=0.4, step_times=TIMES, batch=256).value("best_k") == 0


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
        ({"acceptance": 0.5, "step_times": TIMES, "verify_cost": 2}, "are measured with --model"),
        ({"acceptance": 0.5, "step_times": TIMES, "batch": 0}, "--batch is 0"),
    ],
)
def test_nonsense_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**given)  # type: ignore[arg-type]
