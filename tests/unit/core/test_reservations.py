"""Reserved pools: guaranteed, lent while idle, taken back within one step; quotas of pages."""

from __future__ import annotations

import pytest
from core_harness import FULL_AND_SLIDING, Harness, answer_alone

from poise.core.limits import Limits
from poise.core.policy import FAIR, FCFS, POLICIES, Policy
from poise.core.request import Request, RequestOwner, RequestStatus
from poise.core.reservations import Reservations
from poise.core.simulation import Arrival, Hardware, Outcome, Simulation
from poise.core.step_time import StepCost, StepTimeModel
from poise.core.tenant import Share, Tenant, TenantTable
from poise.errors import ConfigError, InvalidRequestError

LIGHT, HEAVY = RequestOwner("light"), RequestOwner("heavy")


def reserved(**share: float) -> TenantTable:
    return TenantTable({"light": Tenant("light", reserved=Share(**share))})


def assert_answers(requests: list[Request]) -> None:
    for request in requests:
        assert request.output_token_ids == answer_alone(request).token_ids


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_reserved_sequence_is_taken_back_within_one_step(policy: Policy) -> None:
    harness = Harness(max_num_seqs=4, policy=policy, tenants=reserved(sequences=0.25))
    heavy = [harness.add([i] * 3, max_tokens=40, owner=HEAVY) for i in range(8)]
    for _ in range(5):
        harness.step()
    assert [r.status for r in heavy[:4]] == [RequestStatus.RUNNING] * 4  # lent while idle
    light = harness.add([9] * 3, max_tokens=2, owner=LIGHT)
    output = harness.step()
    assert light.request_id in {item.request_id for item in output.scheduled}
    assert heavy[3].status is RequestStatus.PREEMPTED  # the newest borrower
    [event] = [e for e in heavy[3].timeline.events if e.kind == "preempted"]
    assert event.fields == {"because": "reservation", "by": light.request_id}
    harness.drain()
    assert_answers([*heavy, light])


def test_what_is_beyond_the_share_waits_like_everybody_else() -> None:
    harness = Harness(max_num_seqs=4, tenants=reserved(sequences=0.25))
    for i in range(4):
        harness.add([i] * 3, max_tokens=40, owner=HEAVY)
    harness.step()
    first, second = (harness.add([9, i], max_tokens=5, owner=LIGHT) for i in range(2))
    harness.step()
    assert (first.status, second.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)


def test_the_oldest_request_is_never_taken_from() -> None:
    table = TenantTable({n: Tenant(n, reserved=Share(sequences=0.5)) for n in ("light", "other")})
    harness = Harness(max_num_seqs=2, tenants=table)
    heavy = [harness.add([i], max_tokens=9, owner=HEAVY) for i in range(2)]
    harness.step()
    light = harness.add([7], max_tokens=30, owner=LIGHT)
    other = harness.add([8], max_tokens=2, owner=RequestOwner("other"))
    harness.step()
    assert [r.status.value for r in (*heavy, light, other)] == [
        "running", "preempted", "running", "waiting",
    ]  # fmt: skip
    harness.drain()
    assert_answers([*heavy, light, other])


def test_reserved_tokens_reach_a_prompt_behind_a_longer_one() -> None:
    harness = Harness(max_num_batched_tokens=20, tenants=reserved(sequences=0.5, tokens=0.4))
    heavy = harness.add([1] * 200, max_tokens=1, owner=HEAVY)
    harness.step()
    light = harness.add([2] * 16, max_tokens=1, owner=LIGHT)
    steps = [harness.step(), harness.step()]
    rows = [{i.request_id: i.num_tokens for i in step.scheduled} for step in steps]
    assert rows[0][heavy.request_id] == 20 - rows[0][light.request_id]
    assert all(row[light.request_id] >= 6 for row in rows)
    assert sum(row[light.request_id] for row in rows) == 16
    harness.drain()
    assert_answers([heavy, light])


