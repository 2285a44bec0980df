"""Fills a step: what runs goes on, what waits comes in, and who must gives way.

Knows order (the policy's), tokens (the budget's), guarantees and quotas (the reservations') and pages, not
requests' coming and going, nor results. Invariant: a request that got rows has the pages for
them, and the oldest running request gets rows in every step.
"""

from __future__ import annotations

from typing import Final, Protocol

from poise.core.fairness import ServiceCounters
from poise.core.kv_cache_manager import BlockIds, KVCacheManager, PrefixHit
from poise.core.limits import Limits
from poise.core.policy import Policy
from poise.core.request import Request, RequestStatus
from poise.core.reservations import Pool, Reservations, TokenClaims
from poise.core.running import RunningRequests
from poise.core.scheduler_records import SchedulerCounters
from poise.core.step_budget import StepBudget
from poise.core.step_plan import StepPlan
from poise.core.step_time import StepTimeModel
from poise.core.timeline import WaitCauses
from poise.core.victims import Victims
from poise.core.waiting_queue import WaitingQueue

MOST_PASSED: Final = 32
"""Requests that a step looks at and leaves in the queue for reasons of their own before it stops."""


class SendBack(Protocol):
    """Takes a running request's pages away and puts it back in the queue."""

    def __call__(self, request: Request, now: float, because: str, **by: int) -> None: ...


class StepBuilder:
    """Works on the scheduler's queue, running requests and counters, which it is handed."""

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        kv_cache: KVCacheManager,
        *,
        waiting: WaitingQueue,
        running: RunningRequests,
        reservations: Reservations,
        served: ServiceCounters,
        step_time: StepTimeModel,
        counters: SchedulerCounters,
        wait_causes: WaitCauses,
        send_back: SendBack,
    ) -> None:
        self._limits = limits
        self._policy = policy
        self._kv_cache = kv_cache
        self._waiting = waiting
        self._running = running
        self._reservations = reservations
        self._served = served
        self._step_time = step_time
        self._counters = counters
        self._wait_causes = wait_causes
        self._send_back = send_back
        self._victims = Victims(limits, policy, served, reservations, running.requests)
        self._cohort_is_open = True

    def plan(self, now: float) -> StepPlan:
        """The next step's rows, without drafts."""
        plan = self._begin(now)
        self._schedule_running(plan)
        if len(self._waiting):
            self._wait_causes.close(now, self._schedule_waiting(plan))
        return plan

    def _preempt(self, plan: StepPlan, victim: Request, because: str, beneficiary: Request) -> None:
        self._send_back(victim, plan.now, because, by=beneficiary.request_id)
        self._counters.num_preemptions += 1
        plan.preempted = True

    def _begin(self, now: float) -> StepPlan:
        """An empty plan, or one in which reserved pools have taken what is theirs."""
        if not self._reservations:
            return StepPlan(StepBudget(self._limits, self._running.requests, self._step_time), now)
        guaranteed = self._reservations.guaranteed(self._waiting, self._running.holdings)
        claims = self._reservations.token_claims(self._running, guaranteed)
        plan = StepPlan(
            StepBudget(self._limits, self._running.requests, self._step_time, claims), now
        )
        for pool, request in guaranteed:
            self._admit_guaranteed(plan, claims, pool, request)
        return plan

    def _admit_guaranteed(
        self, plan: StepPlan, claims: TokenClaims, pool: Pool, request: Request
    ) -> None:
        """Admits a request within its pool's share, taking back what others borrow of it."""
        if self._running.holdings.sum(pool.concerns).num_sequences >= pool.num_sequences:
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
            request.num_tokens, self._limits.max_num_batched_tokens
        )
        is_covered = self._running.holdings.sum(pool.concerns).num_blocks + need <= pool.num_blocks
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
        if self._policy.cohorts:
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
            self._reservations.quotas
            and self._running.holdings.tenant(request.tenant).num_sequences
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
        most = self._limits.max_num_partial_prefills
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
            if self._policy.fair:
                num_to_compute = request.num_prompt_tokens - request.num_computed_tokens
                self._served.charge(request.tenant, num_to_compute, 0)
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
