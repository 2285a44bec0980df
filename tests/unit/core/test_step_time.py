"""The step-time model: counts of keys, the fit, robustness, and the inverse that a budget needs."""

from __future__ import annotations

import math
import random

import pytest
from core_harness import FULL, FULL_AND_SLIDING, Harness
from hypothesis import given
from hypothesis import strategies as st

from poise.core.output import KVGroupSpec, ScheduledRequest
from poise.core.step_time import RunningMedian, StepCost, StepShape, StepTimeModel

COST = StepCost(per_step=10e-3, per_token=1e-3, per_key=1e-6, per_sampled=1e-4)


def shape(num_decodes: int, num_prefill: int) -> StepShape:
    return StepShape(num_decodes, num_prefill, 100 * (num_decodes + num_prefill), num_decodes)


@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.booleans()), max_size=5),
    groups=st.sampled_from([FULL, FULL_AND_SLIDING, (KVGroupSpec("sliding", 3, 5),)]),
)
def test_a_shape_counts_every_pair_of_token_and_key(
    rows: list[tuple[int, int, bool]], groups: tuple[KVGroupSpec, ...]
) -> None:
    scheduled = [ScheduledRequest(i, start, n, ((),), s) for i, (start, n, s) in enumerate(rows)]
    pairs = 0
    for start, n, _ in rows:
        for position in range(start, start + n):
            for group in groups:
                window = group.sliding_window or position + 1
                pairs += group.num_layers * min(position + 1, window)
    found = StepTimeModel(COST, groups).shape_of(scheduled)
    assert found.num_keys == pairs
    assert found.num_tokens == sum(n for _, n, _ in rows)
    assert found.num_sampled == sum(samples for _, _, samples in rows)
    assert found.num_decode_rows == sum(n == 1 and samples for _, n, samples in rows)


def test_steps_of_a_machine_that_differs_by_kind_and_size_are_learnt() -> None:
    model = StepTimeModel(COST)
    rng = random.Random(1)

    def truth(step: StepShape) -> float:
        factor = 0.5 if step.num_prefill_tokens else 2.0
        return COST.seconds(step) * factor * (1 + 0.1 * math.log2(step.num_tokens))

    steps = [shape(rng.randrange(1, 60), rng.choice([0, 0, 30, 400])) for _ in range(600)]
    for step in steps:
        model.observe(step, truth(step) * rng.uniform(0.95, 1.05))
    for step in steps[-50:]:
        assert model.predict(step) == pytest.approx(truth(step), rel=0.12)
    assert max(map(abs, list(model.errors)[-50:])) < 0.15


def test_disturbed_steps_move_no_prediction() -> None:
    model = StepTimeModel(COST)
    for number in range(40):
        disturbed = number % 4 == 3
        model.observe(shape(8, 0), COST.seconds(shape(8, 0)) * (20 if disturbed else 1))
    assert model.predict(shape(8, 0)) == pytest.approx(COST.seconds(shape(8, 0)))


def test_a_row_that_begins_a_tile_is_known_to_cost_more() -> None:
    model = StepTimeModel(COST)

    def truth(rows: int) -> float:
        return COST.seconds(shape(rows, 0)) * (1.0 if rows <= 8 else 1.7)

    for _ in range(5):
        for rows in (7, 8, 9, 16):
            model.observe(shape(rows, 0), truth(rows))
    for rows in (7, 8, 9, 16):
        assert model.predict(shape(rows, 0)) == pytest.approx(truth(rows))


def test_a_fit_is_where_the_next_run_starts_and_no_single_step_undoes_it() -> None:
    first = StepTimeModel(COST)
    assert not first.is_fitted
    for _ in range(5):
        first.observe(shape(4, 0), 3 * COST.seconds(shape(4, 0)))
    second = StepTimeModel(COST, fit=first.fit)
    assert second.is_fitted
    assert second.predict(shape(4, 0)) == pytest.approx(3 * COST.seconds(shape(4, 0)))
    second.observe(shape(4, 0), 50 * COST.seconds(shape(4, 0)))
    assert second.predict(shape(4, 0)) == pytest.approx(3 * COST.seconds(shape(4, 0)))
    assert second.fit == first.fit


@given(st.integers(0, 32), st.integers(0, 500), st.integers(1, 512), st.floats(0, 1), st.booleans())
def test_the_largest_prefill_is_the_last_that_is_in_time(
    num_decodes: int, start: int, most: int, seconds: float, fitted: bool
) -> None:
    model = StepTimeModel(COST)
    if fitted:
        model.observe(shape(2, 100), 2 * COST.seconds(shape(2, 100)))
    decodes = StepShape(num_decodes, 0, num_decodes * 50, num_decodes)
    found = model.largest_prefill(decodes, start, seconds, most)

    def predicted(n: int) -> float:
        keys = decodes.num_keys + model.keys(start, n)
        return model.predict(StepShape(num_decodes, n, keys, num_decodes + 1))

    assert 0 <= found <= most
    assert found == 0 or predicted(found) <= seconds
    assert found == most or predicted(found + 1) > seconds


def test_the_scheduler_teaches_its_model() -> None:
    harness = Harness(step_time=StepTimeModel(COST))
    harness.add([1] * 9, max_tokens=4)
    output = harness.schedule()
    harness.clock.advance(0.3)
    harness.update(output, harness.executor.execute(output))
    fit = harness.scheduler.step_time.fit
    expected = 0.3 / COST.seconds(StepShape(0, 9, 45, 1))
    assert fit == {"decode": {}, "prefill": {4: pytest.approx(expected)}}


@given(
    st.integers(1, 9),
    st.lists(st.floats(0, 8).map(lambda x: round(x, 1)), min_size=1, max_size=40),
)
def test_a_running_median_is_that_of_the_last_values(window: int, values: list[float]) -> None:
    median = RunningMedian(window, values[:3])
    for end in range(min(3, len(values)) + 1, len(values) + 1):
        last = values[max(0, end - window) : end]
        assert median.add(values[end - 1]) == sorted(last)[len(last) // 2]
        assert len(median) == len(last)
