"""The synchronous engine: requests in, one step at a time, deltas out.

Owns the scheduler, the executor, the tokenizer and the output state of every request; one thread at
a time may call it. Does not know event loops or HTTP. Invariant: a request leaves the scheduler in
the step in which its answer ends, so its KV blocks are free before the next step is scheduled; a
step that fails ends the requests in it and no others.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from poise.core.clock import Clock
from poise.core.output import Executor, SchedulerOutput
from poise.core.request import Request
from poise.core.scheduler import Scheduler
from poise.core.scheduler_records import RequestUpdate
from poise.core.speculation import SpeculationOffer
from poise.core.step_time import StepTimeModel
from poise.core.tenant import TenantTable
from poise.engine.client import ChoiceDelta, EngineInfo, EngineRequest, RequestDelta, RequestStats
from poise.engine.input_processor import InputProcessor
from poise.engine.metrics import EngineMetrics
from poise.engine.output_processor import ChoiceOutput
from poise.engine.profile import EngineProfile, ProfilingExecutor, StepTimes
from poise.engine.request_state import Choice, RequestState
from poise.engine.timelines import KeptTimelines
from poise.errors import EngineDeadError, InvalidRequestError
from poise.executor.profile import ExecutorProfile
from poise.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_CONSECUTIVE_FAILURES = 3
NO_SPECULATION = SpeculationOffer(methods=(), acceptances=())

EngineOutput = tuple[int, RequestDelta]
"""The caller's key of a request, and what is new for it."""


