"""A step's tokens: rows set aside for decoding requests, target ITL, partial prefills, long prompts."""

from __future__ import annotations

from core_harness import Harness, answer_alone

from poise.core.limits import Limits
from poise.core.request import RequestStatus
from poise.core.simulation import Arrival, Hardware, Outcome, Simulation
from poise.core.step_budget import LEAST_PREFILL
from poise.core.step_time import StepCost, StepTimeModel

MACHINE = StepCost(per_step=8e-3, per_token=1e-3, per_key=2e-8, per_sampled=2e-4)
"""A small model on two cores, roughly: 16 decoding requests take 27 ms a step, 512 tokens half a second."""


def long_prompt_among_sixteen(target: float | None) -> tuple[Outcome, list[Outcome], float]:
    """(the long one, the sixteen, tokens per second over the window) in virtual time."""
    truth = StepTimeModel(MACHINE)
    run = Simulation(
        Hardware(3000, truth=truth),
        Limits(64, 512, 10_000, target_itl_seconds=target),
        step_time=StepTimeModel(StepCost(4e-3, 4e-4, 1e-8, 1e-4)),  # wrong by half, to begin with
    )
    streams = [run.add(Arrival(0.0, 2000, 20)) for _ in range(16)]
    for _ in range(50):
        run.step()
    begin = run.clock.now()
    long = run.add(Arrival(begin, 1, 7000))
    num_before = sum(len(stream.token_times) for stream in streams)
    while not long.token_times:
        run.step()
    num_tokens = 7000 + sum(len(stream.token_times) for stream in streams) - num_before
    return long, streams, num_tokens / (run.clock.now() - begin)


def gaps_during(long: Outcome, streams: list[Outcome]) -> list[float]:
    """Inter-token gaps of the streams while the long prompt was computed, sorted."""
    begin, end = long.arrival.time, long.token_times[0]
    return sorted(
        after - before
        for stream in streams
        for before, after in zip(stream.token_times, stream.token_times[1:])
        if begin <= before <= end
    )


def test_a_target_keeps_the_streams_going_while_a_long_prompt_is_computed() -> None:
    free, free_streams, free_rate = long_prompt_among_sixteen(None)
    held, held_streams, held_rate = long_prompt_among_sixteen(0.04)
    stalled, flowing = gaps_during(free, free_streams), gaps_during(held, held_streams)
    assert stalled[len(stalled) // 2] > 0.4  # the stall, without a target
    assert flowing[int(len(flowing) * 0.99)] <= 2 * 0.04
    assert flowing[len(flowing) // 2] <= 0.041  # 12 prompt tokens fit beside 16 streams
    assert held_rate < free_rate  # what it costs; the 2-core figures are in docs/SCHEDULING.md


def test_a_prompt_gets_on_even_if_the_streams_alone_miss_the_target() -> None:
    long, streams, _ = long_prompt_among_sixteen(0.001)
    num_steps = len(gaps_during(long, streams)) / 16
    assert num_steps == -(-7000 // LEAST_PREFILL)


def test_no_target_counts_where_nobody_decodes() -> None:
    harness = Harness(max_num_batched_tokens=30, target_itl_seconds=1e-6)
    harness.add([1] * 100, max_tokens=1)
    assert harness.step().num_tokens == 30


def test_a_row_is_set_aside_for_every_decoding_request() -> None:
    """An older prompt may not take the tokens of streams that were admitted after it."""
    harness = Harness(max_num_batched_tokens=8, max_num_seqs=8, max_num_partial_prefills=2)
    streams = [harness.add([i], max_tokens=30) for i in range(3)]
    harness.step()
    long = harness.add([7] * 60, max_tokens=2)
    for _ in range(9):
        rows = {i.request_id: i.num_tokens for i in harness.step().scheduled}
        assert rows == {**dict.fromkeys(range(3), 1), long.request_id: 5}
    assert all(stream.status is RequestStatus.RUNNING for stream in streams)


def test_a_short_prompt_passes_a_long_one_within_the_threshold() -> None:
    harness = Harness(max_num_batched_tokens=20, long_prefill_token_threshold=8)
    long = harness.add([1] * 100, max_tokens=1)
    assert harness.step().num_tokens == 20  # alone, a long prompt takes all
    short = harness.add([2] * 10, max_tokens=3)
    rows = {i.request_id: i.num_tokens for i in harness.step().scheduled}
    assert rows == {long.request_id: 8, short.request_id: 8}
    harness.step()
    assert short.num_output_tokens == 1
    harness.drain()
    assert [r.output_token_ids for r in (long, short)] == [
        answer_alone(r).token_ids for r in (long, short)
    ]


def test_without_a_threshold_the_short_one_waits() -> None:
    harness = Harness(max_num_batched_tokens=20)
    harness.add([1] * 100, max_tokens=1)
    harness.step()
    short = harness.add([2] * 10, max_tokens=3)
    for _ in range(4):
        harness.step()
    assert short.status is RequestStatus.WAITING


def test_half_computed_prompts_are_capped_and_short_ones_pass() -> None:
    harness = Harness(
        max_num_batched_tokens=32, long_prefill_token_threshold=8, max_num_partial_prefills=2
    )
    long = [harness.add([i] * 60, max_tokens=1) for i in range(3)]
    short = harness.add([7] * 5, max_tokens=1)
    rows = {i.request_id: i.num_tokens for i in harness.step().scheduled}
    assert rows == {long[0].request_id: 8, long[1].request_id: 8, short.request_id: 5}
    assert long[2].timeline.last is not None
    assert long[2].timeline.last.fields == {"because": "partial_prefills"}
    harness.drain()
