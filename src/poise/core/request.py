"""The state of one choice of one request, and the rule that ends it.

Owns tokens, progress and times. Does not know blocks' content, other requests or text: block ids
are kept here for the KV cache manager, which alone changes them. Invariant: an
unfinished request has a token left to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from poise.core.output import EngineSampling
from poise.core.tenant import DEFAULT_TENANT_NAME, ServiceClass
from poise.core.timeline import Timeline


class RequestStatus(Enum):
    """Where a request stands. Only a running one holds pages and is known to the executor."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again, keeps its output, will be recomputed
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RequestOwner:
    """Whose request this is and how urgent, as the edge has resolved it.

    Lower `priority` goes first (vLLM's sign). `deadline` is the last instant, on the engine's clock, at
    which the answer is of use. `cache_salt` decides with whom cached prefixes are shared; the
    first `num_public_tokens` prompt tokens are a named public prefix, shared by all whatever the salt.
    """

    tenant: str = DEFAULT_TENANT_NAME
    service_class: ServiceClass = "interactive"
    priority: int = 0
    deadline: float | None = None
    cache_salt: bytes = b""
    num_public_tokens: int = 0


NO_OWNER = RequestOwner()


@dataclass(slots=True, eq=False)
class Request:
    """One choice on its way through the scheduler.

        token_ids   | prompt ........................ | output .... |
                    | computed: KV in pages ... | still to compute  |
                    0                           num_computed_tokens num_tokens

    Make it with `Request.create`. `request_id` is internal and never reused. `owner` says whose it is
    and how urgent. `num_cached_tokens` are the prompt tokens taken from the prefix
    cache the first time through. Times are seconds on the scheduler's clock.
    """

    request_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: EngineSampling
    max_tokens: int
    arrival_time: float
    owner: RequestOwner

    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_prompt_logprobs: int = 0  # delivered so far: positions 1 … num_prompt_logprobs
    num_restarts: int = (
        0  # times the KV was dropped to be recomputed: preempted, or its step failed
    )
    was_charged: bool = False  # its prompt counts in its tenant's service
    predicted_first_token_time: float | None = None  # as told when it arrived
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None

    timeline: Timeline = field(default_factory=Timeline)
    num_steps: int = 0  # that gave it rows
    may_draft: bool = True  # no more where a draft's NaN has reached other rows
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0  # of these, that became tokens of the answer
    num_uncached_tokens: int = (
        0  # the last computed ones: accepted drafts, not offered to the cache yet
    )
    wait_causes: tuple[float, ...] = ()  # the scheduler's `WaitCauses` when it joined the queue
    queued_time: float = 0.0  # when it joined it, the first time or again

    block_tables: tuple[list[int], ...] = ()  # one per KV group; owned by the KV cache manager
    num_blocks: int = 0  # pages that it holds, shared ones included; kept by the KV cache manager
    block_hashes: list[bytes] = field(default_factory=list)  # of full blocks, extended when needed

    @classmethod
    def create(
        cls,
        request_id: int,
        prompt_token_ids: Sequence[int],
        sampling: EngineSampling,
        max_tokens: int,
        arrival_time: float,
        owner: RequestOwner = NO_OWNER,
    ) -> Request:
        """A request that has just arrived. `max_tokens` is the resolved limit, at least 1."""
        tokens = list(prompt_token_ids)
        return cls(request_id, tokens, len(tokens), sampling, max_tokens, arrival_time, owner)

    @property
    def tenant(self) -> str:
        return self.owner.tenant

    @property
    def priority(self) -> int:
        return self.owner.priority

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def draft_counts(self) -> dict[str, int]:
        """For its timeline: nothing where nothing was drafted."""
        if not self.num_drafted_tokens:
            return {}
        return {
            "drafted_tokens": self.num_drafted_tokens,
            "accepted_tokens": self.num_accepted_tokens,
        }

    def drop_output(self, num_dropped: int) -> None:
        """The last tokens never were: of a run of accepted drafts, before the cache has heard of it."""
        assert 0 < num_dropped <= self.num_uncached_tokens
        del self.token_ids[-num_dropped:]
        self.num_computed_tokens -= num_dropped
        self.num_uncached_tokens -= num_dropped
        self.num_accepted_tokens -= num_dropped - 1  # the last token of a run is no draft

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True while prompt positions are still to be reported: hits can't serve those."""
        return (
            self.sampling.params.prompt_logprobs is not None
            and self.num_prompt_logprobs < self.num_prompt_tokens - 1
        )

    def append_output(self, token_id: int, max_model_len: int) -> bool:
        """Takes a drawn token (a stop token is output too); True if it ends the request."""
        self.token_ids.append(token_id)
        self.finish_reason, self.stop_reason = finish_rule(self, max_model_len)
        return self.finish_reason is not None


def finish_rule(request: Request, max_model_len: int) -> tuple[str | None, int | None]:
    """(finish reason, stop reason) after the last output token, or (None, None) to go on.

    A stop token ends the answer once `min_tokens` have been made. The stop reason is the id that
    the user asked to stop at, and None for the model's own end-of-sequence token.
    """
    num_tokens = len(request.token_ids)
    num_output = num_tokens - request.num_prompt_tokens
    last, sampling = request.token_ids[-1], request.sampling
    if last in sampling.stop_token_ids and num_output >= sampling.params.min_tokens:
        return "stop", last if last in sampling.params.stop_token_ids else None
    if num_output >= request.max_tokens or num_tokens >= max_model_len:
        return "length", None
    return None, None
