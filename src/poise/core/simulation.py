"""A virtual engine: the production scheduler, a clock that only steps move, and steps that take what the
step-time model says.

Knows no model and no arrays. Invariant: a simulated run is a pure function of its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from poise.core.clock import ManualClock
from poise.core.kv_cache_manager import KVCacheManager
from poise.core.limits import Limits
from poise.core.output import (
    EngineSampling,
    Executor,
    KVGroupSpec,
    ModelRunnerOutput,
    SchedulerOutput,
)
from poise.core.policy import FCFS, Policy
from poise.core.prefix_cache import PrefixCache
from poise.core.request import NO_OWNER, Request, RequestOwner
from poise.core.sampling_params import SamplingParams
from poise.core.scheduler import Scheduler
from poise.core.step_time import StepTimeModel
from poise.core.tenant import NO_TENANTS, TenantTable
from poise.errors import DeadlineError, InvalidRequestError, QueueFullError


class CountingExecutor:
    """Draws token 0 for every row that samples, so drafts of 0 are accepted: where only counts and times matter."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput(
            {
                item.request_id: [0] * (1 + num_leading_zeros(item.draft_token_ids))
                for item in output.scheduled
                if item.samples
            }
        )


def num_leading_zeros(token_ids: Sequence[int]) -> int:
    return next((place for place, token_id in enumerate(token_ids) if token_id), len(token_ids))


class SimulatedExecutor:
    """Each step takes the time that `truth` predicts, on a virtual clock; `inner` makes the tokens."""

    def __init__(
        self, clock: ManualClock, truth: StepTimeModel, inner: Executor | None = None
    ) -> None:
        self._clock = clock
        self._truth = truth
        self._inner = inner or CountingExecutor()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._clock.advance(self._truth.predict(self._truth.shape_of(output.scheduled)))
        return self._inner.execute(output)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes at `time` and makes `num_output_tokens`.

    Prompts share what they share of `prompt`; without one, `num_prompt_tokens` that no other has.
    """

    time: float
    num_output_tokens: int
    num_prompt_tokens: int = 1
    prompt: Sequence[int] | None = None
    owner: RequestOwner = NO_OWNER


@dataclass(slots=True)
class Outcome:
    """What became of an arrival. Times are absolute; `token_times` has one for each output token."""

    arrival: Arrival
    admitted_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    refusal: QueueFullError | DeadlineError | InvalidRequestError | None = None
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float:
        return self.token_times[0] - self.arrival.time

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:])]


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the virtual engine has. `truth` says how long steps really take."""

    num_blocks: int
    block_size: int = 16
    groups: tuple[KVGroupSpec, ...] = (KVGroupSpec("full", 1),)
    caching: bool = True
    truth: StepTimeModel = field(default_factory=StepTimeModel)


class Simulation:
    """An engine in virtual time; add requests as they come, and step."""

    def __init__(
        self,
        hardware: Hardware,
        limits: Limits,
        *,
        policy: Policy = FCFS,
        tenants: TenantTable = NO_TENANTS,
        step_time: StepTimeModel | None = None,
        executor: Executor | None = None,
    ) -> None:
        groups, size = hardware.groups, hardware.block_size
        cache = None
        if hardware.caching:
            cache = PrefixCache(
                key=b"simulation", identity=b"", block_size=size, num_groups=len(groups)
            )
        self.clock = ManualClock()
        self.scheduler = Scheduler(
            KVCacheManager(groups, hardware.num_blocks, size, cache),
            self.clock,
            limits,
            policy=policy,
            tenants=tenants,
            step_time=step_time or hardware.truth,
        )
        self._executor = SimulatedExecutor(self.clock, hardware.truth, executor)
        self._outcomes: dict[int, Outcome] = {}
        self._num_added = 0

    def add(self, arrival: Arrival) -> Outcome:
        """A request comes, at its own time or now if that has passed; refusals are in the outcome."""
        self.clock.advance(max(0.0, arrival.time - self.clock.now()))
        number = self._num_added
        self._num_added += 1
        prompt = arrival.prompt
        if prompt is None:
            prompt = [number, *[0] * (arrival.num_prompt_tokens - 1)]
        params = SamplingParams(max_tokens=arrival.num_output_tokens)
        request = Request.create(
            number,
            prompt,
            EngineSampling(params, number, 0, frozenset()),
            arrival.num_output_tokens,
            arrival.time,
            arrival.owner,
        )
        outcome = Outcome(arrival)
        try:
            self.scheduler.add(request)
        except (QueueFullError, DeadlineError, InvalidRequestError) as refusal:
            outcome.refusal = refusal
        else:
            self._outcomes[number] = outcome
        return outcome

    def step(self) -> SchedulerOutput:
        """Ends what is overdue and runs one step; with nothing to run, nothing happens."""
        for request in self.scheduler.end_overdue():
            self._outcomes.pop(request.request_id).finish_reason = "deadline"
        output = self.scheduler.schedule()
        if not output.scheduled:
            return output
        for update in self.scheduler.update(output, self._executor.execute(output)):
            request = update.request
            outcome = self._outcomes[request.request_id]
            outcome.admitted_time = request.first_scheduled_time
            outcome.token_times += [self.clock.now()] * len(update.new_token_ids)
            outcome.num_preemptions = request.num_restarts
            if update.finish_reason is not None:
                outcome.finish_reason = update.finish_reason
                del self._outcomes[request.request_id]
        return output


def simulate(simulation: Simulation, arrivals: Sequence[Arrival]) -> list[Outcome]:
    """Runs to the end of all that arrive, in order of time; outcomes in the order of `arrivals`."""
    order = sorted(range(len(arrivals)), key=lambda i: arrivals[i].time)
    outcomes: dict[int, Outcome] = {}
    for index in order:
        arrival = arrivals[index]
        while simulation.scheduler.has_unfinished and simulation.clock.now() < arrival.time:
            simulation.step()
        outcomes[index] = simulation.add(arrival)
    while simulation.scheduler.has_unfinished:
        simulation.step()
    return [outcomes[index] for index in range(len(arrivals))]
