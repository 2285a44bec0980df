"""Static against continuous batching, in iterations, by driving the engine's own scheduler with requests of known lengths.

Knows slots and lengths, not time: every iteration is one unit, a prompt is one token, prefill costs nothing apart. Invariant:
both ways run the same requests through `poise.core.scheduler`, which has a policy for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from poise.core.clock import ManualClock
from poise.core.kv_cache_manager import KVCacheManager
from poise.core.limits import Limits
from poise.core.output import EngineSampling, KVGroupSpec, ModelRunnerOutput, SchedulerOutput
from poise.core.policy import FCFS, STATIC, Policy
from poise.core.request import Request
from poise.core.sampling_params import SamplingParams
from poise.core.scheduler import Scheduler
from poise.errors import ConfigError
from poise.planner.gantt import label
from poise.planner.inputs import several, whole
from poise.planner.report import Column, Report, Table, Unit

MOST_REQUESTS = 10_000
MOST_ITERATIONS = 200_000
BLOCK_SIZE = 16
ASSUMPTIONS = "Unit steps: each iteration gives every running request one token and takes as long as any other; no prefill."


@dataclass(frozen=True, slots=True)
class Run:
    """One request: iterations `start` … `end` − 1 in `slot`, which it holds until `released`."""

    request: int
    slot: int
    start: int
    end: int
    released: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """What one way of batching did. `runs` in the order of the requests."""

    name: str
    slots: int
    runs: Sequence[Run]

    @property
    def iterations(self) -> int:
        return max((run.end for run in self.runs), default=0)

    @property
    def busy(self) -> int:
        """Slot-iterations in which a token was made."""
        return sum(run.end - run.start for run in self.runs)

    @property
    def mean_finish(self) -> float | None:
        return sum(run.end for run in self.runs) / len(self.runs) if self.runs else None


def static(lengths: Sequence[int], slots: int) -> Timeline:
    """Batches of `slots`; the next begins when the longest of the last has ended."""
    runs = _drive(lengths, slots, STATIC)
    ends: dict[int, int] = {}
    for run in runs:  # those that start together are a batch
        ends[run.start] = max(ends.get(run.start, 0), run.end)
    return Timeline("static", slots, [replace(run, released=ends[run.start]) for run in runs])


def continuous(lengths: Sequence[int], slots: int) -> Timeline:
    """A slot takes the next request as soon as it is free."""
    return Timeline("continuous", slots, _drive(lengths, slots, FCFS))


def _drive(lengths: Sequence[int], slots: int, policy: Policy) -> list[Run]:
    """Runs the production scheduler until every request has its tokens."""
    if not lengths:
        return []
    longest = 1 + max(lengths)
    num_blocks = min(slots, len(lengths)) * -(-longest // BLOCK_SIZE)
    scheduler = Scheduler(
        KVCacheManager([KVGroupSpec("full", 1)], num_blocks, BLOCK_SIZE, None),
        ManualClock(),
        Limits(max_num_seqs=slots, max_num_batched_tokens=slots, max_model_len=longest),
        policy=policy,
    )
    sampling = EngineSampling(SamplingParams(), seed=0, choice=0, stop_token_ids=frozenset())
    for index, length in enumerate(lengths):
        scheduler.add(Request.create(index, [0], sampling, length, arrival_time=0.0))
    started: dict[int, tuple[int, int]] = {}  # request -> (slot, first iteration)
    free = set(range(min(slots, len(lengths))))
    runs = []
    iteration = 0
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        for item in output.scheduled:
            if item.request_id not in started:
                slot = min(free)
                free.remove(slot)
                started[item.request_id] = (slot, iteration)
        iteration += 1
        for update in scheduler.update(output, _one_token_each(output)):
            if update.finish_reason is not None:
                index = update.request.request_id
                slot, first = started[index]
                runs.append(Run(index, slot, first, iteration, iteration))
                free.add(slot)
    return sorted(runs, key=lambda run: run.request)


def _one_token_each(output: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput({item.request_id: [0] for item in output.scheduled if item.samples})


def timelines(lengths: object, slots: object) -> tuple[Timeline, Timeline]:
    """(static, continuous) of checked input. Raises ConfigError for what makes no sense or takes too long."""
    checked = several("--lengths", lengths, lambda name, value: whole(name, value, 1, 10**6))
    num_slots = whole("--slots", slots, 1, MOST_REQUESTS)
    if len(checked) > MOST_REQUESTS:
        raise ConfigError(f"--lengths has {len(checked):,} entries: at most {MOST_REQUESTS:,}")
    if sum(checked) > MOST_ITERATIONS:
        raise ConfigError(
            f"--lengths sum to {sum(checked):,} tokens: at most {MOST_ITERATIONS:,}, every iteration is run"
        )
    return static(checked, num_slots), continuous(checked, num_slots)


def plan(by_batch: Timeline, as_they_come: Timeline) -> Report:
    """The report on what `timelines` gave."""
    count = len(by_batch.runs)
    report = Report(
        "schedule", f"{count} requests on {by_batch.slots} slot{'s' * (by_batch.slots != 1)}"
    )
    for timeline, equation in (
        (by_batch, "Σ over batches of the longest answer in each"),
        (as_they_come, "the last end, each slot refilled as soon as it is free"),
    ):
        name = timeline.name
        report.add(f"{name}_iterations", name, timeline.iterations, Unit.ITERATIONS, equation)
        report.add(
            f"{name}_use", f"{name}, slots in use", _use(timeline), Unit.PERCENT,
            f"{timeline.busy:,} tokens / ({timeline.slots} slots · {timeline.iterations:,} iterations)",
        )  # fmt: skip
        report.add(
            f"{name}_mean_finish", f"{name}, mean end", timeline.mean_finish, Unit.ITERATIONS,
            "mean over requests of the iteration in which each ends",
        )  # fmt: skip
    ratio = by_batch.iterations / as_they_come.iterations if count else None
    report.add(
        "ratio", "static / continuous", ratio, Unit.TIMES,
        f"{by_batch.iterations:,} / {as_they_come.iterations:,}",
    )  # fmt: skip
    if count:
        report.tables.append(_table(by_batch, as_they_come))
    report.notes.append(ASSUMPTIONS)
    return report


def _use(timeline: Timeline) -> float | None:
    total = timeline.slots * timeline.iterations
    return 100 * timeline.busy / total if total else None


def _table(by_batch: Timeline, as_they_come: Timeline) -> Table:
    columns = [
        Column("request", "request", Unit.WORD),
        Column("length", "length", Unit.TOKENS),
        Column("static_start", "static start", Unit.ITERATIONS),
        Column("static_end", "end", Unit.ITERATIONS),
        Column("continuous_start", "continuous start", Unit.ITERATIONS),
        Column("continuous_end", "end", Unit.ITERATIONS),
    ]
    rows: list[list[int | str]] = [
        [label(s.request), s.end - s.start, s.start, s.end, c.start, c.end]
        for s, c in zip(by_batch.runs, as_they_come.runs, strict=True)
    ]
    return Table("requests", "Each request", columns, rows, "start and end: iterations before it")
