"""The one token-budget loop: computed tokens catch up with known ones, in no phases.

Owns which requests wait and run; does not know pages' content, text, arrays or how a step is computed. The
intake says who may come in, the builder fills a step, drafts go on top. Invariant: at most one step is
in flight, and the oldest admitted request advances in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from poise.core.admission import Admission, Load
from poise.core.clock import Clock
from poise.core.drafting import DraftCounters, Drafter, Drafting
from poise.core.fairness import ServiceCounters
from poise.core.intake import Intake
from poise.core.kv_cache_manager import KVCacheManager
from poise.core.limits import Limits
from poise.core.output import (
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
)
from poise.core.policy import FCFS, Policy
from poise.core.request import Request, RequestStatus
from poise.core.reservations import Reservations
from poise.core.running import RunningRequests
from poise.core.scheduler_records import RequestUpdate, SchedulerCounters, SchedulerStats
from poise.core.step_builder import StepBuilder
from poise.core.step_results import take_result
from poise.core.step_time import StepTimeModel
from poise.core.tenant import NO_TENANTS, TenantTable
from poise.core.timeline import WaitCauses
from poise.core.waiting_queue import WaitingQueue


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
        self._in_flight: SchedulerOutput | None = None
        self._scheduled_at = 0.0
        self._counters = SchedulerCounters()
        self._wait_causes = WaitCauses(clock.now())
        self._builder = StepBuilder(
            limits,
            policy,
            kv_cache,
            waiting=self._waiting,
            running=self._running,
            reservations=self._reservations,
            served=self.served,
            step_time=self.step_time,
            counters=self._counters,
            wait_causes=self._wait_causes,
            send_back=self._send_back,
        )
        self.admission.load = self._load()

    def set_tenants(self, tenants: TenantTable) -> None:
        """Replaces the table; what runs goes on, and counts against the new one. Raises ConfigError."""
        self._reservations.set_table(tenants)
        self.served.set_tenants(tenants)
        self._kv_cache.set_tenants(tenants)

    def reset_prefix_cache(self) -> bool:
        """Makes what was computed so far no hit for anybody. False, and nothing changes, while a request runs: one
        that computes a prompt relies on what it has computed being found by those that wait for it.
        """
        if self._running:
            return False
        self._kv_cache.reset_prefix_cache()
        return True

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

    # --- building a step --------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """The next step; it has rows if any request is unfinished, else it may be dropped."""
        assert self._in_flight is None, "the last step has neither returned nor failed"
        now = self._scheduled_at = self._clock.now()
        for request in self._with_accepted:
            self._kv_cache.register_accepted(request)
        self._with_accepted.clear()
        num_waiting = len(self._waiting)
        plan = self._builder.plan(now)
        if num_waiting or len(self._waiting):
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
            if item.start < request.num_prompt_tokens:
                end = min(request.num_computed_tokens, request.num_prompt_tokens)
                self._counters.num_computed_prompt_tokens += end - item.start
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

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_blocks(self) -> int:
        return self._kv_cache.pool.num_free

    @property
    def counters(self) -> SchedulerCounters:
        """As they stand; `stats` has a copy."""
        return self._counters

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_free_blocks=self.num_free_blocks,
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
