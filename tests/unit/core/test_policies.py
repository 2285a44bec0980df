"""Who goes first under each policy: closed forms, bounds, and brute-force twins."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from core_harness import Harness, answer_alone
from hypothesis import given
from hypothesis import strategies as st

from poise.core.fairness import OUTPUT_WEIGHT, PROMPT_WEIGHT, ServiceCounters
from poise.core.limits import Limits
from poise.core.policy import AGEING_SECONDS, FAIR, MOST_LEVELS, POLICIES, PRIORITY, STATIC
from poise.core.request import Request, RequestOwner
from poise.core.simulation import Arrival, Hardware, Outcome, Simulation, simulate
from poise.core.step_time import StepCost, StepTimeModel
from poise.core.tenant import NO_TENANTS, Tenant, TenantTable
from poise.core.waiting_queue import WaitingQueue
from poise.planner.schedule import static

UNIT_STEPS = StepTimeModel(StepCost(1.0, 0.0, 0.0, 0.0))
"""Every step takes a second."""


def owner(tenant: str = "default", priority: int = 0) -> RequestOwner:
    return RequestOwner(tenant=tenant, priority=priority)


def simulation(num_slots: int, **options: object) -> Simulation:
    hardware = Hardware(num_blocks=100_000, caching=False, truth=UNIT_STEPS)
    return Simulation(hardware, Limits(num_slots, 100_000, 10**6), **options)  # type: ignore[arg-type]


# --- static ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "num_steps"), [([5, 20, 10, 15, 10], 35), ([5] * 6, 10), ([], 0)]
)
def test_static_batches_on_three_slots(lengths: list[int], num_steps: int) -> None:
    harness = Harness(max_num_seqs=3, policy=STATIC)
    for i, length in enumerate(lengths):
        harness.add([i], max_tokens=length)
    assert harness.drain() == num_steps


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 5))
def test_static_is_the_sum_over_batches_of_the_longest(lengths: list[int], slots: int) -> None:
    batches = [lengths[i : i + slots] for i in range(0, len(lengths), slots)]
    assert static(lengths, slots).iterations == sum(map(max, batches))


def test_a_cohort_is_filled_over_several_steps_if_prompts_are_long() -> None:
    harness = Harness(max_num_seqs=3, max_num_batched_tokens=10, policy=STATIC)
    first = [harness.add([i] * 12, max_tokens=8) for i in range(3)]
    late = harness.add([9], max_tokens=1)
    harness.drain()
    assert [r.first_scheduled_time for r in first] == [1.0, 2.0, 3.0]  # as a step's tokens allow
    assert late.first_scheduled_time is not None
    assert late.first_scheduled_time > max(r.first_token_time or 0 for r in first) + 6


@pytest.mark.parametrize("wrong", [0, -1])
def test_no_slots_and_no_length_make_no_sense(wrong: int) -> None:
    with pytest.raises(AssertionError):
        Limits(wrong, 10, 10)
    with pytest.raises(AssertionError):
        Limits(10, wrong, 10)


# --- priority -------------------------------------------------------------------------------------


def test_lower_priorities_go_first() -> None:
    outcomes = simulate(
        simulation(1, policy=PRIORITY),
        [Arrival(0.0, 2, owner=owner(priority=p)) for p in (5, 0, -3, 5, 1)],
    )
    order = sorted(range(5), key=lambda i: outcomes[i].token_times[0])
    assert order == [2, 1, 4, 0, 3]


@given(
    st.lists(
        st.tuples(st.floats(0, 60), st.integers(-300, 300), st.integers(1, 6)),
        min_size=1,
        max_size=25,
    ),
    st.integers(1, 3),
)
def test_nobody_is_passed_by_what_came_a_level_per_ageing_time_later(
    arrivals: list[tuple[float, int, int]], slots: int
) -> None:
    """The bound of the policy, and with it the absence of starvation."""
    requests = [Arrival(t, n, owner=owner(priority=p)) for t, p, n in arrivals]
    outcomes = simulate(simulation(slots, policy=PRIORITY), requests)
    for mine in outcomes:
        for other in outcomes:
            levels = level(mine) - level(other)
            both_wait = admitted(other) >= mine.arrival.time
            if both_wait and other.arrival.time > mine.arrival.time + levels * AGEING_SECONDS:
                assert admitted(other) >= admitted(mine)


def level(outcome: Outcome) -> int:
    return max(-MOST_LEVELS, min(MOST_LEVELS, outcome.arrival.owner.priority))


def admitted(outcome: Outcome) -> float:
    assert outcome.admitted_time is not None
    return outcome.admitted_time


def test_an_endless_stream_of_urgent_requests_starves_nobody() -> None:
    run = simulation(1, policy=PRIORITY)
    patient = run.add(Arrival(0.0, 1, owner=owner(priority=3)))
    others = []
    while not patient.token_times:  # one urgent request per step keeps the only slot busy
        others.append(run.add(Arrival(run.clock.now(), 1, owner=owner(priority=0))))
        run.step()
    assert 3 * AGEING_SECONDS <= patient.token_times[0] <= 3 * AGEING_SECONDS + 3
    assert len(others) > 25


# --- fair -----------------------------------------------------------------------------------------


class FairQueueTwin:
    """The fair queue in ten lines: all requests in one list, searched each time."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.counters: dict[str, float] = {}
        self.last = ""

    def add(self, request: Request) -> None:
        present = {r.tenant for r in self.waiting}
        if request.tenant not in present:
            others = [self.counters.get(t, 0.0) for t in present] or [
                self.counters.get(self.last, 0.0)
            ]
            mine = self.counters.get(request.tenant, 0.0)
            self.counters[request.tenant] = max(mine, min(others))
        self.waiting.append(request)

    def next(self) -> Request:
        return min(
            self.waiting,
            key=lambda r: (self.counters.get(r.tenant, 0.0), r.tenant, r.request_id),
        )

    def remove(self, request: Request) -> None:
        self.waiting.remove(request)
        if request.tenant not in {r.tenant for r in self.waiting}:
            self.last = request.tenant


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "take", "drop", "work"]), st.integers(0, 10**6)),
        max_size=60,
    )
)
def test_the_fair_queue_is_its_twin(operations: list[tuple[str, int]]) -> None:
    counters = ServiceCounters(NO_TENANTS)
    queue, twin = WaitingQueue(FAIR, counters), FairQueueTwin()
    harness = Harness()
    for number, (operation, value) in enumerate(operations):
        tenant = "abcd"[value % 4]
        if operation == "add":
            request = make(harness, number, tenant)
            queue.add(request, is_new=True)
            twin.add(request)
        elif operation == "work":
            counters.charge(tenant, 0, value % 50)
            twin.counters[tenant] = twin.counters.get(tenant, 0.0) + 2 * (value % 50)
        elif twin.waiting:
            chosen = twin.waiting[value % len(twin.waiting)]
            if operation == "take":
                chosen = next(iter(queue.in_order()))
                assert chosen is twin.next()
                counters.charge(chosen.tenant, 7, 0)
                twin.counters[chosen.tenant] = twin.counters.get(chosen.tenant, 0.0) + 7
            queue.remove(chosen)
            twin.remove(chosen)
        queue.check_invariants()


