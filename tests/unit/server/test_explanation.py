"""Where the time went: by hand-written event logs, and by those of a real scheduler."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from poise.server.explanation import explain

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from engine_harness import make_engine, request  # type: ignore[import-not-found]


def event(seconds: float, kind: str, choice: int = 0, **fields: Any) -> dict[str, Any]:
    return {"time": 100 + seconds, "seconds": seconds, "kind": kind, "choice": choice, **fields}


PREEMPTED = [
    event(0, "arrived"),
    event(1, "held", because="sequences"),
    event(
        3, "admitted", cached_tokens=16, waited_seconds=3, waited_for={"sequences": 2, "step": 1}
    ),
    event(3, "prefill", start=16, tokens=40, steps=2, until=104),
    event(5, "first_token"),
    event(8, "preempted", because="kv_blocks", by="another request"),
    event(12, "admitted", cached_tokens=0, waited_seconds=4, waited_for={"kv_blocks": 4}),
    event(12, "prefill", start=0, tokens=50, steps=3, until=114),
    event(20, "finished", reason="stop", output_tokens=9, steps=12),
]


def test_the_times_of_a_request_that_was_preempted() -> None:
    [times] = explain(PREEMPTED)
    assert times.seconds == {
        "waiting": 3, "prompt": 2, "output": 3 + 6, "waiting_again": 4, "recomputing": 2,
    }  # fmt: skip
    assert sum(times.seconds.values()) == 20
    assert times.waited_for == {"sequences": 2, "step": 1, "kv_blocks": 4}
    assert (times.cached_tokens, times.num_preemptions, times.finish_reason) == (16, 1, "stop")


def test_a_request_that_still_waits_or_never_ran() -> None:
    [waiting] = explain([event(0, "arrived"), event(2, "held", because="kv_blocks")])
    assert waiting.seconds == {"waiting": 2}
    assert waiting.finish_reason is None
    [dropped] = explain([event(0, "arrived"), event(7, "finished", reason="deadline")])
    assert (dropped.seconds, dropped.finish_reason) == ({"waiting": 7}, "deadline")
    assert explain([]) == []


@pytest.mark.parametrize("num_blocks", [64, 24])
def test_the_parts_add_up_for_every_choice_of_a_real_schedule(num_blocks: int) -> None:
    engine = make_engine(
        num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=10, max_model_len=90
    )
    for key in range(8):
        prompt = f"{key}" * (7 * key + 1)
        engine.add_request(key, request(prompt, f"r{key}", n=2, max_tokens=20, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.clock.advance(0.5)  # type: ignore[attr-defined]
        engine.step()
    num_preemptions = 0
    for key in range(8):
        events = engine.timeline(f"r{key}")
        choices = explain(events)
        assert [times.index for times in choices] == [0, 1]
        for times in choices:
            [end] = [
                e["seconds"]
                for e in events
                if e["kind"] == "finished" and e["choice"] == times.index
            ]
            assert sum(times.seconds.values()) == pytest.approx(end)
            assert times.finish_reason == "length"
            num_preemptions += times.num_preemptions
    assert (num_preemptions > 0) == (num_blocks == 24)
