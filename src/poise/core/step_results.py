"""What a step's result gives one request: tokens up to its end, and prompt logprobs not told before.

Knows one request at a time. Invariant: no token follows the one that ends the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from poise.core.output import ModelRunnerOutput, ScheduledRequest, TokenLogprobs
from poise.core.request import Request
from poise.core.scheduler_records import RequestUpdate

_NOTHING: tuple[TokenLogprobs, ...] = ()


def take_result(
    request: Request, item: ScheduledRequest, result: ModelRunnerOutput, max_model_len: int
) -> RequestUpdate | None:
    """Appends what was drawn to the request; None if the step has nothing to tell its reader."""
    prompt_logprobs: Sequence[TokenLogprobs] = _NOTHING
    if result.prompt_logprobs:
        prompt_logprobs = _new_prompt_logprobs(request, item, result)
    if not item.samples:
        return RequestUpdate(request, (), (), prompt_logprobs) if prompt_logprobs else None
    drawn = result.token_ids[request.request_id]
    num_taken = 0
    finished = False
    while num_taken < len(drawn) and not finished:
        finished = request.append_output(drawn[num_taken], max_model_len)
        num_taken += 1
    if item.num_drafts:
        request.num_drafted_tokens += item.num_drafts
        request.num_accepted_tokens += min(len(drawn) - 1, num_taken)
    return RequestUpdate(
        request,
        drawn[:num_taken],
        result.logprobs.get(request.request_id, ())[:num_taken],
        prompt_logprobs,
        request.finish_reason,
        request.stop_reason,
    )


def _new_prompt_logprobs(
    request: Request, item: ScheduledRequest, result: ModelRunnerOutput
) -> Sequence[TokenLogprobs]:
    """Those not delivered before a restart: the row at position p reports position p + 1."""
    entries = result.prompt_logprobs.get(item.request_id, ())
    fresh = entries[max(0, request.num_prompt_logprobs - item.start) :]
    request.num_prompt_logprobs += len(fresh)
    return fresh