def make(harness: Harness, number: int, tenant: str) -> Request:
    scratch = harness.add([1], owner=owner(tenant))
    return Request.create(number, [1], scratch.sampling, 1, 0.0, scratch.owner)


@pytest.mark.parametrize(
    "num_schedules", [300, pytest.param(10_000, marks=pytest.mark.slow)], ids=str
)
def test_backlogged_tenants_are_served_alike_within_the_papers_bound(num_schedules: int) -> None:
    """Over every interval of random schedules; what counts as service is what was computed."""
    for seed in range(num_schedules):
        check_service_gap(random.Random(seed))


def check_service_gap(rng: random.Random) -> None:
    """Two tenants that always have requests waiting, with requests of any shape."""
    slots, longest_prompt, longest_output = rng.randint(1, 4), rng.randint(1, 40), rng.randint(1, 8)
    hardware = Hardware(num_blocks=10_000, caching=False, truth=UNIT_STEPS)
    chunk = rng.choice([slots, 50, 500])
    run = Simulation(hardware, Limits(slots, chunk, 10**6), policy=FAIR)
    pending: dict[str, list[Outcome]] = {"a": [], "b": []}

    def refill() -> None:
        for tenant, outcomes in pending.items():
            while sum(o.admitted_time is None and not o.token_times for o in outcomes) < slots + 2:
                arrival = Arrival(
                    run.clock.now(),
                    rng.randint(1, longest_output),
                    rng.randint(1, longest_prompt),
                    owner=owner(tenant),
                )
                outcomes.append(run.add(arrival))

    most_tokens = slots * (longest_prompt + longest_output)
    bound = 2 * max(PROMPT_WEIGHT * longest_prompt, OUTPUT_WEIGHT * most_tokens)
    gaps = [0.0]
    served = {"a": 0.0, "b": 0.0}
    for _ in range(rng.randint(1, 12)):
        refill()
        waiting = {r.request_id: r for r in (*run.scheduler.waiting, *run.scheduler.running)}
        output = run.step()
        for item in output.scheduled:
            request = waiting[item.request_id]
            prompt = max(
                0, min(item.start + item.num_tokens, request.num_prompt_tokens) - item.start
            )
            served[request.tenant] += PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * item.samples
        gaps.append(served["a"] - served["b"])
    assert max(gaps) - min(gaps) <= bound  # over every interval


