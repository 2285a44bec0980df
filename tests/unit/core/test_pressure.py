"""Too few pages: watermark, victims, protection from thrashing, progress."""

from __future__ import annotations

import pytest
from core_harness import Harness, answer_alone
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.core.policy import FAIR, POLICIES, PRIORITY, Policy
from poise.core.request import Request, RequestOwner, RequestStatus


def assert_answers(requests: list[Request]) -> None:
    for request in requests:
        assert request.output_token_ids == answer_alone(request).token_ids


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_pool_of_a_twentieth_of_the_need_serves_everybody(policy: Policy) -> None:
    """40 requests of 40 tokens need 400 pages; there are 20."""
    harness = Harness(
        num_blocks=20, block_size=4, max_num_seqs=40, max_num_batched_tokens=40, policy=policy
    )
    requests = [
        harness.add(
            [i % 7] * 10, max_tokens=30, seed=i, owner=RequestOwner("ab"[i % 2], priority=i % 3)
        )
        for i in range(40)
    ]
    harness.drain(max_steps=3000)
    assert_answers(requests)


def test_fcfs_under_pressure_finishes_in_order_of_arrival() -> None:
    harness = Harness(num_blocks=20, block_size=4, max_num_seqs=40, max_num_batched_tokens=40)
    requests = [harness.add([i] * 10, max_tokens=30, seed=i) for i in range(20)]
    harness.drain()
    ends = [r.timeline.events[-1].time for r in requests]
    assert ends == sorted(ends)


def test_the_watermark_keeps_pages_for_those_that_run() -> None:
    harness = Harness(num_blocks=20, block_size=4, caching=False, watermark=0.25)
    first, second = harness.add([1] * 40, max_tokens=9), harness.add([2] * 24, max_tokens=2)
    harness.step()
    harness.step()  # ten pages are held, six are needed: 4 would stay, fewer than 5
    assert (first.status, second.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
    assert second.timeline.last is not None
    assert second.timeline.last.fields == {"because": "kv_blocks"}
    harness.drain()
    assert_answers([first, second])


def test_the_watermark_does_not_keep_out_a_lone_request() -> None:
    harness = Harness(num_blocks=10, block_size=4, watermark=0.9)
    request = harness.add([1] * 36, max_tokens=4)
    harness.step()
    assert request.status is RequestStatus.RUNNING


def run_until_preemption(policy: Policy, owners: list[RequestOwner]) -> list[Request]:
    harness = Harness(num_blocks=16, block_size=4, caching=False, policy=policy)
    requests = [harness.add([i] * 12, max_tokens=30, owner=o) for i, o in enumerate(owners)]
    while not any(r.num_restarts for r in requests):
        harness.step()
    return [r for r in requests if r.num_restarts]


def test_the_victim_is_the_least_urgent() -> None:
    owners = [RequestOwner(priority=p) for p in (0, 7, 1, 3)]
    [victim] = run_until_preemption(PRIORITY, owners)
    assert victim.priority == 7


def test_the_victim_is_of_the_tenant_that_was_served_most() -> None:
    owners = [RequestOwner(t) for t in ("greedy", "greedy", "greedy", "modest")]
    [victim] = run_until_preemption(FAIR, owners)
    assert victim.tenant == "greedy"
    assert victim.request_id == 2


def test_the_victim_has_least_work_to_lose() -> None:
    harness = Harness(
        num_blocks=20, block_size=4, caching=False, policy=PRIORITY, max_num_batched_tokens=64
    )
    oldest = harness.add([1] * 8, max_tokens=60)
    long = harness.add([2] * 40, max_tokens=30, owner=RequestOwner(priority=1))
    short = harness.add([3] * 16, max_tokens=30, owner=RequestOwner(priority=1))
    while not (long.num_restarts or short.num_restarts):
        harness.step()
    assert (oldest.num_restarts, long.num_restarts, short.num_restarts) == (0, 0, 1)


def test_one_that_was_preempted_often_is_protected() -> None:
    """The policy's favourite victim is left alone from the third time on, while there is another."""
    favourite = Policy(
        "always the second", lambda request: request.request_id, lambda running, served: 0
    )
    harness = Harness(
        num_blocks=14, block_size=4, caching=False, policy=favourite, num_preemptions_to_protect=2
    )
    requests = [harness.add([i] * 10, max_tokens=40, seed=i) for i in range(6)]
    while harness.scheduler.has_unfinished:
        restarts = {r.request_id: r.num_restarts for r in requests}
        running = {r.request_id for r in harness.scheduler.running[1:]}
        harness.step()
        for victim in requests:
            if victim.num_restarts > restarts[victim.request_id] > 1:  # a protected one was taken
                assert all(restarts[i] > 1 for i in running)
    assert_answers(requests)
    assert max(r.num_restarts for r in requests) >= 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 24)), min_size=1, max_size=25),
    st.integers(12, 20),
    st.sampled_from(list(POLICIES.values())),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_everybody_finishes_in_any_pool_that_holds_the_largest(
    sizes: list[tuple[int, int]], num_blocks: int, policy: Policy, protect: int, watermark: float
) -> None:
    harness = Harness(
        num_blocks=num_blocks,
        block_size=4,
        policy=policy,
        max_num_seqs=30,
        num_preemptions_to_protect=protect,
        watermark=watermark,
    )
    requests = [
        harness.add([i % 3] * prompt, max_tokens=output, seed=i, owner=RequestOwner("abc"[i % 3]))
        for i, (prompt, output) in enumerate(sizes)
    ]
    harness.drain(max_steps=25 * 50)
    assert_answers(requests)
