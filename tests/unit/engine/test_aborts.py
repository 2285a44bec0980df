"""A thousand aborts in each state of a request leave the engine as it was."""

from __future__ import annotations

import pytest
from engine_harness import assert_idle, join, make_engine, request

from poise.core.request import RequestStatus
from poise.engine.llm_engine import LLMEngine

NUM_ABORTS = 1000


def queued(engine: LLMEngine, key: int) -> None:
    """Never scheduled."""


def mid_prompt(engine: LLMEngine, key: int) -> None:
    """A part of the prompt is computed."""
    engine.step()
    [running] = engine._scheduler.running
    assert 0 < running.num_computed_tokens < running.num_prompt_tokens


def decoding(engine: LLMEngine, key: int) -> None:
    for _ in range(5):
        engine.step()
    [running] = engine._scheduler.running
    assert running.num_output_tokens > 0


def preempted(engine: LLMEngine, key: int) -> None:
    """Its pages went to an older one, which is then aborted too."""
    engine.add_request(10_000 + key, request("x" * 30, "other", max_tokens=60, ignore_eos=True))
    while not any(r.status is RequestStatus.PREEMPTED for r in engine._scheduler.waiting):
        engine.step()


@pytest.mark.parametrize("reach", [queued, mid_prompt, decoding, preempted])
def test_aborts_leave_nothing_behind(reach: object) -> None:
    assert callable(reach)
    engine = make_engine(num_blocks=24, max_num_batched_tokens=10, max_model_len=96)
    for key in range(NUM_ABORTS):
        prompt = f"{key:5d}" * 6
        engine.add_request(key, request(prompt, "the same id", max_tokens=60, ignore_eos=True))
        reach(engine, key)
        keys = [key] + ([10_000 + key] if reach is preempted else [])
        for one in keys:
            engine.abort(one)
            engine.abort(one)
        deltas = engine.take_outputs()
        assert [one for one, delta in deltas if delta.stats is not None] == keys
        for one in keys:
            [answer] = join([delta for other, delta in deltas if other == one]).values()
            assert answer.finish_reason == "abort"
        if key % 100 == 0:
            assert_idle(engine)
    assert_idle(engine)
