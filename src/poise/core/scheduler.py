"""The one token-budget loop: computed tokens catch up with known ones, in no phases.

Owns which requests wait and run; does not know pages' content, text, arrays or how a step is computed.
Asks and acts: order is the policy's, a step's tokens are the budget's, guarantees and quotas are the
reservations', and the intake says who may come in. Invariant: at most one step is in flight, and the
oldest admitted request advances in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from poise.core.admission import Admission, Load
from poise.core.clock import Clock
from poise.core.drafting import DraftCounters, Drafter, Drafting
from poise.core.fairness import ServiceCounters
from poise.core.intake import Intake
from poise.core.kv_cache_manager import BlockIds, KVCacheManager, PrefixHit
from poise.core.limits import Limits
from poise.core.output import (
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
)
from poise.core.policy import FCFS, Policy
from poise.core.request import Request, RequestStatus
from poise.core.reservations import Pool, Reservations, TokenClaims
from poise.core.running import RunningRequests
from poise.core.scheduler_records import RequestUpdate, SchedulerCounters, SchedulerStats
from poise.core.step_budget import StepBudget
from poise.core.step_plan import StepPlan
from poise.core.step_results import take_result
from poise.core.step_time import StepTimeModel
from poise.core.tenant import NO_TENANTS, TenantTable
from poise.core.timeline import WaitCauses
from poise.core.victims import Victims
from poise.core.waiting_queue import WaitingQueue

MOST_PASSED: Final = 32
"""Requests that a step looks at and leaves in the queue for reasons of their own before it stops."""


class Scheduler:
    """Requests in, steps out.

    loop:  add / abort  ->  schedule()  ->  Executor.execute()  ->  update(), or fail_step()

    `step_time` predicts steps and learns from them; `drafter` drafts for requests that ask for speculation,
    nobody does without one. Raises ConfigError for a table of tenants that
    promises more than there is.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        clock: Clock,
        limits: Limits,
        *,
        policy: Policy = FCFS,
        tenants: TenantTable = NO_TENANTS,
        step_time: StepTimeModel | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.limits = limits
        self.policy = policy
        self.step_time = step_time or StepTimeModel()
        self.admission = Admission(limits, self.step_time)
        self.served = ServiceCounters(tenants)
        self._kv_cache = kv_cache
        kv_cache.set_tenants(tenants)
        self._clock = clock
        self._requests: dict[int, Request] = {}  # all that are unfinished
        self._waiting = WaitingQueue(policy, self.served)
        self._reservations = Reservations(
            tenants,
            num_sequences=limits.max_num_running,
            num_tokens=limits.max_num_batched_tokens,
            num_blocks=kv_cache.pool.num_blocks,
        )
        self._running = RunningRequests(kv_cache, limits, self._reservations)
        self.holdings = self._running.holdings
        self._drafting = None if drafter is None else Drafting(self._running, limits, drafter)
        self._with_accepted: list[
            Request
        ] = []  # whose accepted drafts the cache has not been offered
        self._intake = Intake(limits, kv_cache, self._reservations, self.admission)
        self._victims = Victims(
            limits, policy, self.served, self._reservations, self._running.requests
        )
        self._in_flight: SchedulerOutput | None = None
        self._scheduled_at = 0.0
        self._cohort_is_open = True
        self._counters = SchedulerCounters()
        self._wait_causes = WaitCauses(clock.now())
        self.admission.load = self._load()

    def set_tenants(self, tenants: TenantTable) -> None:
        """Replaces the table; what runs goes on, and counts against the new one. Raises ConfigError."""
        self._reservations.set_table(tenants)
        self.served.set_tenants(tenants)
        self._kv_cache.set_tenants(tenants)

    def reset_prefix_cache(self) -> None:
        """Between steps: what was computed so far is no hit for anybody from now on."""
        assert self._in_flight is None, "a step is in flight"
        self._kv_cache.reset_prefix_cache()

    # --- requests come and go ---------------------------------------------------------------------

    def add(self, *requests: Request) -> None:
        """Queues the choices of one request, which are alike: all of them or none.

        Raises InvalidRequestError if they could never fit, QueueFullError if too much is waiting, and
        DeadlineError if they would miss their deadline.
        """
        now = self._clock.now()
        forecast = self._intake.check(requests, now, self._load())
        for request in requests:
            assert request.status is RequestStatus.WAITING
            assert request.request_id not in self._requests, f"id {request.request_id} is in use"
            request.predicted_first_token_time = now + forecast.first_token
            request.timeline.add(
                request.arrival_time,
                "arrived",
                prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.max_tokens,
                tenant=request.tenant,
                num_waiting=len(self._waiting),
                predicted_first_token_seconds=now - request.arrival_time + forecast.first_token,
            )
            self.admission.drain.arrived(request.num_prompt_tokens)
            self._requests[request.request_id] = request
            self._queue(request, now, is_new=True)
        self.admission.load = self._load()

    def _queue(self, request: Request, now: float, *, is_new: bool) -> None:
        self._waiting.add(request, is_new)
        request.queued_time = request.arrival_time if is_new else now
        request.wait_causes = self._wait_causes.snapshot(now)

    def _load(self) -> Load:
        to_compute = [r.num_tokens - r.num_computed_tokens for r in self._running]
        return Load(
            num_running=len(self._running),
            num_running_prompt_tokens=sum(n for n in to_compute if n > 1),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_tokens,
            num_known_tokens=sum(r.num_tokens for r in self._running),
            num_pool_tokens=self._kv_cache.num_pool_tokens,
        )

    def abort(self, request_ids: Iterable[int], reason: str = "abort") -> list[Request]:
        """Ends requests in any state, also while a step runs; returns those it ended."""
        ended = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, reason)
                ended.append(request)
        return ended

    def end_at(self, request_id: int, num_output_tokens: int) -> None:
        """Ends an answer where its reader stops it: the tokens after the first `num_output_tokens` never were."""
        request = self._requests[request_id]
        num_dropped = request.num_output_tokens - num_output_tokens
        if num_dropped > 0:
            request.drop_output(num_dropped)
            self._counters.num_output_tokens -= num_dropped
            if self.policy.fair:
                self.served.charge(request.tenant, 0, -num_dropped)
        self._finish(request, "stop")

    def end_overdue(self) -> list[Request]:
        """Ends the requests whose deadline has passed, in any state; returns those it ended."""
        if not self._intake.has_deadlines:
            return []
        overdue = self._intake.overdue(self._clock.now())
        running = {request.request_id for request in self._running}
        ended = self.abort(overdue, "deadline")
        for request in ended:
            where = "running" if request.request_id in running else "queued"
            self.admission.count("dropped", f"deadline_{where}")
        return ended

    def _finish(self, request: Request, reason: str) -> None:
        if request.status is RequestStatus.RUNNING:
            self._kv_cache.register_accepted(request)
            self._running.leave(request)
        else:
            self._waiting.remove(request)
            self.admission.load = self._load()
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        if self._drafting is not None:
            self._drafting.drafter.forget(request)
        if reason in ("stop", "length"):
            self.admission.drain.finished(request.num_output_tokens)
        request.timeline.add(
            self._clock.now(),
            "finished",
            reason=reason,
            output_tokens=request.num_output_tokens,
            steps=request.num_steps,
            **request.draft_counts(),
        )

    def _send_back(self, request: Request, now: float, because: str, **by: int) -> None:
        """To the queue with its output; its KV will be found or recomputed."""
        request.timeline.add(now, "preempted", because=because, **by)
        self._running.leave(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_restarts += 1
        self._queue(request, now, is_new=False)

    def _preempt(self, plan: StepPlan, victim: Request, because: str, beneficiary: Request) -> None:
        self._send_back(victim, plan.now, because, by=beneficiary.request_id)
        self._counters.num_preemptions += 1
        plan.preempted = True

    # --- building a step --------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """The next step; it has rows if any request is unfinished, else it may be dropped."""
        assert self._in_flight is None, "the last step has neither returned nor failed"
        plan = self._begin_step()
        self._schedule_running(plan)
        if len(self._waiting):
            self._wait_causes.close(plan.now, self._schedule_waiting(plan))
            self.admission.load = self._load()
        if self._drafting is not None:
            self._drafting.add_to(plan, self.step_time)
        if not plan.scheduled:
            return SchedulerOutput(self._counters.num_steps, (), (), (), 0)
        output = plan.output(self._counters.num_steps, self._running.removed)
        self._running.removed.clear()
        self._counters.num_steps += 1
        self.holdings.end_step()
        self._in_flight = output
        return output

    def _begin_step(self) -> StepPlan:
        """An empty plan, or one in which reserved pools have taken what is theirs."""
        now = self._scheduled_at = self._clock.now()
        for request in self._with_accepted:
            self._kv_cache.register_accepted(request)
        self._with_accepted.clear()
        if not self._reservations:
            return StepPlan(StepBudget(self.limits, self._running.requests, self.step_time), now)
        guaranteed = self._reservations.guaranteed(self._waiting, self.holdings)
        claims = self._reservations.token_claims(self._running, guaranteed)
        plan = StepPlan(
            StepBudget(self.limits, self._running.requests, self.step_time, claims), now
        )
        for pool, request in guaranteed:
            self._admit_guaranteed(plan, claims, pool, request)
        return plan

    def _admit_guaranteed(
        self, plan: StepPlan, claims: TokenClaims, pool: Pool, request: Request
    ) -> None:
        """Admits a request within its pool's share, taking back what others borrow of it."""
        if self.holdings.sum(pool.concerns).num_sequences >= pool.num_sequences:
            return  # one that is in two pools has taken the place
        if self._running.is_full:
            victim = self._victims.to_take_back("num_sequences", plan.scheduled)
            if victim is None:
                return
            self._preempt(plan, victim, "reservation", request)
        hit, num_tokens = self._next_tokens(plan, request)
        num_tokens = min(num_tokens, max(claims.held_for(request), plan.budget.num_left // 2))
        if num_tokens == 0:
            return
        need = self._kv_cache.num_blocks_needed(
            request.num_tokens, self.limits.max_num_batched_tokens
        )
        is_covered = self.holdings.sum(pool.concerns).num_blocks + need <= pool.num_blocks
        while not self._running.fits(request, hit, self._running.next_need_of_oldest()):
            victim = (
                self._victims.to_take_back("num_blocks", plan.scheduled) if is_covered else None
            )
            if victim is None:
                return
            self._preempt(plan, victim, "reservation", request)
        self._admit(plan, request, num_tokens, hit)
        self._waiting.remove(request)

    def _schedule_running(self, plan: StepPlan) -> None:
        for request in tuple(self._running):
            if plan.budget.num_left == 0:
                break
            if request.status is not RequestStatus.RUNNING or request.request_id in plan.scheduled:
                continue  # preempted for an earlier one, or admitted in this step
            hit, num_tokens, is_prefill = None, 1, False
            if len(request.token_ids) - request.num_computed_tokens > 1:
                hit, num_tokens = self._next_tokens(plan, request)
                is_prefill = True
                if num_tokens == 0:
                    continue  # no tokens are left for prompts, or its next block is being computed
            new_block_ids = self._take_pages(plan, request, num_tokens, hit)
            if new_block_ids is not None:
                self._count_hit(request, hit)
                self._kv_cache.register_scheduled(request, num_tokens)
                plan.grant(request, num_tokens, new_block_ids, is_prefill)

    def _take_pages(
        self, plan: StepPlan, request: Request, num_tokens: int, hit: PrefixHit | None
    ) -> BlockIds | None:
        """Pages for a running request, others preempted if need be; None if it had to go itself."""
        if self._reservations.quotas:
            start = request.num_computed_tokens if hit is None else hit.end
            if not self._keep_quota(plan, request, start + num_tokens):
                return None
        while (new_block_ids := self._running.take_pages(request, num_tokens, hit)) is None:
            victim = self._victims.for_pages(plan.scheduled)
            assert victim is not None, "a lone request has too few pages"
            self._preempt(plan, victim, "kv_blocks", request)
            if victim is request:
                return None
        return new_block_ids

    def _keep_quota(self, plan: StepPlan, request: Request, end: int) -> bool:
        """Makes a tenant's newest requests give way if it would pass its quota; False if this one did."""
        while self._running.passes_quota(request, end):
            victim = self._victims.for_quota(request.tenant, plan.scheduled)
            if victim is None:
                return True  # alone, and let in when the quota was larger
            self._preempt(plan, victim, "kv_quota", request)
            if victim is request:
                return False
        return True

    def _schedule_waiting(self, plan: StepPlan) -> str:
        """Admits those in front; returns what stopped it (one of WAIT_CAUSES)."""
        if plan.preempted:
            return "preemption"
        if self.policy.cohorts:
            self._cohort_is_open = self._cohort_is_open or not self._running
            if not self._cohort_is_open:
                return "cohort"
        admitted: list[Request] = []
        skipped: set[str] = set()
        num_passed = 0
        cause = "step"
        for request in self._waiting.in_order(skipped):
            refusal, is_final = self._try_to_admit(plan, request, skipped)
            if refusal is None:
                admitted.append(request)
                continue
            request.timeline.add_held(plan.now, refusal)
            num_passed += 1
            if is_final or num_passed == MOST_PASSED:
                cause = refusal
                break
        for request in admitted:
            self._waiting.remove(request)
        self._cohort_is_open = self._cohort_is_open and cause == "tokens"
        return cause

    def _try_to_admit(
        self, plan: StepPlan, request: Request, skipped: set[str]
    ) -> tuple[str | None, bool]:
        """(None, …) if it was admitted, else why not and whether this keeps out everybody behind it."""
        if self._running.is_full:
            return "sequences", True
        if not plan.budget.has_prefill_left:
            return "tokens", True
        owner_runs = (
            self._reservations.quotas and self.holdings.tenant(request.tenant).num_sequences
        )
        if owner_runs and self._running.passes_quota(request, request.num_tokens):
            skipped.add(request.tenant)
            return "kv_quota", False
        hit, num_tokens = self._next_tokens(plan, request)
        if num_tokens == 0:
            return (
                "shared_prefix",
                False,
            )  # it is being computed; others may pass until that is done
        start = 0 if hit is None else hit.end
        if start + num_tokens < request.num_tokens and self._has_enough_partial_prefills(plan):
            return "partial_prefills", False
        if not self._running.fits(request, hit):
            return "kv_blocks", True
        self._admit(plan, request, num_tokens, hit)
        return None, False

    def _has_enough_partial_prefills(self, plan: StepPlan) -> bool:
        most = self.limits.max_num_partial_prefills
        return most is not None and sum(map(plan.is_partial, self._running)) >= most

    def _next_tokens(self, plan: StepPlan, request: Request) -> tuple[PrefixHit | None, int]:
        """What the cache has for a prompt, and how many tokens to compute after that."""
        room = self._prefill_room(plan, request)
        if room == 0:
            return None, 0
        hit = self._kv_cache.lookup(request)
        start = request.num_computed_tokens if hit is None else hit.end
        num_tokens = min(request.num_tokens - start, room)
        return hit, self._kv_cache.num_unclaimed_tokens(request, start, num_tokens)

    def _prefill_room(self, plan: StepPlan, request: Request) -> int:
        is_shared = len(self._waiting) + len(self._running) > 1
        return plan.budget.for_prefill(request, is_shared=is_shared)

    def _admit(
        self, plan: StepPlan, request: Request, num_tokens: int, hit: PrefixHit | None
    ) -> None:
        """Among the running requests, with its first rows; the caller takes it out of the queue."""
        self._running.enter(request, num_tokens, hit)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = plan.now
            if self.policy.fair:
                num_to_compute = request.num_prompt_tokens - request.num_computed_tokens
                self.served.charge(request.tenant, num_to_compute, 0)
        request.timeline.add(
            plan.now,
            "admitted",
            cached_tokens=request.num_computed_tokens,
            waited_seconds=plan.now - request.queued_time,
            waited_for=self._waited_for(request, plan.now),
        )
        self._counters.num_prefix_query_tokens += request.num_tokens
        self._counters.num_prefix_bypasses += request.needs_prompt_logprobs
        self._count_hit(request, hit)
        plan.add_new(request)
        self._kv_cache.register_scheduled(request, num_tokens)
        plan.grant(request, num_tokens, self._kv_cache.no_blocks, is_prefill=True)

    def _count_hit(self, request: Request, hit: PrefixHit | None) -> None:
        if hit is not None:
            self._counters.num_prefix_hit_tokens += hit.end - hit.start
            if request.num_restarts == 0:
                request.num_cached_tokens += hit.end - hit.start

    def _waited_for(self, request: Request, now: float) -> dict[str, float]:
        """Seconds by cause; what passed between arrival and queue was some step's."""
        causes = self._wait_causes.since(request.wait_causes, now)
        rest = now - request.queued_time - sum(causes.values())
        if rest > 0:
            causes["step"] = causes.get("step", 0.0) + rest
        return causes

    # --- taking a step's result -------------------------------------------------------------------

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestUpdate]:
        """Takes what the executor made of `output`; requests aborted meanwhile are skipped."""
        self._end_step(output)
        spoilt = {request_id for request_id, drawn in result.token_ids.items() if not drawn}
        self._kv_cache.confirm_step(result.broken | spoilt)
        now = self._clock.now()
        self._learn(output, now - self._scheduled_at - result.draft_seconds)
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

    def _learn(self, output: SchedulerOutput, seconds: float) -> None:
        """What the step took, but for making drafts, teaches the time model."""
        if output.scheduled:
            self.step_time.observe(self.step_time.shape_of(output.scheduled), seconds)

    def fail_step(self, output: SchedulerOutput) -> list[Request]:
        """The step raised, nothing of it counts: its requests go back to the queue.

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
        for request in requests:
            self._send_back(request, now, "failed_step")
        return requests

    def _end_step(self, output: SchedulerOutput) -> None:
        assert self._in_flight is output or not output.scheduled, "this step is not in flight"
        self._in_flight = None

    def _advance(
        self, request: Request, item: ScheduledRequest, result: ModelRunnerOutput, now: float
    ) -> RequestUpdate | None:
        if request.request_id in result.broken:
            self._counters.num_broken_requests += 1
            self._kv_cache.forget_content(request)
            self._finish(request, "error")
            return RequestUpdate(request, (), finish_reason="error")
        if item.samples and not result.token_ids[request.request_id]:
            assert self._drafting is not None, "nothing but a draft spoils a step"
            self._drafting.undo(request, item)
            return None
        update = take_result(request, item, result, self.limits.max_model_len)
        if update is None or not item.samples:
            return update
        num_taken = len(update.new_token_ids)
        if item.num_drafts:
            num_accepted = len(result.token_ids[request.request_id]) - 1
            self._settle_drafts(request, item, num_accepted)
        self._counters.num_output_tokens += num_taken
        if self.policy.fair:
            self.served.charge(request.tenant, 0, num_taken)
        if request.first_token_time is None:
            request.first_token_time = now
            request.timeline.add(now, "first_token")
            self.admission.first_token(request, now)
        if update.finish_reason is not None:
            self._finish(request, update.finish_reason)
        return update

    def _settle_drafts(self, request: Request, item: ScheduledRequest, num_accepted: int) -> None:
        """All tokens but the last have their KV: those of accepted drafts are offered to the cache when the
        reader has had a chance to stop the answer at one of them.
        """
        assert self._drafting is not None
        num_before = request.num_computed_tokens
        request.num_computed_tokens = request.num_tokens - 1
        request.num_uncached_tokens = request.num_computed_tokens - num_before
        if request.num_uncached_tokens:
            self._with_accepted.append(request)
        self._drafting.settle(request, item.num_drafts, num_accepted)

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
        return tuple(self._waiting.in_order())

    @property
    def draft_counters(self) -> DraftCounters:
        return DraftCounters() if self._drafting is None else self._drafting.counters

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
        waiting = [request.request_id for request in self.waiting]
        assert len(running) == len(self._running)
        assert len(waiting) == len(set(waiting)) == len(self._waiting)
        assert not running & set(waiting)
        assert running | set(waiting) == set(self._requests)
        self._waiting.check_invariants()
        for request in self._requests.values():
            is_running = request.request_id in running
            assert (request.status is RequestStatus.RUNNING) == is_running
            assert request.num_computed_tokens < request.num_tokens
            if not is_running:
                assert request.num_computed_tokens == 0
                assert not request.block_tables
        self._running.check_invariants()