def test_the_oldest_prompt_gets_a_row_beside_decodes_and_reservations() -> None:
    a = Tenant("a", reserved=Share(sequences=0.5))
    b = Tenant("b", reserved=Share(0.2, 0.5, 0.5))
    table = TenantTable({"a": a, "b": b}, {"batch": Share(0.1, 0.1, 0.2)})
    harness = Harness(
        num_blocks=64, block_size=1, max_num_seqs=5, max_num_batched_tokens=5, tenants=table
    )
    requests = [
        harness.add(prompt, max_tokens, owner=RequestOwner(tenant, service_class))  # type: ignore[arg-type]
        for prompt, max_tokens, tenant, service_class in (
            ([1, 0, 0, 0], 1, "a", "interactive"),
            ([1], 2, "a", "interactive"),
            ([1], 1, "a", "interactive"),
            ([1], 2, "b", "interactive"),
            ([1], 1, "a", "interactive"),
            ([3, 0, 0], 1, "a", "batch"),
        )
    ]
    harness.drain()  # asserts it of every step
    assert_answers(requests)


def test_reserved_tokens_are_lent_while_nobody_wants_them() -> None:
    harness = Harness(max_num_batched_tokens=20, tenants=reserved(sequences=0.5, tokens=0.4))
    harness.add([1] * 200, max_tokens=1, owner=HEAVY)
    assert harness.step().num_tokens == 20


@pytest.mark.parametrize("groups", [None, FULL_AND_SLIDING], ids=["full", "full and sliding"])
def test_reserved_pages_are_taken_back_within_one_step(groups: object) -> None:
    options = {} if groups is None else {"groups": groups}
    harness = Harness(
        num_blocks=40 if groups is None else 80,
        block_size=4,
        caching=False,
        tenants=reserved(sequences=0.5, blocks=0.25),
        **options,  # type: ignore[arg-type]
    )
    heavy = [harness.add([i] * 40, max_tokens=20, owner=HEAVY) for i in range(3)]
    while sum(r.num_output_tokens > 0 for r in heavy) < 2:
        harness.step()
    light = harness.add([9] * 30, max_tokens=4, owner=LIGHT)
    output = harness.step()
    assert light.request_id in {item.request_id for item in output.scheduled}
    harness.drain()
    assert_answers([*heavy, light])


def test_a_class_may_own_a_pool() -> None:
    table = TenantTable(reserved_by_class={"interactive": Share(sequences=0.5)})
    harness = Harness(max_num_seqs=4, tenants=table)
    batch = [
        harness.add([i], max_tokens=30, owner=RequestOwner(service_class="batch")) for i in range(6)
    ]
    harness.step()
    chats = [harness.add([i, 5], max_tokens=3) for i in range(3)]
    harness.step()
    assert [r.status.value for r in chats] == ["running", "running", "waiting"]
    assert [r.status.value for r in batch[:4]] == ["running", "running", "preempted", "preempted"]


def test_more_than_there_is_can_not_be_promised() -> None:
    table = TenantTable(
        {"light": Tenant("light", reserved=Share(blocks=0.6))}, {"batch": Share(blocks=0.5)}
    )
    with pytest.raises(ConfigError, match=r"blocks add up to 1\.1"):
        Reservations(table, num_sequences=4, num_tokens=10, num_blocks=10)
    harness = Harness()
    with pytest.raises(ConfigError):
        harness.scheduler.set_tenants(table)
    harness.add([1])
    harness.drain()


# --- quotas ---------------------------------------------------------------------------------------


def quota(part: float) -> TenantTable:
    return TenantTable({"heavy": Tenant("heavy", kv_quota=part)})


@pytest.mark.parametrize("policy", [FCFS, FAIR], ids=["fcfs", "fair"])
def test_a_tenant_never_holds_more_pages_than_its_quota(policy: Policy) -> None:
    harness = Harness(num_blocks=40, caching=False, policy=policy, tenants=quota(0.5))
    heavy = [harness.add([i] * 10, max_tokens=30, owner=HEAVY) for i in range(6)]
    other = [harness.add([i] * 10, max_tokens=30, owner=LIGHT) for i in range(3)]
    most = 0
    while harness.scheduler.has_unfinished:
        harness.step()
        most = max(most, harness.scheduler.holdings.tenant("heavy").num_blocks)
    assert 15 <= most <= 20
    assert other[0].num_restarts == 0
    assert_answers(heavy + other)


def test_others_pass_a_tenant_at_its_quota() -> None:
    harness = Harness(num_blocks=40, caching=False, tenants=quota(0.25), max_num_batched_tokens=64)
    for i in range(40):
        harness.add([i] * 16, max_tokens=20, owner=HEAVY)
    light = harness.add([1] * 16, max_tokens=2, owner=LIGHT)
    harness.step()
    assert light.status is RequestStatus.RUNNING


