"""What the tests of core share: a scheduler with its scripted executor, driven step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from poise.core.clock import ManualClock
from poise.core.drafting import Draft, DraftRoom
from poise.core.executors import (
    InjectedFailureError,
    ScriptedExecutor,
    scripted_draft,
    scripted_token,
)
from poise.core.kv_cache_manager import KVCacheManager
from poise.core.limits import Limits
from poise.core.output import EngineSampling, KVGroupSpec, ModelRunnerOutput, SchedulerOutput
from poise.core.policy import FCFS, Policy
from poise.core.prefix_cache import PrefixCache
from poise.core.request import Request, RequestOwner, finish_rule
from poise.core.sampling_params import SamplingParams
from poise.core.scheduler import Scheduler
from poise.core.scheduler_records import RequestUpdate
from poise.core.speculation import Speculation
from poise.core.step_time import StepShape, StepTimeModel
from poise.core.tenant import NO_TENANTS, TenantTable

FULL = (KVGroupSpec("full", 4),)
FULL_AND_SLIDING = (KVGroupSpec("full", 2), KVGroupSpec("sliding", 2, sliding_window=11))
VOCAB_SIZE = 50
OLDEST_GIVES_WAY = Policy(
    "newest first, oldest gives way",
    lambda request: -request.request_id,
    lambda running, served: 0,
)


def sampling(
    seed: int = 0, choice: int = 0, speculation: Speculation | None = None, **params: Any
) -> EngineSampling:
    resolved = SamplingParams(**params)
    stop = frozenset(resolved.stop_token_ids)
    return EngineSampling(resolved, seed, choice, stop, speculation=speculation)


class ScriptedDrafter:
    """Guesses right three times in four; `draft_model` leaves the guesses to the executor. Sometimes fewer than may be."""

    def __init__(self) -> None:
        self.unfinished: set[int] = set()
        self.observed: list[tuple[int, int, int]] = []

    def draft(
        self, rooms: Sequence[DraftRoom], shape: StepShape, step_time: StepTimeModel
    ) -> list[Draft]:
        assert shape.num_sampled >= len(rooms)
        return [self._draft(request, most) for request, most in rooms]

    def _draft(self, request: Request, most: int) -> Draft:
        assert request.sampling.speculation is not None
        assert 0 < most <= request.sampling.speculation.num_speculative_tokens
        self.unfinished.add(request.request_id)
        num_drafts = most - request.num_tokens % 2
        if request.sampling.speculation.method == "draft_model":
            return Draft(num_drafts)
        known = list(request.token_ids)
        for _ in range(num_drafts):
            known.append(
                scripted_draft(known, request.sampling, request.num_prompt_tokens, VOCAB_SIZE)
            )
        return Draft(num_drafts, tuple(known[request.num_tokens :]))

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts
        self.observed.append((request.request_id, num_drafts, num_accepted))

    def forget(self, request: Request) -> None:
        self.unfinished.discard(request.request_id)


def prefix_cache(
    block_size: int, num_groups: int = 1, identity: bytes = b"model", key: bytes = b"key"
) -> PrefixCache:
    return PrefixCache(key=key, identity=identity, block_size=block_size, num_groups=num_groups)


@dataclass
class Outcome:
    """All that one request was given."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None


class CappedScheduler(Scheduler):
    """No request gets more than `cap` tokens per step, so that owners of blocks leave budget."""

    cap = 1_000_000

    def _prefill_room(self, plan: Any, request: Request) -> int:
        return min(self.cap, super()._prefill_room(plan, request))


