"""What the engine makes of the scheduler: refusals, deadlines, choices, metrics, stored fits, flags."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from engine_harness import TypingExecutor, assert_idle, make_engine, request, run
from prometheus_client import generate_latest

from poise.config import SchedulerConfig
from poise.core.clock import ManualClock
from poise.core.output import KVGroupSpec, SchedulerOutput
from poise.core.policy import FAIR, FCFS, PRIORITY
from poise.core.request import RequestOwner
from poise.core.step_time import StepCost, StepShape, StepTimeModel
from poise.core.tenant import NO_TENANTS, Share, Tenant, TenantTable
from poise.engine.async_client import InProcessClient
from poise.engine.client import EngineRequest, RequestDelta, deltas_of
from poise.engine.scheduling import limits_of, policy_of
from poise.engine.scheduling_metrics import SchedulingMetrics
from poise.engine.step_times import FILE, LEAST_STEPS, store_fit, stored_fit, stored_model
from poise.errors import ConfigError, QueueFullError


def typing() -> TypingExecutor:
    return TypingExecutor(lambda prompt: prompt * 100)


def due(deadline: float, name: str = "r", max_tokens: int = 50) -> EngineRequest:
    return replace(
        request("ab", name, max_tokens=max_tokens), owner=RequestOwner(deadline=deadline)
    )


def test_choices_that_do_not_fit_the_queue_leave_nothing_behind() -> None:
    engine = make_engine(typing(), max_num_queued_reqs=3)
    engine.add_request(0, request("ab", max_tokens=2))
    with pytest.raises(QueueFullError):
        engine.add_request(1, request("ab", max_tokens=2, n=3))
    engine.add_request(2, request("ab", max_tokens=2, n=2))
    while engine.has_unfinished_requests():
        engine.step()
    assert_idle(engine)


def test_a_deadline_ends_the_answer_with_what_there_is() -> None:
    clock = ManualClock()
    executor = typing()

    def pass_time(output: SchedulerOutput) -> None:
        clock.advance(1.0)

    executor.fail = pass_time
    engine = make_engine(executor, clock=clock, max_num_seqs=1)
    engine.add_request(0, due(3.5, "runs"))
    engine.add_request(1, due(2.0, "waits"))
    deltas: dict[int, list[RequestDelta]] = {0: [], 1: []}
    while engine.has_unfinished_requests():
        for key, delta in engine.step():
            deltas[key].append(delta)
    assert_idle(engine)
    texts = ["".join(choice.text for d in deltas[key] for choice in d.choices) for key in (0, 1)]
    assert texts == ["abab", ""]
    for key in (0, 1):
        assert deltas[key][-1].choices[0].finish_reason == "deadline"
        assert deltas[key][-1].stats is not None
    assert engine.metrics.finished["deadline"] == 2
    assert engine.timeline("waits")[-1]["reason"] == "deadline"


def test_a_full_queue_is_an_error_of_the_stream_and_others_go_on() -> None:
    async def main() -> list[object]:
        engine = make_engine(typing(), max_num_seqs=1, max_num_queued_reqs=2)
        client = InProcessClient(engine)
        results = await asyncio.gather(
            *(collect(client, request("ab", f"r{i}", max_tokens=20)) for i in range(12)),
            return_exceptions=True,
        )
        await client.close()
        return results

    results = asyncio.run(main())
    refused = [r for r in results if isinstance(r, QueueFullError)]
    served = [r for r in results if isinstance(r, str)]
    assert len(refused) + len(served) == 12
    assert refused
    assert all(r.retry_after_seconds > 0 for r in refused)
    assert set(served) == {"ab" * 10}


async def collect(client: InProcessClient, item: EngineRequest) -> str:
    return "".join([c.text async for delta in deltas_of(client, item) for c in delta.choices])


def test_who_comes_while_a_step_runs_is_refused_without_waiting_for_it() -> None:
    engine = make_engine(typing(), max_num_seqs=1, max_num_queued_reqs=2)
    for key in range(3):
        engine.add_request(key, request("ab", max_tokens=9))
        if key == 0:
            engine.step()
    with pytest.raises(QueueFullError):
        engine.refuse_early(request("ab"), num_before=0)
    engine.abort(2)
    engine.step()
    engine.refuse_early(request("ab"), num_before=0)
    with pytest.raises(QueueFullError):
        engine.refuse_early(request("ab"), num_before=1)


def test_the_table_of_tenants_can_be_replaced_while_requests_run() -> None:
    engine = make_engine(typing(), max_num_seqs=2)
    for key in range(2):
        engine.add_request(key, request("ab", f"r{key}", max_tokens=30))
    engine.step()
    engine.set_tenants(TenantTable({"vip": Tenant("vip", reserved=Share(sequences=0.5))}))
    engine.add_request(9, replace(request("ab", "v", max_tokens=1), owner=RequestOwner("vip")))
    assert [key for key, delta in engine.step() if delta.stats is not None] == [9]
    with pytest.raises(ConfigError):
        engine.set_tenants(TenantTable({"a": Tenant("a", reserved=Share(blocks=1.5))}))


def test_decisions_and_holdings_are_metrics() -> None:
    engine = make_engine(typing(), max_num_queued_reqs=1, policy=FAIR)
    engine.metrics._scheduling = SchedulingMetrics(engine._scheduler)
    engine.add_request(0, request("ab", max_tokens=3))
    with pytest.raises(QueueFullError):
        engine.add_request(1, request("ab"))
    while engine.has_unfinished_requests():
        engine.step()
    text = engine.metrics.render().decode()
    labels = 'engine="0",model_name="bytes"'
    assert f'poise_admission_total{{decision="accepted",{labels},reason="ok"}} 1.0' in text
    assert (
        f'poise_admission_total{{decision="refused",{labels},reason="queued_requests"}} 1.0' in text
    )
    assert "tenant=" not in text
    assert "poise_queued_tokens" in text
    text = generate_latest(engine.metrics.tenant_registry).decode()
    owner = f'{labels},service_class="interactive",tenant="default"'
    assert f"poise_tenant_kv_block_steps_total{{{owner}}} 3.0" in text
    assert f"poise_tenant_requests_running{{{owner}}} 0.0" in text
    assert f'poise_tenant_service_total{{{labels},tenant="default"}} 8.0' in text


def test_a_fit_is_found_again_under_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POISE_HOME", str(tmp_path))
    model = StepTimeModel(StepCost(1.0, 0.0, 0.0, 0.0))
    for number in range(LEAST_STEPS):
        store_fit("key", model)
        assert stored_fit("key") is None  # too little is not kept
        model.observe(StepShape(1 + number % 4, 0, 1, 1), 2.0)
    store_fit("key", model)
    assert stored_fit("key") == model.fit
    again = stored_model("key", [KVGroupSpec("full", 1)])
    assert again is not None
    for rows in range(1, 9):
        shape = StepShape(rows, 0, 10 * rows, rows)
        assert again.predict(shape) == model.predict(shape)
    assert stored_fit("another") is None
    assert stored_model("another", [KVGroupSpec("full", 1)]) is None
    for number in range(100):
        store_fit(f"key {number}", model)
    assert stored_fit("key") is None
    assert stored_fit("key 99") == model.fit
    (tmp_path / FILE).write_bytes(b"{ not json")
    assert stored_fit("key 99") is None
    store_fit("key", model)
    assert stored_fit("key") == model.fit


def test_an_engine_keeps_what_it_learnt_when_it_closes() -> None:
    learnt = []
    clock, executor = ManualClock(), typing()
    executor.fail = lambda output: clock.advance(1.0)
    engine = make_engine(executor, clock=clock)
    engine._on_close = lambda: learnt.append(engine.step_time.num_observed)
    run(engine, request("ab", max_tokens=5))
    engine.close()
    engine.close()
    assert learnt == [5]


def test_flags_become_limits() -> None:
    limits = limits_of(SchedulerConfig(max_num_seqs=10), 99)
    assert (limits.max_num_queued_reqs, limits.max_num_queued_tokens) == (40, None)
    assert (limits.max_queue_seconds, limits.target_itl_seconds) == (60.0, None)
    assert limits.min_num_queued_tokens == 10 * 99
    unbounded = limits_of(SchedulerConfig().without_queue_bounds(), 99)
    assert unbounded.max_num_queued_reqs is None
    assert unbounded.max_num_queued_tokens is None
    assert unbounded.max_queue_seconds is None
    given = limits_of(SchedulerConfig(target_itl_ms=40.0, max_num_queued_tokens=500), 99)
    assert (given.target_itl_seconds, given.max_num_queued_tokens) == (0.04, 500)
    assert given.max_queue_seconds is None


def test_the_default_policy_depends_on_tenants() -> None:
    table = TenantTable({"a": Tenant("a")})
    assert policy_of(SchedulerConfig(), NO_TENANTS) is FCFS
    assert policy_of(SchedulerConfig(), table) is FAIR
    assert policy_of(SchedulerConfig(scheduling_policy="priority"), table) is PRIORITY
