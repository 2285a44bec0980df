"""The one token-budget loop: computed tokens catch up with known ones, in no phases.

Owns which requests wait and run, and in what order; does not know pages' content, text, arrays or
how a step is computed. Invariant: at most one step is in flight, and the oldest admitted request
advances in every step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from poise.core.clock import Clock
from poise.core.kv_cache_manager import BlockIds, KVCacheManager, PrefixHit
from poise.core.output import (
    ModelRunnerOutput,
    NewRequest,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from poise.core.policy import FCFS, Policy
from poise.core.request import Request, RequestStatus
from poise.core.timeline import WaitCauses
from poise.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What one step gave one request. `logprobs` go with `new_token_ids` where they were asked for.

    `prompt_logprobs` are for the prompt positions that follow those delivered before.
    `finish_reason` is stop, length or error; aborted requests get no update.
    """

    request: Request
    new_token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start. Tokens recomputed after a restart count again."""

    num_steps: int = 0
    num_prefix_query_tokens: int = 0  # known tokens of each request at each admission
    num_prefix_hit_tokens: int = 0  # of these, taken from the cache
    num_prefix_bypasses: int = 0  # admissions that ignored hits for the sake of prompt_logprobs
    num_preemptions: int = 0
    num_computed_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_failed_steps: int = 0
    num_broken_requests: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot: gauges and totals. Pages that only hold cached content count as free."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_total_blocks: int
    counters: SchedulerCounters

    @property
    def kv_cache_usage(self) -> float:
        """Share of pages that running requests hold, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_total_blocks


@dataclass(slots=True)
class _StepPlan:
    """The step being built."""

    budget: int
    now: float
    new_requests: list[NewRequest] = field(default_factory=list)
    scheduled: dict[int, ScheduledRequest] = field(default_factory=dict)
    preempted: bool = False