class Harness:
    """Adds, steps and aborts; checks every invariant after each operation."""

    def __init__(
        self,
        *,
        groups: Sequence[KVGroupSpec] = FULL,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_model_len: int = 10_000,
        caching: bool = True,
        policy: Policy = FCFS,
        tenants: TenantTable = NO_TENANTS,
        step_time: StepTimeModel | None = None,
        cap: int = 1_000_000,
        **limits: Any,
    ) -> None:
        self.clock = ManualClock()
        self.drafter = ScriptedDrafter()
        cache = prefix_cache(block_size, len(groups)) if caching else None
        self.kv_cache = KVCacheManager(groups, num_blocks, block_size, cache)
        self.scheduler = CappedScheduler(
            self.kv_cache,
            self.clock,
            Limits(max_num_seqs, max_num_batched_tokens, max_model_len, **limits),
            policy=policy,
            tenants=tenants,
            step_time=step_time,
            drafter=self.drafter,
        )
        self.scheduler.cap = cap
        self.executor = ScriptedExecutor(groups, num_blocks, block_size, VOCAB_SIZE)
        self.outcomes: dict[int, Outcome] = {}
        self.num_added = 0

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        salt: bytes = b"",
        owner: RequestOwner | None = None,
        **params: Any,
    ) -> Request:
        request = Request.create(
            self.num_added,
            prompt,
            sampling(**params),
            max_tokens,
            self.clock.now(),
            owner or RequestOwner(cache_salt=salt),
        )
        self.scheduler.add(request)
        self.num_added += 1
        self.outcomes[request.request_id] = Outcome()
        self.scheduler.check_invariants()
        return request

    def abort(self, *requests: Request) -> None:
        self.scheduler.abort([request.request_id for request in requests])
        self.scheduler.check_invariants()

    def schedule(self) -> SchedulerOutput:
        self.clock.advance(1.0)
        for request in self.scheduler.end_overdue():
            self.outcomes[request.request_id].finish_reason = "deadline"
        output = self.scheduler.schedule()
        self.scheduler.check_invariants()
        return output

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestUpdate]:
        updates = self.scheduler.update(output, result)
        self.scheduler.check_invariants()
        for update in updates:
            outcome = self.outcomes[update.request.request_id]
            assert outcome.finish_reason is None
            outcome.token_ids += update.new_token_ids
            outcome.logprobs += update.logprobs
            outcome.prompt_logprobs += update.prompt_logprobs
            outcome.finish_reason = update.finish_reason
            outcome.stop_reason = update.stop_reason
        return updates

    def step(self) -> SchedulerOutput:
        """One step; a failure that was asked for goes through fail_step."""
        output = self.schedule()
        try:
            result = self.executor.execute(output)
        except InjectedFailureError:
            self.scheduler.fail_step(output)
            self.scheduler.check_invariants()
            return output
        self.update(output, result)
        return output

    def drain(self, max_steps: int = 10_000) -> int:
        """Steps until nothing is left, proving progress; returns the number of steps."""
        for num_steps in range(max_steps):
            if not self.scheduler.has_unfinished:
                self.check_empty()
                return num_steps
            oldest = self.scheduler.running[:1]
            output = self.step()
            if not self.scheduler.has_unfinished and not output.scheduled:
                continue  # the last ones were overdue
            assert output.scheduled, "requests are unfinished, but nothing was scheduled"
            if oldest and oldest[0].finish_reason != "deadline":
                assert oldest[0].request_id in {item.request_id for item in output.scheduled}
        raise AssertionError(f"not drained after {max_steps} steps")

    def check_empty(self) -> None:
        stats = self.scheduler.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_free_blocks == stats.num_total_blocks
        assert not self.drafter.unfinished


def answer_alone(request: Request, max_model_len: int = 10_000) -> Outcome:
    """The answer that the scripted executor's rule gives, without scheduler, pages or steps."""
    prompt = request.token_ids[: request.num_prompt_tokens]
    alone = Request.create(0, prompt, request.sampling, request.max_tokens, 0.0)
    while alone.finish_reason is None:
        alone.token_ids.append(
            scripted_token(alone.token_ids, alone.sampling, len(prompt), VOCAB_SIZE)
        )
        alone.finish_reason, alone.stop_reason = finish_rule(alone, max_model_len)
    return Outcome(
        alone.output_token_ids, finish_reason=alone.finish_reason, stop_reason=alone.stop_reason
    )
