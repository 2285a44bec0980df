"""The event logs that an engine keeps, by the callers' ids."""

from __future__ import annotations

from dataclasses import replace

from engine_harness import TypingExecutor, make_engine, request, run

from poise.core.request import RequestOwner
from poise.engine.client import EngineRequest
from poise.engine.timelines import ANOTHER, KeptTimelines


def owned(tenant: str, name: str, prompt: str, max_tokens: int) -> EngineRequest:
    return replace(request(prompt, name, max_tokens=max_tokens), owner=RequestOwner(tenant))


def typing() -> TypingExecutor:
    return TypingExecutor(lambda prompt: prompt * 100)


def test_a_finished_request_can_still_be_asked_for() -> None:
    engine = make_engine(typing())
    run(engine, request("ab", "mine", max_tokens=3, n=2))
    events = engine.timeline("mine")
    assert [e["kind"] for e in events if e["choice"] == 1] == [
        "arrived", "admitted", "prefill", "first_token", "finished",
    ]  # fmt: skip
    assert events[0]["tenant"] == "default"
    assert {e["reason"] for e in events if e["kind"] == "finished"} == {"length"}
    assert engine.timeline("unknown") == []


def test_a_stop_string_is_the_reason_that_the_log_gives() -> None:
    engine = make_engine(TypingExecutor(lambda prompt: b"one two"))
    run(engine, request("ab", "mine", max_tokens=9, stop=["ne"]))
    assert engine.timeline("mine")[-1]["reason"] == "stop"


def test_who_preempted_is_named_only_within_the_tenant() -> None:
    for tenant, named in (("a", "first"), ("b", ANOTHER)):
        engine = make_engine(typing(), num_blocks=8)
        run(engine, owned("a", "first", "x" * 15, 10), owned(tenant, "second", "y" * 15, 10))
        [event] = [e for e in engine.timeline("second") if e["kind"] == "preempted"]
        assert event["by"] == named


def test_a_fixed_number_is_kept_and_none_that_runs_is_dropped() -> None:
    engine = make_engine(typing())
    engine._timelines = KeptTimelines(num_kept=3)
    engine.add_request(99, request("ab", "running", max_tokens=150))
    for number in range(5):
        engine.add_request(number, request("ab", f"r{number}", max_tokens=1))
        engine.step()
    assert [bool(engine.timeline(f"r{number}")) for number in range(5)] == [0, 0, 0, 1, 1]
    assert engine.timeline("running")[-1]["kind"] == "first_token"
