"""The controller against brute force, and what it learns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.core.output import KVGroupSpec
from poise.core.step_time import StepCost, StepShape, StepTimeModel
from poise.spec_decode.controller import (
    LEAST_GAIN,
    LEAST_WAIT,
    PROBE_DRAFTS,
    PROBE_SHARE,
    DraftLengthController,
    Record,
    best_lengths,
)
from poise.spec_decode.drafter import Candidate


class Stairs:
    """Seconds by number of rows as tiles make them: flat, then a jump."""

    def __init__(self, base: float, row: float, tile: int, jump: float) -> None:
        self.base, self.row, self.tile, self.jump = base, row, tile, jump

    def predict(self, shape: StepShape) -> float:
        rows = shape.num_tokens
        return self.base + self.row * rows + self.jump * -(-rows // self.tile)

    def keys(self, start: int, num_tokens: int) -> int:
        return num_tokens * start


def rate(
    lengths: Sequence[int],
    survivals: Sequence[Sequence[float]],
    shape: StepShape,
    times: Stairs,
    drafting: float = 0.0,
) -> float:
    """Expected tokens per second, from the definition; `drafting` seconds for each step of the draft model."""
    num_drafts = sum(lengths)
    expected = shape.num_sampled + sum(sum(s[:k]) for s, k in zip(survivals, lengths))
    more = StepShape(shape.num_decode_rows + num_drafts, 0, 0, shape.num_sampled + num_drafts)
    return expected / (times.predict(more) + drafting * max(lengths, default=0))


def is_best(chosen: float, best: float, none: float) -> bool:
    """Whether it is the best rate, or that of no drafts where the best gains too little over it."""
    if chosen == pytest.approx(none) and best < LEAST_GAIN * none * (1 + 1e-9):
        return True
    return chosen == pytest.approx(best) and best > LEAST_GAIN * none * (1 - 1e-9)


survival_lists = st.lists(st.floats(0, 1), min_size=1, max_size=4).map(
    lambda values: sorted(values, reverse=True)
)
stairs = st.builds(
    Stairs, st.floats(0.1, 5), st.floats(0.001, 1), st.integers(1, 6), st.floats(0, 3)
)


@settings(deadline=None, max_examples=150)
@given(st.lists(survival_lists, min_size=1, max_size=4), stairs, st.integers(0, 6))
def test_no_lengths_are_better(
    survivals: list[list[float]], times: Stairs, num_others: int
) -> None:
    n = len(survivals)
    candidates = [Candidate(i, 10, len(s), False) for i, s in enumerate(survivals)]
    shape = StepShape(n + num_others, 0, 0, n + num_others)
    chosen = best_lengths(candidates, survivals, shape, times)
    best = max(
        rate(lengths, survivals, shape, times)
        for lengths in product(*(range(len(s) + 1) for s in survivals))
    )
    none = rate([0] * n, survivals, shape, times)
    assert is_best(rate(chosen, survivals, shape, times), best, none)


@settings(deadline=None, max_examples=100)
@given(survival_lists, stairs, st.floats(0, 2))
def test_the_executors_own_time_counts(
    survivals: list[float], times: Stairs, drafting: float
) -> None:
    shape = StepShape(1, 0, 0, 1)
    candidates = [Candidate(0, 10, len(survivals), True)]
    [chosen] = best_lengths(
        candidates, [survivals], shape, times, lambda lengths: drafting * max(lengths)
    )
    best = max(rate([k], [survivals], shape, times, drafting) for k in range(len(survivals) + 1))
    none = rate([0], [survivals], shape, times, drafting)
    assert is_best(rate([chosen], [survivals], shape, times, drafting), best, none)


def test_drafts_that_survive_get_the_rows_of_those_that_do_not() -> None:
    candidates = [Candidate(0, 10, 3, False), Candidate(1, 10, 3, False)]
    survivals = [[0.9, 0.85, 0.8], [0.3, 0.1, 0.0]]
    shape = StepShape(2, 0, 0, 2)
    assert best_lengths(candidates, survivals, shape, Stairs(1, 0.3, 1, 0.0)) == [3, 0]


def test_neighbours_that_would_wait_count() -> None:
    """The same drafts pay alone and not among many whose step they would lengthen."""
    candidates, survivals = [Candidate(0, 10, 2, False)], [[0.6, 0.4]]
    times = Stairs(1, 0.1, 1, 0.0)
    assert best_lengths(candidates, survivals, StepShape(1, 0, 0, 1), times) == [2]
    crowd = StepShape(32, 0, 0, 32)
    assert best_lengths(candidates, survivals, crowd, Stairs(0.1, 0.1, 1, 0.0)) == [0]


def test_a_long_context_makes_a_draft_dearer() -> None:
    cost = StepCost(per_step=1.0, per_token=0.1, per_key=1e-3, per_sampled=0.0)
    times = StepTimeModel(cost, [KVGroupSpec("full", 1)])
    survivals = [[0.5]]
    for position, length in ((10, 1), (10_000, 0)):
        shape = StepShape(1, 0, 0, 1)
        assert best_lengths([Candidate(0, position, 1, False)], survivals, shape, times) == [length]


def test_the_time_of_a_prompt_is_not_held_against_drafts_nor_for_them() -> None:
    times = Stairs(1, 0.1, 1, 0.0)
    candidates, survivals = [Candidate(0, 10, 2, False)], [[0.6, 0.05]]
    alone = best_lengths(candidates, survivals, StepShape(1, 0, 0, 1), times)
    beside = best_lengths(candidates, survivals, StepShape(1, 500, 0, 1), times)
    assert alone == beside == [1]


# --- learning ------------------------------------------------------------------------------------

CHEAP = Stairs(1, 0.05, 1, 0.0)
ALONE = StepShape(1, 0, 0, 1)


def play(
    controller: DraftLengthController, accepts: Sequence[float], times: Stairs, num_steps: int
) -> list[int]:
    """Lengths of a request whose draft at place j is accepted with probability accepts[j]."""
    toss, lengths = random.Random(1), []
    for _ in range(num_steps):
        [length] = controller.choose([Candidate(7, 10, len(accepts), False)], ALONE, times)
        lengths.append(length)
        accepted = 0
        while accepted < length and toss.random() < accepts[accepted]:
            accepted += 1
        if length:
            controller.observe(7, length, accepted)
    return lengths


def test_good_drafts_get_all_and_useless_ones_a_probe_now_and_then() -> None:
    assert play(DraftLengthController(), [1.0] * 4, CHEAP, 100)[-50:] == [4] * 50
    lengths = play(DraftLengthController(), [0.0] * 4, CHEAP, 2000)
    late = lengths[1000:]
    assert set(late) == {0, PROBE_DRAFTS}
    assert 0 < late.count(PROBE_DRAFTS) <= 1000 // LEAST_WAIT


def test_a_text_that_begins_to_repeat_is_noticed() -> None:
    controller = DraftLengthController()
    play(controller, [0.0] * 4, CHEAP, 2000)
    assert play(controller, [1.0] * 4, CHEAP, 200)[-20:] == [4] * 20


def test_a_request_is_probed_at_its_first_chance_and_then_seldom() -> None:
    times = Stairs(0.5, 0.7, 1, 0.0)
    lengths = play(DraftLengthController(), [0.0] * 4, times, 500)
    assert lengths[0] == PROBE_DRAFTS
    loss = times.predict(StepShape(3)) / times.predict(StepShape(1)) - 1
    assert lengths[1:].count(PROBE_DRAFTS) <= 500 * PROBE_SHARE / (0.5 * loss)


def test_a_crowd_does_not_wait_for_the_first_probe_of_each() -> None:
    """Short answers would be over before the loss is made good."""
    controller, times = DraftLengthController(), Stairs(0.1, 1.0, 1, 0.0)
    crowd = StepShape(32, 0, 0, 32)
    for step in range(16):
        candidates = [Candidate(32 * (step // 8) + i, 10, 2, False) for i in range(32)]
        assert controller.choose(candidates, crowd, times) == [0] * 32


@pytest.mark.parametrize("num_requests", [1, 8, 32])
@pytest.mark.parametrize("accepts", [[0.0, 0.0], [0.25, 0.5]])
def test_probing_costs_hardly_anything(num_requests: int, accepts: list[float]) -> None:
    """Time per token, with drafts that never pay, over that without, after the first chance of each request."""
    controller, toss = DraftLengthController(), random.Random(2)
    times = Stairs(0.5, 0.5, 1, 0.0)
    candidates = [Candidate(i, 10, 2, False) for i in range(num_requests)]
    shape = StepShape(num_requests, 0, 0, num_requests)
    seconds = tokens = 0.0
    for step in range(1500):
        lengths = controller.choose(candidates, shape, times)
        if step >= 500:
            seconds += times.predict(StepShape(num_requests + sum(lengths)))
            tokens += num_requests
        for i, length in enumerate(lengths):
            accepted = 0
            while accepted < length and toss.random() < accepts[accepted]:
                accepted += 1
            tokens += accepted if step >= 500 else 0
            if length:
                controller.observe(i, length, accepted)
    plain = times.predict(shape) / num_requests
    assert seconds / tokens < 1.03 * plain


def test_the_length_stops_where_survival_falls() -> None:
    lengths = play(DraftLengthController(), [1.0, 1.0, 0.02, 0.5], Stairs(1, 0.3, 1, 0.0), 300)
    assert max(set(lengths[-100:]), key=lengths[-100:].count) == 2


def test_the_forecast_of_m_is_right_within_a_tenth() -> None:
    controller = DraftLengthController()
    play(controller, [0.8, 0.7, 0.6, 0.5], CHEAP, 2000)
    assert abs(controller.forecast.error) < 0.1
    assert controller.forecast.num_requests > 1000


def test_survival_is_the_product_of_shares() -> None:
    record = Record()
    for _ in range(200):
        record.add(3, 3)
    for _ in range(200):
        record.add(3, 1)
    first, second, third, fourth = record.survivals(4, 0.5)
    assert first == pytest.approx(1, abs=0.1)
    assert second == pytest.approx(0, abs=0.1)
    assert third <= second
    assert fourth <= third


def test_a_newcomer_begins_with_what_others_came_to() -> None:
    controller = DraftLengthController()
    play(controller, [0.0] * 4, CHEAP, 1500)
    controller.forget(7)
    newcomer = [Candidate(8, 10, 4, False)]
    assert controller.choose(newcomer, ALONE, CHEAP) == [PROBE_DRAFTS]
    controller.observe(8, PROBE_DRAFTS, 0)
    assert controller.choose(newcomer, ALONE, CHEAP) == [0]
    assert DraftLengthController().choose(newcomer, ALONE, CHEAP) == [4]


def test_a_forgotten_request_leaves_nothing() -> None:
    controller = DraftLengthController()
    controller.choose([Candidate(1, 10, 4, False)], ALONE, CHEAP)
    controller.forget(1)
    assert not controller._records
    assert not controller._pending
