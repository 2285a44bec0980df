"""The token-budget loop: sharing, preemption, refusal, aborts, failures."""

from __future__ import annotations

import itertools
import random

import pytest
from core_harness import FULL, FULL_AND_SLIDING, OLDEST_GIVES_WAY, Harness, answer_alone

from poise.core.output import KVGroupSpec
from poise.core.request import Request, RequestStatus
from poise.errors import InvalidRequestError


def assert_answers(harness: Harness, requests: list[Request]) -> None:
    for request in requests:
        outcome, alone = harness.outcomes[request.request_id], answer_alone(request)
        assert outcome.token_ids == alone.token_ids
        assert outcome.finish_reason == alone.finish_reason
        assert outcome.stop_reason == alone.stop_reason


# --- the loop -------------------------------------------------------------------------------------


def test_decodes_and_a_chunk_of_a_long_prompt_share_a_step() -> None:
    harness = Harness(max_num_batched_tokens=10)
    short = harness.add([1, 2, 3], max_tokens=8)
    first = harness.step()
    assert [(i.start, i.num_tokens, i.samples) for i in first.scheduled] == [(0, 3, True)]
    long = harness.add(list(range(20)), max_tokens=2)
    second = harness.step()
    assert [(i.request_id, i.start, i.num_tokens, i.samples) for i in second.scheduled] == [
        (short.request_id, 3, 1, True),
        (long.request_id, 0, 9, False),
    ]
    third = harness.step()
    assert [(i.start, i.num_tokens, i.samples) for i in third.scheduled] == [
        (4, 1, True),
        (9, 9, False),
    ]
    fourth = harness.step()
    assert [(i.start, i.num_tokens, i.samples) for i in fourth.scheduled] == [
        (5, 1, True),
        (18, 2, True),
    ]
    harness.drain()
    assert_answers(harness, [short, long])


@pytest.mark.parametrize(
    ("lengths", "num_steps"), [([5, 20, 10, 15, 10], 20), ([5] * 6, 10), ([], 0)]
)
def test_continuous_batching_on_three_slots(lengths: list[int], num_steps: int) -> None:
    harness = Harness(max_num_seqs=3)
    for i, length in enumerate(lengths):
        harness.add([i], max_tokens=length)
    assert harness.drain() == num_steps


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 7, 8, 9, 64])
@pytest.mark.parametrize("block_size", [1, 4, 8])
@pytest.mark.parametrize("groups", [FULL, FULL_AND_SLIDING])
def test_answers_do_not_depend_on_chunks_or_pages(
    chunk: int, block_size: int, groups: tuple[KVGroupSpec, ...]
) -> None:
    harness = Harness(
        groups=groups, max_num_batched_tokens=chunk, block_size=block_size, num_blocks=400
    )
    requests = [
        harness.add([1, 2, 3] * n, max_tokens=6, seed=n, prompt_logprobs=0 if n % 2 else None)
        for n in (1, 2, 5, 8, 5)
    ]
    harness.drain()
    assert_answers(harness, requests)


def test_times_and_counters() -> None:
    harness = Harness(max_num_seqs=1)
    first, second = harness.add([1, 2], max_tokens=2), harness.add([3, 4, 5], max_tokens=1)
    harness.drain()
    assert (first.arrival_time, first.first_scheduled_time, first.first_token_time) == (0, 1, 1)
    assert (second.arrival_time, second.first_scheduled_time, second.first_token_time) == (0, 3, 3)
    counters = harness.scheduler.stats().counters
    assert (counters.num_steps, counters.num_computed_prompt_tokens) == (3, 5)
    assert counters.num_output_tokens == 3


def test_a_running_request_holds_pages_in_the_stats() -> None:
    harness = Harness(num_blocks=8, block_size=4)
    harness.add([1] * 8, max_tokens=9)
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (1, 0, 6)
    assert stats.kv_cache_usage == 0.25


