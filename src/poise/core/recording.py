"""What a scheduler saw and did, line by line, and the replay that must do the same.

A line holds one call with its arguments, the clock reads that it made and what came of it, so that a replay
needs no model and no time. Knows the scheduler's interface, no policy. Invariant: a replay takes the recorded
steps, one by one, or names the first that differs. A recording holds token ids of prompts and answers.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from poise.core.clock import Clock
from poise.core.drafting import Draft, Drafter, DraftRoom
from poise.core.kv_cache_manager import KVCacheManager
from poise.core.limits import Limits
from poise.core.output import (
    NO_TOKEN,
    EngineSampling,
    KVGroupSpec,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenLogprobs,
)
from poise.core.policy import POLICIES
from poise.core.prefix_cache import PrefixCache
from poise.core.request import Request, RequestOwner
from poise.core.sampling_params import SamplingParams
from poise.core.scheduler import Scheduler
from poise.core.scheduler_records import RequestUpdate
from poise.core.speculation import Speculation
from poise.core.step_time import Fit, StepCost, StepShape, StepTimeModel
from poise.core.tenant import Share, Tenant, TenantTable
from poise.errors import PoiseError

Line = dict[str, Any]
_T = TypeVar("_T")


class ReplayError(PoiseError):
    """A replayed call did something else than the recorded one, or the file is no recording."""


@dataclass(frozen=True, slots=True)
class SchedulerSetup:
    """What a scheduler is made of, as plain data. `policy` is a name in POLICIES."""

    limits: Limits
    policy: str
    tenants: TenantTable
    groups: Sequence[KVGroupSpec]
    num_blocks: int
    block_size: int
    caching: bool
    step_cost: StepCost
    fit: Fit

    def step_time(self) -> StepTimeModel:
        return StepTimeModel(self.step_cost, self.groups, self.fit)

    def scheduler(
        self, kv_cache: KVCacheManager, clock: Clock, drafter: Drafter | None = None
    ) -> Scheduler:
        """One like that, over pages of that size and number."""
        return Scheduler(
            kv_cache,
            clock,
            self.limits,
            policy=POLICIES[self.policy],
            tenants=self.tenants,
            step_time=self.step_time(),
            drafter=drafter,
        )

    def as_line(self) -> Line:
        line = asdict(self)
        line["tenants"] = _table_line(self.tenants)
        line["fit"] = {k: {str(size): r for size, r in v.items()} for k, v in self.fit.items()}
        return {"setup": line}

    @classmethod
    def from_line(cls, line: Line) -> SchedulerSetup:
        try:
            given = dict(line["setup"])
            given["limits"] = Limits(**given["limits"])
            given["tenants"] = _table(given["tenants"])
            given["groups"] = tuple(KVGroupSpec(**group) for group in given["groups"])
            given["step_cost"] = StepCost(**given["step_cost"])
            given["fit"] = {k: {int(s): r for s, r in v.items()} for k, v in given["fit"].items()}
            return cls(**given)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ReplayError(f"this is no recording of a scheduler: {error!r}") from None


# --- recording ------------------------------------------------------------------------------------


class RecordingClock:
    """Reads another clock and remembers what it read."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.reads: list[float] = []

    def now(self) -> float:
        self.reads.append(self._clock.now())
        return self.reads[-1]