class LLMEngine:
    """Drives scheduler and executor.

    `failure` says why the engine is dead, None while it lives: after `MAX_CONSECUTIVE_FAILURES`
    failing steps in a row, or when the scheduler itself broke. The requests have then been told,
    and no more are taken.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        tokenizer: Tokenizer,
        *,
        info: EngineInfo,
        metrics: EngineMetrics,
        clock: Clock,
        speculation: SpeculationOffer = NO_SPECULATION,
        on_close: Callable[[], None] = lambda: None,
        on_idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.clock = clock
        self.failure: str | None = None
        self._scheduler = scheduler
        self._executor: Executor | None = executor
        self._on_close = on_close
        self._on_idle = on_idle
        self._inputs = InputProcessor(
            tokenizer,
            vocab_size=info.vocab_size,
            max_total_tokens=min(info.max_model_len, info.kv_capacity_tokens),
            speculation=speculation,
        )
        self._choice_ids = itertools.count()
        self._requests: dict[int, RequestState] = {}
        self._choices: dict[int, Choice] = {}  # unfinished ones, by the scheduler's request id
        self._touched: dict[int, RequestState] = {}  # those with something to hand out
        self._num_consecutive_failures = 0
        self._profile: EngineProfile | None = None
        self._timelines = KeptTimelines()

    # --- requests come and go ---------------------------------------------------------------------

    def add_request(
        self, key: int, request: EngineRequest, arrival_time: float | None = None
    ) -> None:
        """Takes a request under a key that no unfinished one has. Raises InvalidRequestError,
        QueueFullError, DeadlineError and EngineDeadError; nothing of it stays behind then.
        """
        assert key not in self._requests, f"key {key} is in use"
        if self.failure is not None:
            raise EngineDeadError(f"engine failed: {self.failure}")
        arrival_time = self.clock.now() if arrival_time is None else arrival_time
        state = RequestState(key, request, arrival_time)
        samplings = self._inputs.process(request)
        for sampling in samplings:
            max_tokens = sampling.params.max_tokens
            assert max_tokens is not None, "the input processor resolves max_tokens"
            core_request = Request.create(
                next(self._choice_ids),
                request.prompt_token_ids,
                sampling,
                max_tokens,
                arrival_time,
                request.owner,
            )
            output = ChoiceOutput(sampling.choice, sampling.params, self.tokenizer)
            state.choices.append(Choice(state, core_request, output))
        self._scheduler.add(*(choice.request for choice in state.choices))
        self._choices.update((choice.request.request_id, choice) for choice in state.choices)
        self._requests[key] = state
        self._timelines.keep(request, [choice.request for choice in state.choices])
        self._update_gauges()

    def refuse_early(self, request: EngineRequest, num_before: int) -> None:
        """Raises QueueFullError if the queue, as it was at the last step, with `num_before` other requests
        on their way to it, has no room. May be called by any thread.
        """
        self._scheduler.admission.refuse_early(
            self.clock.now(), num_before, request.params.n, len(request.prompt_token_ids)
        )

    def abort(self, key: int) -> None:
        """Ends a request in any state; its blocks are free at once. Unknown and finished keys are
        no matter.
        """
        state = self._requests.get(key)
        if state is not None:
            for choice in state.choices:
                self._end(choice, "abort")
            self._update_gauges()

    def abort_all(self) -> None:
        for key in tuple(self._requests):
            self.abort(key)

    def has_unfinished_requests(self) -> bool:
        return bool(self._choices)

    def set_tenants(self, tenants: TenantTable) -> None:
        """Replaces the table of tenants; raises ConfigError, and changes nothing, if it promises too much."""
        self._scheduler.set_tenants(tenants)

    def reset_prefix_cache(self) -> bool:
        """Makes the next prompts cold: nothing computed so far will be a hit. False if a request runs: nothing changed."""
        return self._scheduler.reset_prefix_cache()

    @property
    def step_time(self) -> StepTimeModel:
        """How long steps take: the scheduler's model, which its steps teach."""
        return self._scheduler.step_time

    def close(self) -> None:
        """Lets go of the model, whose memory is then free. The engine can't be used afterwards."""
        if self.failure is None:
            self.failure = "closed"
            self._on_close()
        self._executor = None
        self._on_idle = lambda: False

    def use_idle_moment(self) -> bool:
        """Does some milliseconds of what is better done while nothing runs; returns whether more of it is left."""
        return self._on_idle()

    def check_invariants(self) -> None:
        """Recounts queues and pages; an engine whose books are wrong is dead."""
        try:
            self._scheduler.check_invariants()
        except AssertionError as error:
            self._die(f"an invariant is broken: {_describe(error)}")

    # --- one step ---------------------------------------------------------------------------------

    def step(self) -> list[EngineOutput]:
        """Runs one step if there is anything to run, and returns what is new for each request that
        advanced or ended.

        No exception of the executor leaves this method, except those that are no `Exception`
        (KeyboardInterrupt): the requests of that step have ended then, too.
        """
        if self._choices and self.failure is None:
            self._run_step()
            self._update_gauges()
        return self.take_outputs()

    def take_outputs(self) -> list[EngineOutput]:
        """What is new without running a step: aborts, errors."""
        outputs: list[EngineOutput] = []
        for key, state in self._touched.items():
            delta = state.take_delta()
            if state.num_unfinished == 0:
                del self._requests[key]
                delta = self._finish_request(state, delta)
            if delta is not None:
                outputs.append((key, delta))
        self._touched.clear()
        return outputs

    def _run_step(self) -> None:
        assert self._executor is not None, "the engine is closed"
        for request in self._scheduler.end_overdue():
            self._close_choice(self._choices[request.request_id], "deadline", None)
        if not self._choices:
            return
        self.metrics.num_steps += 1
        begin = monotonic_ns()
        try:
            scheduled = self._scheduler.schedule()
        except Exception as error:
            self._die(f"scheduling broke: {_describe(error)}")
            return
        scheduled_at = monotonic_ns()
        try:
            result = self._executor.execute(scheduled)
        except BaseException as error:
            self._fail_step(scheduled, error)
            if not isinstance(error, Exception):
                raise
            return
        executed_at = monotonic_ns()
        try:
            updates = self._scheduler.update(scheduled, result)
        except Exception as error:
            self._die(f"the scheduler could not take a step's result: {_describe(error)}")
            return
        self._num_consecutive_failures = 0
        self.metrics.iteration_tokens.observe(scheduled.num_tokens)
        now = self.clock.now()
        for update in updates:
            self._take_update(update, now)
        if self._profile is not None:
            self._profile.add(StepTimes(begin, scheduled_at, executed_at, monotonic_ns()))

    def _fail_step(self, scheduled: SchedulerOutput, error: BaseException) -> None:
        """Ends the requests of a step that raised; the others go on."""
        logger.error("an engine step failed", exc_info=error)
        self._num_consecutive_failures += 1
        if self._profile is not None:
            self._profile.interrupt()
        for request in self._scheduler.fail_step(scheduled):
            self._end(
                self._choices[request.request_id], "error", f"step failed: {_describe(error)}"
            )
        if self._num_consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
            self._die(
                f"{self._num_consecutive_failures} steps in a row failed, "
                f"the last with {_describe(error)}"
            )

    def _die(self, failure: str) -> None:
        """Tells every request; the scheduler's state is no longer trusted, so it is not asked."""
        logger.error("the engine stops: %s", failure)
        self.failure = failure
        for choice in tuple(self._choices.values()):
            self._close_choice(choice, "error", f"engine failed: {failure}")

    def _take_update(self, update: RequestUpdate, now: float) -> None:
        request = update.request
        choice = self._choices[request.request_id]
        state = choice.owner
        if state.prompt_logprobs is not None and update.prompt_logprobs:
            state.prompt_logprobs.extend(update.prompt_logprobs)
            self._touched[state.key] = state
        if not update.new_token_ids and update.finish_reason is None:
            return
        stop_reason: int | str | None = update.stop_reason
        if update.finish_reason == "error":
            self.metrics.corrupted_requests += 1
            stop_reason = f"numerical breakdown at token {request.num_output_tokens}"
        wants_logprobs = request.sampling.params.logprobs is not None
        try:
            delta = choice.output.append(
                update.new_token_ids,
                update.logprobs if wants_logprobs else None,
                update.finish_reason,
                stop_reason,
            )
        except Exception as error:  # one request's text may not take the others with it
            logger.error("a request's output could not be processed", exc_info=error)
            self._end(choice, "error", f"output processing failed: {_describe(error)}")
            return
        self._count_tokens(choice, len(delta.token_ids), now)
        if delta.finish_reason is not None and update.finish_reason is None:
            self._scheduler.end_at(request.request_id, choice.output.num_tokens)  # a stop string
        self._hand_over(choice, delta)

    def _end(self, choice: Choice, reason: str, stop_reason: str | None = None) -> None:
        """Ends a choice from our side; does nothing if it has finished."""
        if not choice.output.finished:
            self._scheduler.abort((choice.request.request_id,), reason)
            self._close_choice(choice, reason, stop_reason)

    def _close_choice(self, choice: Choice, reason: str, stop_reason: str | None) -> None:
        self._hand_over(choice, choice.output.end(reason, stop_reason))

    def _hand_over(self, choice: Choice, delta: ChoiceDelta) -> None:
        state = choice.owner
        state.deltas.append(delta)
        self._touched[state.key] = state
        if delta.finish_reason is not None:
            del self._choices[choice.request.request_id]
            state.num_unfinished -= 1
            self._count_finished(choice, delta.finish_reason)

    def _finish_request(self, state: RequestState, delta: RequestDelta | None) -> RequestDelta:
        assert delta is not None, "the delta that finishes a request was handed out already"
        requests = [choice.request for choice in state.choices]
        now = self.clock.now()
        scheduled = [t for r in requests if (t := r.first_scheduled_time) is not None]
        first_tokens = [t for r in requests if (t := r.first_token_time) is not None]
        arrival = state.arrival_time
        stats = RequestStats(
            num_prompt_tokens=len(state.request.prompt_token_ids),
            num_cached_tokens=delta.num_cached_tokens,
            num_output_tokens=sum(choice.output.num_tokens for choice in state.choices),
            queue_seconds=min(scheduled, default=now) - arrival,
            time_to_first_token_seconds=min(first_tokens) - arrival if first_tokens else None,
            total_seconds=now - arrival,
            num_drafted_tokens=sum(request.num_drafted_tokens for request in requests),
            num_accepted_tokens=sum(request.num_accepted_tokens for request in requests),
        )
        return delta._replace(stats=stats)

    def timeline(self, request_id: str) -> list[dict[str, Any]]:
        """What happened to a request, under its caller's id: see `KeptTimelines.events`."""
        return self._timelines.events(request_id)

    # --- profiling --------------------------------------------------------------------------------

    def start_profile(self) -> None:
        """Begins to time steps and operations, afresh if it does so already. Raises InvalidRequestError where
        the executor can't.
        """
        if not isinstance(self._executor, ProfilingExecutor):
            raise InvalidRequestError("this executor has no operations to time")
        self._executor.start_profile()
        self._profile = EngineProfile(monotonic_ns())

    def stop_profile(self) -> tuple[EngineProfile, ExecutorProfile]:
        """Ends profiling and returns what was timed. Raises InvalidRequestError if nothing was."""
        profile, self._profile = self._profile, None
        if profile is None or not isinstance(self._executor, ProfilingExecutor):
            raise InvalidRequestError("no profile is running; start one first")
        executor_profile = self._executor.stop_profile()
        assert executor_profile is not None, "both profiles start together"
        return profile, executor_profile

    # --- counting ---------------------------------------------------------------------------------

    def _count_tokens(self, choice: Choice, num_tokens: int, now: float) -> None:
        if num_tokens == 0:
            return
        metrics, request = self.metrics, choice.request
        if choice.last_token_time is None:
            metrics.time_to_first_token.observe(now - request.arrival_time)
            metrics.prompt_tokens += request.num_prompt_tokens
            metrics.prompt_tokens_cached += request.num_cached_tokens
        else:
            metrics.inter_token_latency.observe(now - choice.last_token_time)
        metrics.generation_tokens += num_tokens
        choice.last_token_time = now

    def _count_finished(self, choice: Choice, reason: str) -> None:
        """Counts every end by its reason; latencies and sizes only of answers that came to their
        own end.
        """
        metrics, request = self.metrics, choice.request
        metrics.finished[reason] += 1
        scheduled, first, last = (
            request.first_scheduled_time,
            request.first_token_time,
            choice.last_token_time,
        )
        if reason not in ("stop", "length") or scheduled is None or first is None or last is None:
            return
        num_tokens = choice.output.num_tokens
        metrics.e2e_latency.observe(self.clock.now() - request.arrival_time)
        metrics.queue_time.observe(scheduled - request.arrival_time)
        metrics.prefill_time.observe(first - scheduled)
        metrics.decode_time.observe(last - first)
        metrics.inference_time.observe(last - scheduled)
        metrics.time_per_output_token.observe((last - first) / max(1, num_tokens - 1))
        metrics.request_prompt_tokens.observe(request.num_prompt_tokens)
        metrics.request_generation_tokens.observe(num_tokens)
        metrics.request_params_n.observe(request.sampling.params.n)
        metrics.request_params_max_tokens.observe(request.max_tokens)

    def _update_gauges(self) -> None:
        metrics, scheduler = self.metrics, self._scheduler
        counters = scheduler.counters
        metrics.num_running = scheduler.num_running
        metrics.num_waiting = scheduler.num_waiting
        metrics.num_free_blocks = scheduler.num_free_blocks
        metrics.prefix_cache_queries = counters.num_prefix_query_tokens
        metrics.prefix_cache_hits = counters.num_prefix_hit_tokens
        metrics.num_preemptions = counters.num_preemptions
        if self._profile is not None and not self._choices:
            self._profile.interrupt()  # until there is a request, time passes between no steps


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