def test_a_stop_token_ends_the_answer_and_min_tokens_defers_it() -> None:
    harness = Harness()
    everything = list(range(1, 50))
    requests = [
        harness.add([5], max_tokens=9, seed=seed, stop_token_ids=everything, min_tokens=minimum)
        for seed, minimum in itertools.product(range(3), (0, 1, 4))
    ]
    harness.drain()
    assert_answers(harness, requests)
    assert {len(harness.outcomes[r.request_id].token_ids) for r in requests[2::3]} != {9}
    for request in requests:
        outcome = harness.outcomes[request.request_id]
        assert outcome.finish_reason == "stop"
        assert outcome.stop_reason == outcome.token_ids[-1]
        assert len(outcome.token_ids) > request.sampling.params.min_tokens


# --- sharing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [16, 20, 23, 64, 500])
@pytest.mark.parametrize("cap", [1, 4, 7, 1000])
def test_sixteen_simultaneous_cold_requests_compute_their_prefix_once(chunk: int, cap: int) -> None:
    harness = Harness(max_num_seqs=16, max_num_batched_tokens=chunk, num_blocks=200, cap=cap)
    prefix = [n % 50 for n in range(83)]  # 20 full blocks and 3 tokens
    requests = [harness.add([*prefix, 40 + i // 8, i], max_tokens=3, seed=i) for i in range(16)]
    harness.drain()
    assert_answers(harness, requests)
    counters = harness.scheduler.stats().counters
    # Twice eight prompts share block 20 as well, whose last token is the first of the suffix.
    assert counters.num_computed_prompt_tokens == 80 + 2 * 4 + 16 * 1
    assert [r.num_cached_tokens for r in requests] == [0, *[84] * 7, 80, *[84] * 7]


def test_a_block_can_be_hit_in_the_step_that_computes_it() -> None:
    harness = Harness(max_num_batched_tokens=64)
    first, second = harness.add([1] * 10, seed=1), harness.add([1] * 10, seed=2)
    output = harness.step()
    assert [(i.start, i.num_tokens) for i in output.scheduled] == [(0, 10), (8, 2)]
    assert output.new_requests[0].block_tables[0][:2] == output.new_requests[1].block_tables[0][:2]
    harness.drain()
    assert_answers(harness, [first, second])


def test_a_request_waits_for_a_block_in_progress_and_others_pass() -> None:
    harness = Harness(max_num_batched_tokens=12, max_num_seqs=4)
    owner = harness.add([1] * 30)
    harness.step()
    late_twin = harness.add([1] * 30)
    other = harness.add([2] * 3)
    second = harness.schedule()
    assert [i.request_id for i in second.scheduled] == [owner.request_id]  # budget spent
    harness.update(second, harness.executor.execute(second))
    third = harness.step()
    assert [(i.request_id, i.start, i.num_tokens) for i in third.scheduled] == [
        (owner.request_id, 24, 6),
        (late_twin.request_id, 28, 2),
        (other.request_id, 0, 3),
    ]
    harness.drain()
    assert_answers(harness, [owner, late_twin, other])


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_a_waiter_takes_over_when_the_owner_goes(how: str) -> None:
    harness = Harness(max_num_batched_tokens=8)
    owner = harness.add([1] * 30)
    waiter = harness.add([1] * 30, seed=5)
    harness.step()
    if how == "abort":
        harness.abort(owner)
    else:
        harness.executor.fail_next = True
        harness.step()
        harness.abort(owner)
    harness.drain()
    assert_answers(harness, [waiter])


def test_a_prompt_logprobs_request_computes_all_and_serves_others() -> None:
    harness = Harness(max_num_batched_tokens=8)
    harness.add([1] * 24, max_tokens=1)
    harness.drain()
    scored = harness.add([1] * 24 + [2] * 8, max_tokens=2, prompt_logprobs=0)
    harness.step()
    twin = harness.add([1] * 24 + [2] * 9, max_tokens=2)
    harness.drain()
    assert_answers(harness, [scored, twin])
    assert (scored.num_cached_tokens, twin.num_cached_tokens) == (0, 32)
    assert harness.scheduler.stats().counters.num_prefix_bypasses == 1


def test_answers_of_a_finished_request_are_hit_too() -> None:
    harness = Harness(block_size=4)
    first = harness.add([1] * 6, max_tokens=11)
    harness.drain()
    again = harness.add(first.token_ids, max_tokens=2)
    harness.drain()
    assert again.num_cached_tokens == 16  # 17 tokens, the last of them never computed
    assert_answers(harness, [first, again])


def test_the_prefix_of_an_aborted_request_survives() -> None:
    harness = Harness()
    first = harness.add([1] * 20)
    output = harness.schedule()
    result = harness.executor.execute(output)
    harness.abort(first)
    harness.update(output, result)
    second = harness.add([1] * 20)
    harness.drain()
    assert second.num_cached_tokens == 16


def test_prompt_logprobs_are_the_same_cold_and_warm() -> None:
    harness = Harness(max_num_batched_tokens=7)
    prompt = [n % 3 for n in range(22)]
    warm_up = harness.add(prompt)
    harness.drain()
    scored = [harness.add(prompt, prompt_logprobs=2), harness.add(prompt, prompt_logprobs=2)]
    harness.drain()
    cold = Harness(caching=False)
    reference = cold.add(prompt, prompt_logprobs=2)
    cold.drain()
    expected = cold.outcomes[reference.request_id].prompt_logprobs
    assert len(expected) == 21
    for request in scored:
        assert harness.outcomes[request.request_id].prompt_logprobs == expected
        assert request.num_cached_tokens == 0
    assert_answers(harness, [warm_up, *scored])


# --- too little memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [FULL, FULL_AND_SLIDING])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("oldest_gives_way", [False, True])
def test_preempted_requests_resume_exactly(
    groups: tuple[KVGroupSpec, ...], caching: bool, oldest_gives_way: bool
) -> None:
    config = {"policy": OLDEST_GIVES_WAY} if oldest_gives_way else {}
    harness = Harness(
        groups=groups,
        caching=caching,
        num_blocks=14 * len(groups),
        block_size=4,
        **config,  # type: ignore[arg-type]
    )
    requests = [
        harness.add([i] * 9, max_tokens=30, seed=i, logprobs=0, prompt_logprobs=i % 2 or None)
        for i in range(8)
    ]
    harness.drain()
    assert harness.scheduler.stats().counters.num_preemptions >= 3
    assert max(request.num_restarts for request in requests) > 0
    assert_answers(harness, requests)
    for request in requests[1::2]:
        positions = [e.token_id for e in harness.outcomes[request.request_id].prompt_logprobs]
        assert positions == [request.token_ids[0]] * 8


def test_the_last_admitted_is_preempted_and_comes_back_first() -> None:
    harness = Harness(num_blocks=8, block_size=4)
    first, second = harness.add([1] * 15, max_tokens=10), harness.add([2] * 15, max_tokens=10)
    harness.add([3] * 15, max_tokens=1)
    while second.status is not RequestStatus.PREEMPTED:
        harness.step()
    assert first.status is RequestStatus.RUNNING
    assert harness.scheduler.waiting[0] is second
    kept = second.output_token_ids
    assert kept
    harness.drain()
    assert second.output_token_ids[: len(kept)] == kept


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "names"),
    [
        (0, 5, ["prompt"]),
        (30, 21, ["30", "21", "51", "50"]),
        (51, 1, ["51", "50"]),
        (30, 15, ["30", "15", "45", "12", "10", "blocks of 4"]),
    ],
)
def test_what_can_never_fit_is_refused_and_the_next_one_works(
    num_prompt: int, max_tokens: int, names: list[str]
) -> None:
    harness = Harness(num_blocks=10, block_size=4, max_model_len=50)
    with pytest.raises(InvalidRequestError) as refusal:
        harness.add([1] * num_prompt, max_tokens=max_tokens)
    assert all(name in str(refusal.value) for name in names)
    assert "\n" not in str(refusal.value)
    fitting = harness.add([1] * 30, max_tokens=10)
    harness.drain()
    assert_answers(harness, [fitting])


def test_a_prompt_larger_than_the_pool_does_not_hold_up_short_ones() -> None:
    """A pool of 1k tokens, a context of 4k, a prompt of 2k, then ten short (vLLM issue 39734)."""
    harness = Harness(num_blocks=64, block_size=16, max_num_batched_tokens=512, max_model_len=4096)
    with pytest.raises(InvalidRequestError, match="2000 prompt tokens"):
        harness.add([1] * 2000, max_tokens=16)
    requests = [harness.add([i] * 20, max_tokens=4) for i in range(10)]
    harness.drain()
    assert_answers(harness, requests)


def test_a_tiny_pool_drains_a_crowd_of_long_requests() -> None:
    harness = Harness(num_blocks=6, block_size=2, max_num_seqs=30, max_num_batched_tokens=30)
    requests = [harness.add([i % 4] * (1 + i % 6), max_tokens=6, seed=i) for i in range(40)]
    harness.drain(max_steps=600)
    assert_answers(harness, requests)


# --- aborts, failures, broken rows ----------------------------------------------------------------


@pytest.mark.parametrize("state", ["queued", "mid-chunk", "in flight", "decoding", "preempted"])
def test_a_thousand_aborts_leave_the_pool_as_it_was(state: str) -> None:
    harness = Harness(num_blocks=12, block_size=4, max_num_batched_tokens=8)
    rng = random.Random(state)
    for _ in range(200):
        requests = [harness.add([rng.randrange(3)] * 18, max_tokens=20, seed=i) for i in range(5)]
        if state == "in flight":
            output = harness.schedule()
            result = harness.executor.execute(output)
            harness.abort(*requests)
            assert harness.update(output, result) == []
        steps = {"mid-chunk": 1, "decoding": 6, "preempted": 14}.get(state, 0)
        for _ in range(steps):
            harness.step()
        if state == "preempted":
            assert any(request.status is RequestStatus.PREEMPTED for request in requests)
        harness.abort(*requests)
        harness.abort(*requests)  # a second time is nothing
        harness.check_empty()
    last = harness.add([1] * 18)
    harness.drain()
    assert_answers(harness, [last])


def test_a_failed_step_is_recomputed_with_the_same_answers() -> None:
    harness = Harness(max_num_batched_tokens=16)
    requests = [harness.add([1] * 20 + [i], max_tokens=5, seed=i) for i in range(4)]
    for number in range(6):
        harness.executor.fail_next = number % 2 == 0
        harness.step()
    harness.drain()
    assert harness.scheduler.stats().counters.num_failed_steps == 3
    assert harness.scheduler.stats().counters.num_preemptions == 0
    assert_answers(harness, requests)


def test_a_failed_step_returns_its_requests_in_order_to_the_front() -> None:
    harness = Harness(max_num_seqs=2)
    first, second, third = (harness.add([i] * 5) for i in range(3))
    output = harness.schedule()
    assert harness.scheduler.fail_step(output) == [first, second]
    assert harness.scheduler.waiting == (first, second, third)
    harness.abort(first)
    harness.drain()
    assert_answers(harness, [second, third])


def test_a_broken_request_ends_alone_and_leaves_nothing_cached() -> None:
    harness = Harness(max_num_batched_tokens=8)
    broken, neighbour = harness.add([1] * 17), harness.add([2] * 9)
    harness.executor.broken = {broken.request_id}
    harness.drain()
    assert harness.outcomes[broken.request_id].finish_reason == "error"
    assert harness.outcomes[broken.request_id].token_ids == []
    assert_answers(harness, [neighbour])
    again, warm = harness.add([1] * 17), harness.add([2] * 9)
    harness.drain()
    assert (again.num_cached_tokens, warm.num_cached_tokens) == (0, 8)
    assert harness.scheduler.stats().counters.num_broken_requests == 1


def test_a_broken_request_aborted_in_flight_leaves_nothing_of_that_step_cached() -> None:
    harness = Harness()
    broken = harness.add([1] * 17)
    harness.executor.broken = {broken.request_id}
    output = harness.schedule()
    result = harness.executor.execute(output)
    harness.abort(broken)
    harness.update(output, result)
    again = harness.add([1] * 17)
    harness.drain()
    assert again.num_cached_tokens == 0


def test_a_step_looks_at_so_many_that_wait_for_others_and_stops() -> None:
    """40 copies of a prompt that is half computed: all wait for its blocks (found by random operations)."""
    harness = Harness(max_num_batched_tokens=8, max_num_seqs=64, num_blocks=200, cap=4)
    requests = [harness.add([1] * 30, max_tokens=1, seed=i) for i in range(40)]
    harness.step()
    assert harness.scheduler.stats().num_running == 1
    harness.drain()
    assert_answers(harness, requests)