class Scheduler:
    """Requests in, steps out.

    loop:  add / abort  ->  schedule()  ->  Executor.execute()  ->  update(), or fail_step()

    At most `max_num_seqs` requests run, and no more than a step has tokens, so that each running
    one gets at least one token per step.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        clock: Clock,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: Policy = FCFS,
    ) -> None:
        assert min(max_num_seqs, max_num_batched_tokens, max_model_len) > 0
        self._kv_cache = kv_cache
        self._clock = clock
        self._max_num_running = min(max_num_seqs, max_num_batched_tokens)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._policy = policy
        self._requests: dict[int, Request] = {}  # all that are unfinished
        self._waiting: OrderedDict[int, Request] = OrderedDict()  # preempted ones in front
        self._running: list[Request] = []  # in order of admission
        self._removed: list[int] = []  # left `_running` since the executor was last told
        self._in_flight: SchedulerOutput | None = None
        self._counters = SchedulerCounters()
        self._wait_causes = WaitCauses(clock.now())

    # --- requests come and go ---------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequestError if it could never fit."""
        self._refuse_if_never_fits(request.num_prompt_tokens, request.max_tokens)
        assert request.status is RequestStatus.WAITING
        assert request.request_id not in self._requests, f"id {request.request_id} is in use"
        request.timeline.add(
            request.arrival_time,
            "arrived",
            prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            tenant=request.tenant,
            num_waiting=len(self._waiting),
        )
        self._requests[request.request_id] = request
        self._waiting[request.request_id] = request
        self._begin_wait(request, self._clock.now())

    def _begin_wait(self, request: Request, now: float) -> None:
        request.queued_time = now
        request.wait_causes = self._wait_causes.snapshot(now)

    def _refuse_if_never_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        if num_prompt_tokens == 0:
            raise InvalidRequestError("the prompt has no tokens; send at least one", "prompt")
        num_tokens = num_prompt_tokens + max_tokens
        asked = (
            f"{num_prompt_tokens} prompt tokens + {max_tokens} output tokens = {num_tokens} tokens"
        )
        if num_tokens > self._max_model_len:
            raise InvalidRequestError(
                f"{asked} exceed the context of {self._max_model_len}; "
                "shorten the prompt or lower max_tokens",
                "max_tokens" if num_prompt_tokens < self._max_model_len else "prompt",
                "context_length_exceeded",
            )
        need = self._kv_cache.num_blocks_needed(num_tokens, self._max_num_batched_tokens)
        num_blocks = self._kv_cache.pool.num_blocks
        if need > num_blocks:
            raise InvalidRequestError(
                f"{asked} need {need} KV blocks of {self._kv_cache.block_size} tokens, the cache "
                f"has {num_blocks}; shorten the prompt, lower max_tokens or enlarge the KV cache",
                "max_tokens",
                "context_length_exceeded",
            )

    def abort(self, request_ids: Iterable[int], reason: str = "abort") -> list[Request]:
        """Ends requests in any state, also while a step runs; returns those it ended."""
        aborted = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, reason)
                aborted.append(request)
        return aborted

    def _finish(self, request: Request, reason: str) -> None:
        if request.status is RequestStatus.RUNNING:
            self._leave_running(request)
        else:
            del self._waiting[request.request_id]
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.timeline.add(
            self._clock.now(),
            "finished",
            reason=reason,
            output_tokens=request.num_output_tokens,
            steps=request.num_steps,
        )

    def _leave_running(self, request: Request) -> None:
        self._running.remove(request)
        self._removed.append(request.request_id)
        self._kv_cache.free(request)

    def _send_back(self, request: Request, now: float, because: str, **by: int) -> None:
        """To the front of the queue with its output; its KV will be found or recomputed."""
        request.timeline.add(now, "preempted", because=because, **by)
        self._begin_wait(request, now)
        self._leave_running(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_restarts += 1
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)

    # --- building a step --------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """The next step; it has rows if any request is unfinished, else it may be dropped."""
        assert self._in_flight is None, "the last step has neither returned nor failed"
        plan = _StepPlan(self._max_num_batched_tokens, self._clock.now())
        self._schedule_running(plan)
        if self._waiting:
            self._wait_causes.close(plan.now, self._schedule_waiting(plan))
        if not plan.scheduled:
            return SchedulerOutput(self._counters.num_steps, (), (), (), 0)
        output = SchedulerOutput(
            step=self._counters.num_steps,
            removed_request_ids=tuple(self._removed),
            new_requests=tuple(plan.new_requests),
            scheduled=tuple(plan.scheduled.values()),
            num_tokens=self._max_num_batched_tokens - plan.budget,
        )
        self._removed.clear()
        self._counters.num_steps += 1
        self._in_flight = output
        return output

    def _schedule_running(self, plan: _StepPlan) -> None:
        for request in tuple(self._running):
            if plan.budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an earlier one
            hit, num_tokens = self._next_tokens(request, plan.budget)
            if num_tokens == 0:
                continue  # waits for a block that another request is about to compute
            new_block_ids = self._kv_cache.allocate(request, num_tokens, hit)
            while new_block_ids is None and self._preempt_one(plan, request) is not request:
                new_block_ids = self._kv_cache.allocate(request, num_tokens, hit)
            if new_block_ids is not None:
                self._grant(plan, request, num_tokens, hit, new_block_ids)

    def _schedule_waiting(self, plan: _StepPlan) -> str:
        """Admits those in front; returns what stopped it (one of WAIT_CAUSES)."""
        if plan.preempted:
            return "preemption"
        admitted: list[Request] = []
        cause = "step"
        for request_id in self._policy.order_waiting(self._waiting.values()):
            request = self._waiting[request_id]
            if len(self._running) >= self._max_num_running:
                cause = "sequences"
            elif plan.budget == 0:
                cause = "tokens"
            if cause != "step":
                request.timeline.add_held(plan.now, cause)
                break
            hit, num_tokens = self._next_tokens(request, plan.budget)
            if num_tokens == 0:
                request.timeline.add_held(plan.now, "shared_prefix")
                continue  # its prefix is being computed; others may pass until that is done
            if not self._kv_cache.fits_now(request, hit, self._max_num_batched_tokens):
                cause = "kv_blocks"
                request.timeline.add_held(plan.now, cause)
                break  # nobody passes a request that waits for pages
            new_block_ids = self._kv_cache.allocate(request, num_tokens, hit)
            assert new_block_ids is not None, "fits_now promised pages"
            self._admit(plan, request)
            self._grant(plan, request, num_tokens, hit, self._kv_cache.no_blocks)
            admitted.append(request)
        for request in admitted:
            del self._waiting[request.request_id]
        return cause

    def _next_tokens(self, request: Request, budget: int) -> tuple[PrefixHit | None, int]:
        """What the cache has for the request, and how many tokens to compute after that."""
        start = request.num_computed_tokens
        if request.num_tokens - start == 1:
            return None, 1
        hit = self._kv_cache.lookup(request)
        if hit is not None:
            start = hit.end
        num_tokens = min(request.num_tokens - start, budget)
        return hit, self._kv_cache.num_unclaimed_tokens(request, start, num_tokens)

    def _preempt_one(self, plan: _StepPlan, beneficiary: Request) -> Request:
        """Frees a victim's pages, whatever the policy never those of
        - a request that has rows in this step: others may have hit what it is about to compute;
        - the oldest admitted one: it always advances (`add` made sure that it fits the pool).
        """
        candidates = [r for r in self._running[1:] if r.request_id not in plan.scheduled]
        assert candidates, "a lone request has too few pages"
        victim = candidates[self._policy.choose_victim(candidates)]
        self._send_back(victim, plan.now, "kv_blocks", by=beneficiary.request_id)
        self._counters.num_preemptions += 1
        plan.preempted = True
        return victim

    def _admit(self, plan: _StepPlan, request: Request) -> None:
        """From the queue to the running requests; its pages are allocated, the hit taken."""
        if request.first_scheduled_time is None:
            request.first_scheduled_time = plan.now
        request.status = RequestStatus.RUNNING
        self._running.append(request)
        request.timeline.add(
            plan.now,
            "admitted",
            cached_tokens=request.num_computed_tokens,
            waited_seconds=plan.now - request.queued_time,
            waited_for=self._wait_causes.since(request.wait_causes, plan.now),
        )
        self._counters.num_prefix_query_tokens += request.num_tokens
        self._counters.num_prefix_bypasses += request.needs_prompt_logprobs
        plan.new_requests.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=tuple(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                block_tables=tuple(tuple(table) for table in request.block_tables),
            )
        )

    def _grant(
        self,
        plan: _StepPlan,
        request: Request,
        num_tokens: int,
        hit: PrefixHit | None,
        new_block_ids: BlockIds,
    ) -> None:
        """Rows for a running request whose pages are allocated and whose hit is taken."""
        if hit is not None:
            self._counters.num_prefix_hit_tokens += hit.end - hit.start
            if request.num_restarts == 0:
                request.num_cached_tokens += hit.end - hit.start
        self._kv_cache.register_scheduled(request, num_tokens)
        start = request.num_computed_tokens
        request.num_steps += 1
        if request.num_tokens - start > 1:
            request.timeline.add_prefill(plan.now, start, num_tokens)
        plan.scheduled[request.request_id] = ScheduledRequest(
            request_id=request.request_id,
            start=start,
            num_tokens=num_tokens,
            new_block_ids=new_block_ids,
            samples=start + num_tokens == request.num_tokens,
        )
        plan.budget -= num_tokens

    # --- taking a step's result -------------------------------------------------------------------

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestUpdate]:
        """Takes what the executor made of `output`; requests aborted meanwhile are skipped."""
        self._end_step(output)
        self._kv_cache.confirm_step(result.broken)
        now = self._clock.now()
        updates = []
        for item in output.scheduled:
            request = self._requests.get(item.request_id)
            if request is None:
                continue
            request.num_computed_tokens = item.start + item.num_tokens
            self._counters.num_computed_prompt_tokens += max(
                0, min(request.num_computed_tokens, request.num_prompt_tokens) - item.start
            )
            update = self._advance(request, item, result, now)
            if update is not None:
                updates.append(update)
        return updates

    def fail_step(self, output: SchedulerOutput) -> list[Request]:
        """The step raised, nothing of it counts: its requests go back to the front of the queue.

        Returns them in order; which of them to abort is the engine's decision.
        """
        self._end_step(output)
        self._kv_cache.discard_step()
        self._counters.num_failed_steps += 1
        requests = [
            self._requests[item.request_id]
            for item in output.scheduled
            if item.request_id in self._requests
        ]
        now = self._clock.now()
        for request in reversed(requests):
            self._send_back(request, now, "failed_step")
        return requests

    def _end_step(self, output: SchedulerOutput) -> None:
        assert self._in_flight is output or not output.scheduled, "this step is not in flight"
        self._in_flight = None

    def _advance(
        self, request: Request, item: ScheduledRequest, result: ModelRunnerOutput, now: float
    ) -> RequestUpdate | None:
        request_id = item.request_id
        if request_id in result.broken:
            self._counters.num_broken_requests += 1
            self._kv_cache.forget_content(request)
            self._finish(request, "error")
            return RequestUpdate(request, (), finish_reason="error")
        prompt_logprobs = self._new_prompt_logprobs(request, item, result)
        if not item.samples:
            return RequestUpdate(request, (), (), prompt_logprobs) if prompt_logprobs else None
        drawn = result.token_ids[request_id]
        num_taken = 0
        finished = False
        while num_taken < len(drawn) and not finished:
            finished = request.append_output(drawn[num_taken], self._max_model_len)
            num_taken += 1
        self._counters.num_output_tokens += num_taken
        if request.first_token_time is None:
            request.first_token_time = now
            request.timeline.add(now, "first_token")
        if finished:
            assert request.finish_reason is not None
            self._finish(request, request.finish_reason)
        return RequestUpdate(
            request,
            drawn[:num_taken],
            result.logprobs.get(request_id, ())[:num_taken],
            prompt_logprobs,
            request.finish_reason,
            request.stop_reason,
        )

    def _new_prompt_logprobs(
        self, request: Request, item: ScheduledRequest, result: ModelRunnerOutput
    ) -> Sequence[TokenLogprobs]:
        """Those not delivered before a restart: the row at position p reports position p + 1."""
        entries = result.prompt_logprobs.get(item.request_id, ())
        fresh = entries[max(0, request.num_prompt_logprobs - item.start) :]
        request.num_prompt_logprobs += len(fresh)
        return fresh

    # --- what others may see ----------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def running(self) -> Sequence[Request]:
        """Running requests, oldest admission first."""
        return tuple(self._running)

    @property
    def waiting(self) -> Sequence[Request]:
        """The queue, next in line first."""
        return tuple(self._waiting.values())

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_blocks=self._kv_cache.pool.num_free,
            num_total_blocks=self._kv_cache.pool.num_blocks,
            counters=replace(self._counters),
        )

    def check_invariants(self) -> None:
        """Recomputes what must always hold, down to every page (tests, and a server at idle)."""
        running = {request.request_id for request in self._running}
        assert len(running) == len(self._running) <= self._max_num_running
        assert not running & set(self._waiting)
        assert running | set(self._waiting) == set(self._requests)
        for request in self._requests.values():
            is_running = request.request_id in running
            assert (request.status is RequestStatus.RUNNING) == is_running
            assert request.num_computed_tokens < request.num_tokens
            if not is_running:
                assert request.num_computed_tokens == 0
                assert not request.block_tables
        self._kv_cache.check_invariants(self._running)
