"""A step while it is being built: rows granted so far, and the tokens that are left.

Knows no queue and no policy. Invariant: what becomes the output is what was granted, in that order.
"""

from __future__ import annotations

from collections.abc import Sequence

from poise.core.kv_cache_manager import BlockIds
from poise.core.output import NewRequest, ScheduledRequest, SchedulerOutput
from poise.core.request import Request
from poise.core.step_budget import StepBudget


class StepPlan:
    """`preempted`: somebody gave way in this step, so nobody is admitted in the pages that he left."""

    __slots__ = ("_new_requests", "budget", "now", "preempted", "scheduled")

    def __init__(self, budget: StepBudget, now: float) -> None:
        self.budget = budget
        self.now = now
        self.preempted = False
        self.scheduled: dict[int, ScheduledRequest] = {}
        self._new_requests: list[NewRequest] = []

    def add_new(self, request: Request) -> None:
        """The executor has to hear all about this one; its pages are allocated, its hit is taken."""
        self._new_requests.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=tuple(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                block_tables=tuple(tuple(table) for table in request.block_tables),
            )
        )

    def grant(
        self, request: Request, num_tokens: int, new_block_ids: BlockIds, is_prefill: bool
    ) -> None:
        """Rows for a request whose pages are allocated and whose hit is taken."""
        start = request.num_computed_tokens
        request.num_steps += 1
        if is_prefill:
            request.timeline.add_prefill(self.now, start, num_tokens)
        self.scheduled[request.request_id] = ScheduledRequest(
            request.request_id,
            start,
            num_tokens,
            new_block_ids,
            start + num_tokens == len(request.token_ids),
        )
        self.budget.spend(request, num_tokens, is_prefill)

    def samples(self, request: Request) -> bool:
        """Whether the request draws a token in this step."""
        item = self.scheduled.get(request.request_id)
        return item is not None and item.samples

    def add_drafts(
        self,
        request: Request,
        num_drafts: int,
        token_ids: tuple[int, ...],
        unplaced: int,
        block_ids: BlockIds,
    ) -> None:
        """Rows behind those of a request that samples; its pages for them are allocated."""
        item = self.scheduled[request.request_id]
        assert item.samples
        assert item.num_drafts == 0
        assert len(token_ids) in (0, num_drafts)
        self.scheduled[request.request_id] = item._replace(
            num_drafts=num_drafts,
            draft_token_ids=token_ids,
            draft_block_ids=block_ids,
            unplaced_draft=unplaced,
        )
        self.budget.spend(request, num_drafts, is_prefill=False)

    def is_partial(self, request: Request) -> bool:
        """Whether a running request's prompt is still half computed after this step."""
        item = self.scheduled.get(request.request_id)
        if item is None:
            return request.num_tokens - request.num_computed_tokens > 1
        return not item.samples

    def output(self, step: int, removed: Sequence[int]) -> SchedulerOutput:
        return SchedulerOutput(
            step=step,
            removed_request_ids=tuple(removed),
            new_requests=tuple(self._new_requests),
            scheduled=tuple(self.scheduled.values()),
            num_tokens=self.budget.num_spent,
        )