def test_weights_divide_the_service() -> None:
    table = TenantTable({"a": Tenant("a", weight=3.0), "b": Tenant("b", weight=1.0)})
    run = simulation(4, policy=FAIR, tenants=table)
    for tenant in "ab":
        for _ in range(400):
            run.add(Arrival(0.0, 10, 20, owner=owner(tenant)))
    for _ in range(400):
        run.step()
    done = {t: sum(r.tenant == t for r in run.scheduler.waiting) for t in "ab"}
    assert (400 - done["a"]) / (400 - done["b"]) == pytest.approx(3.0, rel=0.05)


def test_idling_earns_no_credit() -> None:
    run = simulation(1, policy=FAIR)
    busy = [run.add(Arrival(0.0, 5, 10, owner=owner("busy"))) for _ in range(40)]
    for _ in range(60):
        run.step()
    late = [run.add(Arrival(60.0, 5, 10, owner=owner("late"))) for _ in range(10)]
    while run.scheduler.has_unfinished:
        run.step()
    last = max(outcome.token_times[-1] for outcome in late)
    beside = [o for o in busy if late[0].token_times[0] <= o.token_times[0] <= last]
    assert 8 <= len(beside) <= 11  # in turns from its arrival on, whatever it did not use before


def test_cached_prompt_tokens_are_free() -> None:
    harness = Harness(policy=FAIR)
    harness.add([1] * 20, max_tokens=1, owner=owner("a"))
    harness.drain()
    before = harness.scheduler.served["a"]
    harness.add([1] * 20, max_tokens=1, owner=owner("a"))
    harness.drain()
    assert before == 20 * PROMPT_WEIGHT + OUTPUT_WEIGHT
    assert harness.scheduler.served["a"] - before == 4 * PROMPT_WEIGHT + OUTPUT_WEIGHT


# --- all ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [9, 200])
def test_every_policy_gives_the_same_bytes(num_blocks: int) -> None:
    answers: list[Sequence[object]] = []
    for policy in POLICIES.values():
        harness = Harness(policy=policy, num_blocks=num_blocks, max_num_batched_tokens=16)
        requests = [
            harness.add([i % 3] * 9, max_tokens=20, seed=i, owner=owner("ab"[i % 2], i % 4))
            for i in range(9)
        ]
        harness.drain()
        answers.append([harness.outcomes[r.request_id] for r in requests])
        for request in requests:
            assert request.output_token_ids == answer_alone(request).token_ids
    assert all(found == answers[0] for found in answers)
