"""The door: bounds of the queue, predicted drain, deadlines; all in virtual time."""

from __future__ import annotations

import random
from typing import Any

import pytest
from core_harness import Harness, sampling

from poise.core.limits import Limits
from poise.core.request import Request, RequestOwner, RequestStatus
from poise.core.simulation import Arrival, Hardware, Outcome, Simulation, simulate
from poise.core.step_time import StepCost, StepShape, StepTimeModel
from poise.errors import DeadlineError, QueueFullError

MACHINE = StepCost(per_step=8e-3, per_token=1e-3, per_key=2e-8, per_sampled=2e-4)


def simulation(num_blocks: int = 4000, **limits: Any) -> Simulation:
    resolved = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 10_000, **limits}
    return Simulation(Hardware(num_blocks, truth=StepTimeModel(MACHINE)), Limits(**resolved))


def fitted(run: Simulation) -> Simulation:
    """Lets a few requests pass, so that real steps stand behind the model."""
    simulate(run, [Arrival(0.0, 10, 20) for _ in range(4)])
    return run


# --- bounds ---------------------------------------------------------------------------------------


def test_the_queue_takes_so_many_requests_and_no_more() -> None:
    run = simulation(max_num_queued_reqs=3)
    outcomes = [run.add(Arrival(0.0, 50, 20)) for _ in range(5)]
    refusal = outcomes[3].refusal
    assert isinstance(refusal, QueueFullError)
    assert refusal.reason == "queued_requests"
    assert refusal.retry_after_seconds > 0
    assert "--max-num-queued-reqs" in str(refusal)
    assert run.scheduler.admission.decisions == {
        ("accepted", "ok"): 3,
        ("refused", "queued_requests"): 2,
    }


def test_the_queue_takes_so_many_prompt_tokens_and_no_more() -> None:
    run = simulation(max_num_queued_tokens=50)
    outcomes = [run.add(Arrival(0.0, 5, 20)) for _ in range(3)]
    assert [outcome.refusal is None for outcome in outcomes] == [True, True, False]
    refusal = outcomes[2].refusal
    assert isinstance(refusal, QueueFullError)
    assert refusal.reason == "queued_tokens"


def test_an_empty_queue_takes_anybody() -> None:
    harness = Harness(max_num_seqs=1, max_num_queued_reqs=1, max_num_queued_tokens=10)
    request = harness.add([1] * 20)
    assert request.status is RequestStatus.WAITING


def test_choices_come_in_together_or_not_at_all() -> None:
    harness = Harness(max_num_queued_reqs=3)
    first = [harness.add([1]), harness.add([1])]
    choices = [make(harness, number) for number in (7, 8)]
    with pytest.raises(QueueFullError):
        harness.scheduler.add(*choices)
    assert harness.scheduler.waiting == tuple(first)


def make(harness: Harness, number: int) -> Request:
    return Request.create(number, [1, 2], sampling(), 3, harness.clock.now())


def test_by_default_as_many_tokens_wait_as_drain_in_the_time() -> None:
    run = fitted(simulation(max_queue_seconds=5.0))
    accepted = []
    while True:
        outcome = run.add(Arrival(run.clock.now(), 40, 100))
        if outcome.refusal is not None:
            break
        accepted.append(outcome)
    begin = run.clock.now()
    while run.scheduler.has_unfinished:
        run.step()
    assert 2.5 <= run.clock.now() - begin <= 10.0  # answers are 4 x as long as those it learnt from
    assert len(accepted) > 20


def test_a_slow_machine_lets_the_least_number_of_tokens_wait() -> None:
    run = fitted(simulation(max_queue_seconds=1e-6, min_num_queued_tokens=400))
    outcomes = [run.add(Arrival(run.clock.now(), 40, 100)) for _ in range(13)]
    accepted = [outcome for outcome in outcomes if outcome.refusal is None]
    assert len(accepted) == 4  # of 100 prompt tokens each


# --- Retry-After ----------------------------------------------------------------------------------


def test_who_comes_back_when_told_to_is_let_in() -> None:
    """A flood of 2,000; nine of ten that return after their Retry-After succeed."""
    run = simulation(max_num_queued_reqs=32)
    rng = random.Random(3)
    simulate(run, [Arrival(0.0, 20, 30) for _ in range(20)])
    start = run.clock.now()
    pending = [(start + i * 1e-3, i) for i in range(2000)]
    told: dict[int, int] = {}  # how often each was sent away
    num_retries = num_successes = 0
    while pending and run.clock.now() < start + 60:
        run.step()
        due = [item for item in pending if item[0] <= run.clock.now()]
        pending = [item for item in pending if item[0] > run.clock.now()]
        for time, number in sorted(due):
            outcome = run.add(Arrival(time, rng.randint(5, 40), rng.randint(10, 60)))
            is_retry = number in told
            num_retries += is_retry
            if outcome.refusal is None:
                num_successes += is_retry
                continue
            assert isinstance(outcome.refusal, QueueFullError)
            told[number] = told.get(number, 0) + 1
            pending.append((run.clock.now() + outcome.refusal.retry_after_seconds, number))
    assert num_retries > 200
    assert num_successes >= 0.9 * num_retries


