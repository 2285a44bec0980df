"""Drafts in the scheduler: what they may take, what becomes of it, and that nobody else notices."""

from __future__ import annotations

import pytest
from core_harness import FULL_AND_SLIDING, Harness, answer_alone

from poise.core.request import Request, RequestOwner
from poise.core.speculation import Speculation
from poise.core.step_time import StepCost, StepTimeModel
from poise.core.tenant import Tenant, TenantTable


def drafts(k: int, method: str = "ngram") -> Speculation:
    return Speculation(method, k)  # type: ignore[arg-type]


def assert_answer(harness: Harness, request: Request) -> None:
    outcome, alone = harness.outcomes[request.request_id], answer_alone(request)
    assert (outcome.token_ids, outcome.finish_reason) == (alone.token_ids, alone.finish_reason)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_accepted_drafts_save_steps_and_change_nothing(method: str) -> None:
    plain, drafting = Harness(), Harness()
    plain.add([1, 2, 3], max_tokens=40)
    request = drafting.add([1, 2, 3], max_tokens=40, speculation=drafts(4, method))
    assert drafting.drain() < plain.drain() == 40
    assert_answer(drafting, request)
    counters = drafting.scheduler.draft_counters
    accepted = sum(n for _, _, n in drafting.drafter.observed)
    assert counters.num_accepted_tokens == accepted == request.num_accepted_tokens > 0
    assert counters.num_draft_tokens == request.num_drafted_tokens
    assert sum(counters.accepted_per_position) == accepted
    assert counters.accepted_per_position == sorted(counters.accepted_per_position, reverse=True)
    assert request.num_steps + accepted == 40


def test_no_draft_goes_past_what_may_be_answered() -> None:
    harness = Harness(max_model_len=8)
    request = harness.add([1, 2, 3], max_tokens=5, speculation=drafts(30))
    while harness.scheduler.has_unfinished:
        for item in harness.step().scheduled:
            assert item.start + item.num_rows < 8
            assert item.num_drafts < 5
    assert_answer(harness, request)


def test_rows_for_drafts_are_those_that_nobody_else_needs() -> None:
    harness = Harness(max_num_batched_tokens=8, caching=False)
    request = harness.add([1], max_tokens=60, speculation=drafts(30))
    harness.step()
    harness.add(list(range(20)), max_tokens=1)
    for _ in range(2):
        output = harness.step()
        assert output.num_tokens == 8
        [mine] = [i for i in output.scheduled if i.request_id == request.request_id]
        assert mine.num_drafts == 0  # the prompt takes 7
    output = harness.step()  # 6 of the prompt are left
    assert output.num_tokens <= 8
    harness.drain()
    assert_answer(harness, request)


def test_drafts_keep_the_target_for_gaps() -> None:
    cost = StepCost(per_step=1.0, per_token=0.1, per_key=0.0, per_sampled=0.0)
    for target, most in ((1.35, 2), (1.05, 0), (None, 4)):
        harness = Harness(step_time=StepTimeModel(cost), target_itl_seconds=target)
        request = harness.add([1, 2, 3], max_tokens=20, speculation=drafts(4))
        harness.scheduler._learn = lambda output, now: None  # type: ignore[method-assign]
        counts = []
        while harness.scheduler.has_unfinished:
            counts += [item.num_drafts for item in harness.step().scheduled if item.start > 2]
        assert max(counts) == most
        assert_answer(harness, request)


def test_a_prompt_that_is_not_yet_computed_drafts_nothing() -> None:
    harness = Harness(max_num_batched_tokens=8)
    harness.add(list(range(20)), max_tokens=9, speculation=drafts(4))
    harness.add([7] * 5, max_tokens=9, speculation=drafts(4), prompt_logprobs=0)
    while harness.scheduler.has_unfinished:
        for item in harness.step().scheduled:
            assert item.num_drafts == 0 or item.samples
            if item.request_id == 1 and item.start == 0:
                assert item.num_drafts == 0  # its prompt's logprobs are not told yet


def test_a_prompt_that_is_scored_again_drafts_nothing() -> None:
    harness = Harness(caching=False)
    request = harness.add([1, 2, 3, 4], max_tokens=20, speculation=drafts(4), prompt_logprobs=0)
    harness.step()
    assert not request.needs_prompt_logprobs
    harness.executor.fail_next = True
    harness.step()
    again, later = harness.step(), harness.step()
    assert (again.scheduled[0].start, again.scheduled[0].num_drafts) == (0, 0)
    assert later.scheduled[0].num_drafts > 0
    harness.drain()
    assert_answer(harness, request)


def test_drafts_preempt_nobody_and_evict_nothing() -> None:
    """Ten pages: three of cached content, seven that two answers fill to the last. Without drafts none is evicted."""
    for speculation in (None, drafts(6)):
        harness = Harness(num_blocks=10, block_size=4)
        harness.add([9] * 12, max_tokens=1)
        harness.drain()
        requests = [
            harness.add([i] * 4, max_tokens=n, speculation=speculation)
            for i, n in ((1, 9), (2, 13))
        ]
        harness.drain()
        for request in requests:
            assert_answer(harness, request)
        assert harness.scheduler.stats().counters.num_preemptions == 0
        again = harness.add([9] * 12, max_tokens=1)
        harness.drain()
        assert again.num_cached_tokens == 8  # all that a prompt of 12 may take