class RecordingDrafter:
    """Asks another drafter and remembers what it said."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.drafts: list[Draft] = []

    def draft(
        self, rooms: Sequence[DraftRoom], shape: StepShape, step_time: StepTimeModel
    ) -> Sequence[Draft]:
        self.drafts = list(self._drafter.draft(rooms, shape, step_time))
        return self.drafts

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self._drafter.observe(request, num_drafts, num_accepted)

    def forget(self, request: Request) -> None:
        self._drafter.forget(request)


class RecordingScheduler(Scheduler):
    """A scheduler whose every call becomes a line, written when the call has returned or raised."""

    def __init__(
        self,
        setup: SchedulerSetup,
        kv_cache: KVCacheManager,
        clock: Clock,
        write: Callable[[Line], None],
        drafter: Drafter | None = None,
    ) -> None:
        self._recording_drafter = None if drafter is None else RecordingDrafter(drafter)
        self._recording_clock = RecordingClock(clock)
        self._write = write
        self._is_inside = False  # of a call that is being recorded: what that one calls is its own
        super().__init__(
            kv_cache,
            self._recording_clock,
            setup.limits,
            policy=POLICIES[setup.policy],
            tenants=setup.tenants,
            step_time=setup.step_time(),
            drafter=self._recording_drafter,
        )
        write({**setup.as_line(), "reads": self._take_reads()})

    def _take_reads(self) -> list[float]:
        reads, self._recording_clock.reads = self._recording_clock.reads, []
        return reads

    def _record(self, call: Callable[[], _T], line: Line, outcome: Callable[[_T], Any]) -> _T:
        if self._is_inside:
            return call()
        self._is_inside = True
        try:
            result = call()
            line["outcome"] = outcome(result)
            return result
        except Exception as error:
            line["raised"] = type(error).__name__
            raise
        finally:
            self._is_inside = False
            self._write({**line, "reads": self._take_reads()})

    def add(self, *requests: Request) -> None:
        line = {"call": "add", "requests": [_request_line(request) for request in requests]}
        self._record(lambda: super(RecordingScheduler, self).add(*requests), line, _nothing)

    def abort(self, request_ids: Iterable[int], reason: str = "abort") -> list[Request]:
        ids = list(request_ids)
        line = {"call": "abort", "ids": ids, "reason": reason}
        return self._record(lambda: super(RecordingScheduler, self).abort(ids, reason), line, _ids)

    def end_at(self, request_id: int, num_output_tokens: int) -> None:
        line = {"call": "end_at", "id": request_id, "output_tokens": num_output_tokens}
        self._record(
            lambda: super(RecordingScheduler, self).end_at(request_id, num_output_tokens),
            line,
            _nothing,
        )

    def end_overdue(self) -> list[Request]:
        return self._record(super().end_overdue, {"call": "end_overdue"}, _ids)

    def set_tenants(self, tenants: TenantTable) -> None:
        line = {"call": "set_tenants", "tenants": _table_line(tenants)}
        self._record(lambda: super(RecordingScheduler, self).set_tenants(tenants), line, _nothing)

    def schedule(self) -> SchedulerOutput:
        line: Line = {"call": "schedule"}

        def schedule() -> SchedulerOutput:
            output = super(RecordingScheduler, self).schedule()
            if self._recording_drafter is not None and self._recording_drafter.drafts:
                line["drafts"] = self._recording_drafter.drafts
                self._recording_drafter.drafts = []
            return output

        return self._record(schedule, line, step_digest)

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestUpdate]:
        line = {"call": "update", "result": _result_line(result)}
        return self._record(
            lambda: super(RecordingScheduler, self).update(output, result), line, _updates
        )

    def fail_step(self, output: SchedulerOutput) -> list[Request]:
        return self._record(
            lambda: super(RecordingScheduler, self).fail_step(output), {"call": "fail_step"}, _ids
        )


# --- replaying ------------------------------------------------------------------------------------


class ReplayClock:
    """Gives what was read then."""

    def __init__(self) -> None:
        self.reads: deque[float] = deque()

    def now(self) -> float:
        if not self.reads:
            raise ReplayError("the clock is read more often than when this was recorded")
        return self.reads.popleft()


class ReplayDrafter:
    """Says what was said then."""

    def __init__(self) -> None:
        self.drafts: list[Draft] = []

    def draft(
        self, rooms: Sequence[DraftRoom], shape: StepShape, step_time: StepTimeModel
    ) -> Sequence[Draft]:
        if len(rooms) != len(self.drafts):
            raise ReplayError(
                f"{len(rooms)} requests may draft, {len(self.drafts)} might when this was recorded"
            )
        return self.drafts

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass


def replay(lines: Iterable[Line]) -> int:
    """Repeats every call on a fresh scheduler; returns the number of steps. Raises ReplayError at the
    first one that comes out differently.
    """
    clock, drafter = ReplayClock(), ReplayDrafter()
    scheduler: Scheduler | None = None
    step: SchedulerOutput | None = None
    num_steps = 0
    for number, line in enumerate(lines):
        clock.reads.extend(line.get("reads", ()))
        if scheduler is None:
            scheduler = _fresh(SchedulerSetup.from_line(line), clock, drafter)
            continue
        drafter.drafts = [
            Draft(n, tuple(ids), unplaced) for n, ids, unplaced in line.get("drafts", ())
        ]
        try:
            outcome, scheduled = _repeat(scheduler, line, step)
        except ReplayError:
            raise
        except PoiseError as error:
            outcome, scheduled = {"raised": type(error).__name__}, None
        expected = {key: line[key] for key in ("outcome", "raised") if key in line}
        if outcome != expected or clock.reads:
            raise ReplayError(
                f"line {number + 1}: {line.get('call')} gives {outcome}, recorded is {expected}"
            )
        if scheduled is not None:
            step = scheduled
            num_steps += bool(step.scheduled)
    return num_steps


def _fresh(setup: SchedulerSetup, clock: Clock, drafter: Drafter) -> Scheduler:
    cache = None
    if setup.caching:
        cache = PrefixCache(
            key=b"replay", identity=b"", block_size=setup.block_size, num_groups=len(setup.groups)
        )
    kv_cache = KVCacheManager(setup.groups, setup.num_blocks, setup.block_size, cache)
    return setup.scheduler(kv_cache, clock, drafter)


def _repeat(
    scheduler: Scheduler, line: Line, step: SchedulerOutput | None
) -> tuple[Line, SchedulerOutput | None]:
    """The outcome of one call, and the step if it made one."""
    outcome: Any = None
    scheduled: SchedulerOutput | None = None
    match line["call"]:
        case "add":
            scheduler.add(*map(_request, line["requests"]))
        case "abort":
            outcome = _ids(scheduler.abort(line["ids"], line["reason"]))
        case "end_at":
            scheduler.end_at(line["id"], line["output_tokens"])
        case "end_overdue":
            outcome = _ids(scheduler.end_overdue())
        case "set_tenants":
            scheduler.set_tenants(_table(line["tenants"]))
        case "schedule":
            scheduled = scheduler.schedule()
            outcome = step_digest(scheduled)
        case "update":
            assert step is not None
            outcome = _updates(scheduler.update(step, _result(line["result"])))
        case "fail_step":
            assert step is not None
            outcome = _ids(scheduler.fail_step(step))
        case other:
            raise ReplayError(f"{other!r} is no call of a scheduler")
    return {"outcome": outcome}, scheduled


# --- plain data -----------------------------------------------------------------------------------


def step_digest(output: SchedulerOutput) -> str:
    """Equal for equal steps: rows, pages, who is new and who is gone."""
    said = (
        output.step,
        tuple(output.removed_request_ids),
        [(new.request_id, tuple(new.token_ids), new.block_tables) for new in output.new_requests],
        [
            (i.request_id, i.start, i.num_tokens, i.new_block_ids, i.samples)
            + ((i.num_drafts, i.draft_token_ids, i.draft_block_ids) if i.num_drafts else ())
            + ((i.unplaced_draft,) if i.unplaced_draft != NO_TOKEN else ())
            for i in output.scheduled
        ],
    )
    return hashlib.blake2b(repr(said).encode(), digest_size=8).hexdigest()


def _nothing(result: None) -> None:
    return None


def _ids(requests: Iterable[Request]) -> list[int]:
    return [request.request_id for request in requests]


def _updates(updates: Iterable[RequestUpdate]) -> list[list[Any]]:
    return [[u.request.request_id, list(u.new_token_ids), u.finish_reason] for u in updates]


def _request_line(request: Request) -> Line:
    params, speculation = request.sampling.params, request.sampling.speculation
    return {
        "id": request.request_id,
        "prompt": list(request.token_ids),
        "max_tokens": request.max_tokens,
        "arrival": request.arrival_time,
        "owner": {**asdict(request.owner), "cache_salt": request.owner.cache_salt.hex()},
        "stop": sorted(request.sampling.stop_token_ids),
        "params": {
            "stop_token_ids": list(params.stop_token_ids),
            "min_tokens": params.min_tokens,
            "max_tokens": params.max_tokens,
            "prompt_logprobs": params.prompt_logprobs,
        },
        "speculation": None if speculation is None else asdict(speculation),
    }


def _request(line: Line) -> Request:
    given = line.get("speculation")
    sampling = EngineSampling(
        SamplingParams(**line["params"]),
        0,
        0,
        frozenset(line["stop"]),
        speculation=None if given is None else Speculation(**given),
    )
    owner = {**line["owner"], "cache_salt": bytes.fromhex(line["owner"]["cache_salt"])}
    return Request.create(
        line["id"],
        line["prompt"],
        sampling,
        line["max_tokens"],
        line["arrival"],
        RequestOwner(**owner),
    )


def _result_line(result: ModelRunnerOutput) -> Line:
    return {
        "tokens": [[request_id, ids] for request_id, ids in result.token_ids.items()],
        "prompt_logprobs": [[i, len(entries)] for i, entries in result.prompt_logprobs.items()],
        "broken": sorted(result.broken),
        "draft_seconds": result.draft_seconds,
    }


def _result(line: Line) -> ModelRunnerOutput:
    """Of logprobs only how many there were."""
    return ModelRunnerOutput(
        {request_id: list(ids) for request_id, ids in line["tokens"]},
        {},
        {i: [TokenLogprobs(0, 0.0, 1)] * count for i, count in line["prompt_logprobs"]},
        frozenset(line["broken"]),
        line.get("draft_seconds", 0.0),
    )


def _table_line(table: TenantTable) -> Line:
    return {
        "tenants": [asdict(tenant) for tenant in table.tenants.values()],
        "reserved_by_class": {name: asdict(s) for name, s in table.reserved_by_class.items()},
    }


def _table(line: Line) -> TenantTable:
    tenants = {}
    for given in line["tenants"]:
        reserved = given["reserved"] and Share(**given["reserved"])
        tenants[given["name"]] = Tenant(**{**given, "reserved": reserved})
    classes = {name: Share(**share) for name, share in line["reserved_by_class"].items()}
    return TenantTable(tenants, classes)
