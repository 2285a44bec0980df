"""A request's event log: what it says, and that it stays small."""

from __future__ import annotations

from typing import Any

from core_harness import Harness

from poise.core.request import Request
from poise.core.timeline import NUM_KEPT_AT_EACH_END, Timeline, WaitCauses


def kinds(request: Request) -> list[str]:
    return [event.kind for event in request.timeline.events]


def fields(request: Request, kind: str) -> dict[str, Any]:
    [found] = [event.fields for event in request.timeline.events if event.kind == kind]
    return found


def test_the_life_of_a_request_in_events() -> None:
    harness = Harness(max_num_batched_tokens=8)
    request = harness.add([1] * 20, max_tokens=3)
    harness.drain()
    assert kinds(request) == ["arrived", "admitted", "prefill", "first_token", "finished"]
    assert [event.time for event in request.timeline.events] == [0, 1, 1, 3, 5]
    prefill = {"start": 0, "tokens": 20, "steps": 3, "until": 3}
    assert fields(request, "prefill") == prefill
    assert fields(request, "finished") == {"reason": "length", "output_tokens": 3, "steps": 5}


def test_a_wait_is_told_by_its_causes_and_they_add_up() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add([1, 2], max_tokens=3)
    second = harness.add([3, 4], max_tokens=1)
    third = harness.add([5, 6], max_tokens=1)
    harness.drain()
    assert fields(second, "held") == {"because": "sequences"}
    waited = fields(second, "admitted")
    assert waited["waited_for"] == {"step": 1.0, "sequences": 3.0}
    assert waited["waited_seconds"] == 4.0
    assert sum(fields(third, "admitted")["waited_for"].values()) == 5.0


def test_a_preemption_names_who_got_the_pages() -> None:
    harness = Harness(num_blocks=8, block_size=4)
    first = harness.add([1] * 15, max_tokens=10)
    second = harness.add([2] * 15, max_tokens=10)
    harness.drain()
    assert fields(second, "preempted") == {"because": "kv_blocks", "by": first.request_id}
    assert kinds(second).count("admitted") == 2
    assert kinds(second)[-1] == "finished"


def test_a_hit_is_in_the_log() -> None:
    harness = Harness()
    harness.add([1] * 20)
    harness.drain()
    again = harness.add([1] * 20)
    harness.drain()
    assert fields(again, "admitted")["cached_tokens"] == 16


def test_an_abort_and_a_failed_step_are_in_the_log() -> None:
    harness = Harness()
    request = harness.add([1] * 5)
    harness.executor.fail_next = True
    harness.step()
    harness.abort(request)
    assert fields(request, "preempted") == {"because": "failed_step"}
    assert fields(request, "finished")["reason"] == "abort"


def test_a_long_log_keeps_both_ends() -> None:
    timeline = Timeline()
    for number in range(1000):
        timeline.add(float(number), "something")
    times = [event.time for event in timeline.events]
    assert times[:NUM_KEPT_AT_EACH_END] == list(range(NUM_KEPT_AT_EACH_END))
    assert times[NUM_KEPT_AT_EACH_END:] == list(range(1000 - NUM_KEPT_AT_EACH_END, 1000))
    assert timeline.num_dropped == 1000 - len(times)
    assert timeline.last is timeline.events[-1]


def test_causes_are_summed_between_two_instants() -> None:
    causes = WaitCauses(0.0)
    causes.close(1.0, "kv_blocks")
    before = causes.snapshot(3.0)
    causes.close(4.0, "sequences")
    causes.close(6.0, "kv_blocks")
    assert causes.since(before, 7.0) == {"kv_blocks": 2.0, "sequences": 2.0}