def test_pages_of_rejected_drafts_are_free_after_the_step() -> None:
    harness = Harness(block_size=1, caching=False)
    request = harness.add([1, 2, 3], max_tokens=40, speculation=drafts(6))
    while harness.scheduler.has_unfinished:
        harness.step()
        if request.finish_reason is None:
            assert request.num_blocks == request.num_computed_tokens == request.num_tokens - 1
    assert any(accepted < number for _, number, accepted in harness.drafter.observed)


def test_blocks_of_accepted_drafts_are_found_later_those_of_rejected_ones_never() -> None:
    harness = Harness(block_size=2, groups=FULL_AND_SLIDING, num_blocks=200)
    request = harness.add([1, 2, 3], max_tokens=31, speculation=drafts(6))
    harness.drain()
    cache = harness.kv_cache._cache
    assert cache is not None
    registered = {entry.token_ids for entry in cache._entry_by_block.values() if not entry.group}
    known = request.token_ids
    computed = [tuple(known[i : i + 2]) for i in range(0, len(known) - 2, 2)]
    assert registered == set(computed)
    again = harness.add(request.token_ids, max_tokens=2)
    harness.drain()
    assert again.num_cached_tokens == 32
    assert_answer(harness, again)


def test_the_end_of_an_answer_drops_the_rest_of_the_run() -> None:
    for seed in range(20):
        harness = Harness()
        request = harness.add(
            [1, 2], max_tokens=30, seed=seed, stop_token_ids=tuple(range(8)), speculation=drafts(6)
        )
        harness.drain()
        assert_answer(harness, request)
        assert request.num_accepted_tokens <= request.num_output_tokens
        assert harness.scheduler.stats().counters.num_output_tokens == request.num_output_tokens


def test_a_reader_that_stops_inside_a_run_leaves_no_trace_of_the_rest() -> None:
    harness = Harness(block_size=2)
    request = harness.add([1, 2, 3], max_tokens=60, speculation=drafts(6))
    run = 0
    while run < 4:
        output = harness.schedule()
        result = harness.executor.execute(output)
        harness.update(output, result)
        run = len(result.token_ids[0])
    before = request.num_output_tokens
    harness.scheduler.end_at(0, before - 2)
    harness.scheduler.check_invariants()
    assert request.num_output_tokens == before - 2
    assert harness.scheduler.stats().counters.num_output_tokens == before - 2
    cache = harness.kv_cache._cache
    assert cache is not None
    longest = max(
        len(harness.kv_cache.lookup(probe).blocks[0]) * 2  # type: ignore[union-attr]
        for probe in [Request.create(9, [*request.token_ids, 0, 0, 0], request.sampling, 1, 0.0)]
    )
    assert longest == (request.num_tokens - 1) // 2 * 2


def test_drafts_keep_a_tenants_quota() -> None:
    table = TenantTable({"a": Tenant("a", kv_quota=0.5)})
    harness = Harness(num_blocks=20, block_size=1, tenants=table)
    request = harness.add(
        [1, 2, 3], max_tokens=7, speculation=drafts(6), owner=RequestOwner(tenant="a")
    )
    while harness.scheduler.has_unfinished:
        output = harness.schedule()
        assert harness.scheduler.holdings.tenant("a").num_blocks <= 10
        harness.update(output, harness.executor.execute(output))
    assert_answer(harness, request)


def test_a_request_that_its_drafts_spoil_goes_on_without() -> None:
    harness = Harness(block_size=2)
    first = harness.add([1, 2, 3, 4, 5], max_tokens=12, speculation=drafts(5))
    harness.executor.broken.add(first.request_id)
    output = harness.schedule()
    assert output.scheduled[0].num_drafts > 0
    assert harness.update(output, harness.executor.execute(output)) == []
    assert (first.num_computed_tokens, first.num_blocks) == (0, 0)
    sharer = Request.create(9, [1, 2, 3, 4, 5], first.sampling, 1, 0.0)
    assert harness.kv_cache.lookup(sharer) is None  # what the step wrote can't be found
    harness.executor.broken.clear()
    while harness.scheduler.has_unfinished:
        assert all(item.num_drafts == 0 for item in harness.step().scheduled)
    assert_answer(harness, first)
    second = harness.add([6, 7], max_tokens=12, speculation=drafts(5))
    harness.executor.broken.add(second.request_id)
    harness.drain()
    assert harness.outcomes[second.request_id].finish_reason == "error"


def test_what_others_take_from_a_step_is_not_put_at_risk_by_drafts() -> None:
    """The second request is to hit the block that the first one's prompt fills in the same step."""
    harness = Harness(block_size=4, max_num_batched_tokens=40)
    harness.add([1, 2, 3, 4, 5], max_tokens=9, speculation=drafts(4))
    harness.add([1, 2, 3, 4, 6, 7], max_tokens=9, speculation=drafts(4))
    output = harness.step()
    first, second = output.scheduled
    assert second.start == 4
    assert first.num_drafts == 0
    assert second.num_drafts > 0
    harness.drain()


def test_a_step_that_failed_or_was_left_keeps_no_page() -> None:
    harness = Harness(block_size=2)
    failing = harness.add([1, 2, 3], max_tokens=20, speculation=drafts(5))
    leaving = harness.add([4, 5, 6], max_tokens=20, speculation=drafts(5))
    harness.step()
    harness.executor.fail_next = True
    harness.step()
    output = harness.schedule()
    result = harness.executor.execute(output)
    harness.abort(leaving)
    harness.update(output, result)
    harness.drain()
    assert_answer(harness, failing)
