"""Scheduler outputs written by hand."""

from __future__ import annotations

from typing import Any

from poise.core.output import EngineSampling, NewRequest, ScheduledRequest, SchedulerOutput
from poise.core.sampling_params import SamplingParams


def new(request_id, token_ids, blocks, num_prompt=None, seed=0, **params: Any) -> NewRequest:
    sampling = EngineSampling(SamplingParams(**params), seed, 0, frozenset())
    prompt = len(token_ids) if num_prompt is None else num_prompt
    return NewRequest(request_id, list(token_ids), prompt, sampling, (tuple(blocks),))


def rows(request_id, start, num_tokens, blocks=None, samples=False) -> ScheduledRequest:
    new_blocks = () if blocks is None else (tuple(blocks),)
    return ScheduledRequest(request_id, start, num_tokens, new_blocks, samples)


def output(scheduled, new_requests=(), removed=()) -> SchedulerOutput:
    total = sum(request.num_rows for request in scheduled)
    return SchedulerOutput(0, list(removed), list(new_requests), list(scheduled), total)