def test_what_never_fits_the_quota_is_refused_at_once() -> None:
    harness = Harness(num_blocks=40, tenants=quota(0.25))
    with pytest.raises(InvalidRequestError, match="this tenant may hold 10"):
        harness.add([1] * 30, max_tokens=11, owner=HEAVY)
    harness.add([1] * 30, max_tokens=11, owner=LIGHT)
    assert harness.scheduler.admission.decisions[("refused", "never_fits")] == 1


def test_a_smaller_quota_does_not_strand_what_is_queued() -> None:
    harness = Harness(num_blocks=40, tenants=quota(1.0))
    requests = [harness.add([i] * 30, max_tokens=11, owner=HEAVY) for i in range(3)]
    harness.step()
    harness.scheduler.set_tenants(quota(0.1))
    harness.drain()
    assert_answers(requests)


def test_page_steps_are_counted_by_tenant() -> None:
    harness = Harness(block_size=4, max_num_batched_tokens=64)
    harness.add([1] * 7, max_tokens=4, owner=LIGHT)  # 2 pages for the prompt, 3 from position 8 on
    harness.add([2] * 30, max_tokens=1, owner=HEAVY)
    harness.drain()
    holdings = harness.scheduler.holdings
    assert holdings.tenant("light").num_block_steps == 2 + 2 + 3 + 3
    assert holdings.tenant("heavy").num_block_steps == 8


# --- in virtual time ------------------------------------------------------------------------------

MACHINE = StepTimeModel(StepCost(per_step=8e-3, per_token=1e-3, per_key=2e-8, per_sampled=2e-4))


def light_beside_heavy(
    policy: Policy, table: TenantTable, flood: bool
) -> tuple[list[float], float]:
    """(the light tenant's times to first token, the longest step) beside one with 100 times its load."""
    run = Simulation(
        Hardware(4000, caching=False, truth=MACHINE),
        Limits(16, 256, 10_000),
        policy=policy,
        tenants=table,
    )
    if flood:
        for _ in range(200):
            run.add(Arrival(0.0, 1000, 64, owner=HEAVY))
    light: list[Outcome] = []
    steps = []
    while len(light) < 20 or not all(outcome.token_times for outcome in light):
        if len(light) < 20 and run.clock.now() >= 2.0 * len(light):
            light.append(run.add(Arrival(2.0 * len(light), 16, 64, owner=LIGHT)))
        before = run.clock.now()
        if not run.step().scheduled:
            run.clock.advance(0.01)
            continue
        steps.append(run.clock.now() - before)
    return sorted(outcome.time_to_first_token for outcome in light), max(steps[16:])


def test_a_light_tenant_with_a_share_hardly_notices_one_that_floods() -> None:
    """p95 of its first token: solo, three loaded steps and one preemption, which costs no step of its own."""
    solo, _ = light_beside_heavy(FCFS, reserved(sequences=0.1, tokens=0.1, blocks=0.1), flood=False)
    times, step = light_beside_heavy(
        FAIR, reserved(sequences=0.1, tokens=0.1, blocks=0.1), flood=True
    )
    assert times[18] <= solo[18] + 3 * step
    for policy in (FCFS, FAIR):  # without a share it waits for the first slot that gets free
        waits, _ = light_beside_heavy(policy, TenantTable(), flood=True)
        assert waits[18] > 10 * times[18]


def test_who_was_admitted_in_a_step_is_not_taken_from_in_it() -> None:
    """A pool without blocks of its own, then one that takes blocks back (found by random operations)."""
    table = TenantTable(
        {
            "a": Tenant("a", reserved=Share(sequences=0.25)),
            "b": Tenant("b", reserved=Share(sequences=0.25, blocks=0.5)),
        }
    )
    harness = Harness(
        max_num_seqs=4, tenants=table, num_blocks=20, caching=False, max_num_batched_tokens=100
    )
    heavy = harness.add([1] * 32, max_tokens=9, owner=HEAVY)
    harness.step()
    a = harness.add([2] * 24, max_tokens=4, owner=RequestOwner("a"))
    b = harness.add([3] * 28, max_tokens=4, owner=RequestOwner("b"))
    harness.step()
    assert [r.status.value for r in (heavy, a, b)] == ["running", "running", "waiting"]
    harness.step()
    assert [r.status.value for r in (heavy, a, b)] == ["running", "preempted", "running"]
    harness.drain()
    assert_answers([heavy, a, b])