def test_a_fresh_request_is_served_at_once_after_a_flood() -> None:
    run = simulation(max_num_queued_reqs=16)
    for _ in range(5000):
        run.add(Arrival(0.0, 20, 30))
    assert len(run.scheduler.waiting) == 16
    while run.scheduler.has_unfinished:
        run.step()
    fresh = run.add(Arrival(run.clock.now(), 5, 30))
    while not fresh.token_times:
        run.step()
    assert fresh.time_to_first_token < 0.1


# --- predictions and deadlines --------------------------------------------------------------------


def test_the_predicted_first_token_is_near_the_real_one() -> None:
    run = fitted(simulation())
    rng = random.Random(5)
    arrivals = [Arrival(10 + rng.random() * 20, 10, rng.randint(5, 200)) for _ in range(150)]
    outcomes = simulate(run, arrivals)
    errors = sorted(run.scheduler.admission.first_token_errors)
    assert len(errors) == 128  # the last ones
    assert abs(errors[len(errors) // 2]) < 0.35
    assert all(outcome.token_times for outcome in outcomes)


def due(deadline: float) -> RequestOwner:
    return RequestOwner(deadline=deadline)


def refusal_of(outcome: Outcome) -> DeadlineError:
    assert isinstance(outcome.refusal, DeadlineError)
    return outcome.refusal


def test_a_deadline_that_has_passed_is_refused() -> None:
    run = simulation()
    run.clock.advance(5)
    refusal = refusal_of(run.add(Arrival(5.0, 1, owner=due(4.0))))
    assert (refusal.reason, refusal.retry_after_seconds) == ("deadline_passed", 0.0)


def test_a_first_token_that_would_be_late_is_refused_and_waiting_may_help() -> None:
    run = fitted(simulation())
    now = run.clock.now()
    for _ in range(60):
        run.add(Arrival(now, 10, 100))
    refusal = refusal_of(run.add(Arrival(now, 10, 100, owner=due(now + 1.0))))
    assert refusal.reason == "deadline_first_token"
    assert refusal.retry_after_seconds > 1.0
    hopeless = refusal_of(run.add(Arrival(now, 10, 5000, owner=due(now + 1.0))))
    assert hopeless.retry_after_seconds == 0.0


def test_an_end_that_would_be_late_is_refused() -> None:
    run = simulation()
    simulate(run, [Arrival(0.0, 200, 20) for _ in range(4)])
    now = run.clock.now()
    refusal = refusal_of(run.add(Arrival(now, 200, 20, owner=due(now + 0.5))))
    assert refusal.reason == "deadline_end"
    assert run.add(Arrival(now, 200, 20, owner=due(now + 60))).refusal is None


def test_nothing_is_refused_by_a_model_that_saw_no_step() -> None:
    hardware = Hardware(4000, truth=StepTimeModel(MACHINE))
    run = Simulation(
        hardware, Limits(8, 256, 10_000), step_time=StepTimeModel(StepCost(1e3, 1, 1, 1))
    )
    assert run.add(Arrival(0.0, 5, 5, owner=due(1.0))).refusal is None


def test_a_deadline_ends_a_request_in_the_queue_and_on_the_run() -> None:
    harness = Harness(max_num_seqs=1)
    running = harness.add([1], max_tokens=50, owner=due(3.5))
    queued = harness.add([2], max_tokens=5, owner=due(2.5))
    later = harness.add([3], max_tokens=2)
    harness.drain()
    assert (running.finish_reason, running.num_output_tokens) == ("deadline", 3)
    assert (queued.finish_reason, queued.num_output_tokens) == ("deadline", 0)
    assert queued.first_scheduled_time is None  # what has expired never runs
    assert later.finish_reason == "length"
    decisions = harness.scheduler.admission.decisions
    assert decisions[("dropped", "deadline_running")] == 1
    assert decisions[("dropped", "deadline_queued")] == 1


def test_a_step_is_predicted_by_its_kind() -> None:
    run = fitted(simulation())
    model = run.scheduler.step_time
    shape = StepShape(8, 0, 8 * 30, 8)
    assert model.predict(shape) == pytest.approx(MACHINE.seconds(shape))
