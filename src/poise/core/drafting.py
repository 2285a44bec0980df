"""Drafts on top of a step: who may have how many, and the pages that they write to.

Knows requests, pages and the step that is planned; not who drafts, nor what is accepted. Invariant: drafts take
only what is left over (tokens of the step, free pages without cached content), and what they took of
pages is given back when the step returns, except where accepted tokens lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from poise.core.limits import Limits
from poise.core.output import NO_TOKEN, ScheduledRequest
from poise.core.request import Request
from poise.core.running import RunningRequests
from poise.core.step_plan import StepPlan
from poise.core.step_time import StepShape, StepTimeModel


class DraftRoom(NamedTuple):
    """A request that samples in this step, and how many tokens it may draft at most: 1 or more, or 0 if its drafts
    are `pinned`.
    """

    request: Request
    most: int


class Draft(NamedTuple):
    """`token_ids` are the drafts, or empty where the executor is to make `num_tokens` of them.

    `unplaced` is the next one, which gets no row (`ScheduledRequest.unplaced_draft`).
    """

    num_tokens: int
    token_ids: tuple[int, ...] = ()
    unplaced: int = NO_TOKEN

    def cut(self, most: int) -> Draft:
        if most >= self.num_tokens:
            return self
        unplaced = self.token_ids[most] if self.token_ids else NO_TOKEN
        return Draft(most, self.token_ids[:most], unplaced)


NO_DRAFT: Final = Draft(0)


class Drafter(Protocol):
    """Says what each request drafts. Asked once for each step in which any request may."""

    def draft(
        self, rooms: Sequence[DraftRoom], shape: StepShape, step_time: StepTimeModel
    ) -> Sequence[Draft]:
        """One for each room. `shape` is the step without drafts, `step_time` predicts any step."""
        ...

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """What became of a request's drafts in a step."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended."""
        ...


@dataclass(slots=True)
class DraftCounters:
    """Totals since the start. `accepted_per_position[j]`: how often draft j of a step was accepted."""

    num_drafts: int = 0  # a request's drafts of one step count once
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        missing = num_drafts - len(self.accepted_per_position)
        self.accepted_per_position += [0] * missing
        for place in range(num_accepted):
            self.accepted_per_position[place] += 1


class Drafting:
    """Adds drafts to planned steps and takes back what they leave."""

    def __init__(self, running: RunningRequests, limits: Limits, drafter: Drafter) -> None:
        self.counters = DraftCounters()
        self.drafter = drafter
        self._running = running
        self._limits = limits

    def add_to(self, plan: StepPlan, step_time: StepTimeModel) -> None:
        """Asks for drafts and gives each request what of them still fits, oldest admission first."""
        rooms = [
            DraftRoom(request, most)
            for request in self._running
            if request.sampling.speculation is not None
            and plan.samples(request)
            and ((most := self._most(plan, request)) > 0 or is_pinned(request))
        ]
        if not rooms:
            return
        shape = step_time.shape_of(tuple(plan.scheduled.values()))
        drafts = self.drafter.draft(rooms, shape, step_time)
        for (request, _), draft in zip(rooms, drafts, strict=True):
            if draft.num_tokens == 0:
                continue
            fitting = draft.cut(self._most(plan, request))
            fitting = self._within_target(fitting, request, shape, step_time)
            block_ids = self._running.kv_cache.no_blocks
            if fitting.num_tokens:
                shape = step_time.with_drafts(shape, request.num_tokens, fitting.num_tokens)
                block_ids = self._running.take_draft_pages(request, fitting.num_tokens)
            if fitting.num_tokens or is_pinned(request):
                plan.add_drafts(request, *fitting, block_ids)

    def _most(self, plan: StepPlan, request: Request) -> int:
        """What the request asked for, within the answer's end, the context, the step's tokens and the pages."""
        speculation = request.sampling.speculation
        assert speculation is not None
        if plan.budget.num_left == 0 or not request.may_draft:
            return 0
        if self._running.kv_cache.has_sharers_in_step(request) or _scores_prompt(request):
            return 0  # a draft may spoil what others take from this step, and the prompt's log-probabilities
        num_wanted = min(
            request.max_tokens - request.num_output_tokens,
            self._limits.max_model_len - request.num_tokens,
        )
        most = min(speculation.num_speculative_tokens, num_wanted - 1, plan.budget.num_left)
        return self._running.num_draft_tokens(request, most) if most > 0 else 0

    def _within_target(
        self, draft: Draft, request: Request, shape: StepShape, step_time: StepTimeModel
    ) -> Draft:
        """As much of it as lets the step end within the target for gaps, by prediction."""
        target = self._limits.target_itl_seconds
        if target is None:
            return draft
        start, num_tokens = request.num_tokens, draft.num_tokens
        while (
            num_tokens
            and step_time.predict(step_time.with_drafts(shape, start, num_tokens)) > target
        ):
            num_tokens -= 1
        return draft.cut(num_tokens)

    def undo(self, request: Request, item: ScheduledRequest) -> None:
        """A draft spoilt the request's rows of the step: they are computed again, and nothing is drafted any more."""
        request.may_draft = False
        request.num_computed_tokens = item.start
        self.settle(request, item.num_drafts, 0)

    def settle(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """A step has returned and accepted so many of the request's drafts; its tokens are known."""
        self._running.return_draft_pages(request)
        self.counters.add(num_drafts, num_accepted)
        self.drafter.observe(request, num_drafts, num_accepted)


def is_pinned(request: Request) -> bool:
    """Whether its drafts decide what is drawn, wherever the step has room for their rows: looked-up ones under `rejection`."""
    speculation = request.sampling.speculation
    return (
        speculation is not None
        and speculation.acceptance == "rejection"
        and speculation.method in ("ngram", "suffix")
    )


def _scores_prompt(request: Request) -> bool:
    """Whether rows of this step report prompt tokens, to the reader or, after a preemption, once more to nobody."""
    is_scored = request.sampling.params.prompt_logprobs is not None
    return is_scored and request.num_computed_tokens < request.num_prompt_tokens - 1
