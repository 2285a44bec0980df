"""A profile of the engine: the Python around each step beside what the executor did in it.

Knows no HTTP. Invariant: profiling reads clocks and adds numbers; no answer changes by a byte. Times are ns of the monotonic clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from poise.executor.profile import TRACED_STEPS, ExecutorProfile


@runtime_checkable
class ProfilingExecutor(Protocol):
    """An executor that can time its operations."""

    def start_profile(self) -> None:
        """Begins afresh."""
        ...

    def stop_profile(self) -> ExecutorProfile | None:
        """What was timed."""
        ...


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When a step began to be scheduled, to be executed, to be taken in, and when its deltas were ready."""

    begin: int
    scheduled: int
    executed: int
    done: int


class EngineProfile:
    """Sums over steps, and the last ones one by one."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.num_steps = 0
        self.schedule_nanoseconds = 0
        self.execute_nanoseconds = 0
        self.update_nanoseconds = 0
        self.between_nanoseconds = 0
        self._goes_on = False
        self.traced: deque[StepTimes] = deque(maxlen=TRACED_STEPS)

    def interrupt(self) -> None:
        """The time until the next step is not to be counted: nothing remains to be done, or a step failed."""
        self._goes_on = False

    def add(self, times: StepTimes) -> None:
        """Counts a step; until the next one begins the engine hands out deltas and takes commands, unless it is interrupted."""
        if self._goes_on:
            self.between_nanoseconds += times.begin - self.traced[-1].done
        self._goes_on = True
        self.num_steps += 1
        self.schedule_nanoseconds += times.scheduled - times.begin
        self.execute_nanoseconds += times.executed - times.scheduled
        self.update_nanoseconds += times.done - times.executed
        self.traced.append(times)


def profile_report(
    engine: EngineProfile, executor: ExecutorProfile, end: int, http_nanoseconds: int | None = None
) -> dict[str, Any]:
    """The figures of a profile, ready for JSON: seconds, bytes, flops; `http` is None where there is no server."""
    steps = engine.num_steps
    by_kind: dict[str, dict[str, float]] = {}
    for operation in executor.operations():
        kind = by_kind.setdefault(
            operation.name, {"operations": 0, "seconds": 0.0, "read_bytes": 0, "flops": 0}
        )
        kind["operations"] += 1
        kind["seconds"] += operation.nanoseconds / 1e9
        kind["read_bytes"] += operation.read_bytes
        kind["flops"] += operation.flops
    own = executor.own_nanoseconds / 1e9
    in_operations = sum(kind["seconds"] for kind in by_kind.values())
    native = executor.native_nanoseconds / 1e9
    return {
        "seconds": (end - engine.begin) / 1e9,
        "steps": steps,
        "rows": executor.num_rows,
        "logit_rows": executor.num_logit_rows,
        "rows_per_step": executor.num_rows / steps if steps else None,
        "operations": by_kind,
        "spared_keys": executor.spared_keys,
        "other_native_seconds": native - in_operations,
        "worker_wait_seconds": [waited / 1e9 for waited in executor.waited_nanoseconds],
        "native_seconds": native,
        "python_seconds": {
            "schedule": engine.schedule_nanoseconds / 1e9,
            "batch and results": engine.execute_nanoseconds / 1e9 - native - own,
            "update": engine.update_nanoseconds / 1e9,
            "between steps": engine.between_nanoseconds / 1e9,
            "http": None if http_nanoseconds is None else http_nanoseconds / 1e9,
        },
        "profiling_seconds": own,
        "read_bytes": sum(kind["read_bytes"] for kind in by_kind.values()),
        "flops": sum(kind["flops"] for kind in by_kind.values()),
    }


def trace_events(engine: EngineProfile, executor: ExecutorProfile) -> dict[str, Any]:
    """The last steps as Chrome trace events (Perfetto and chrome://tracing read them); microseconds."""
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "poise"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "engine"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 2, "args": {"name": "operations"}},
    ]

    def span(name: str, thread: int, begin: int, end: int, **arguments: object) -> None:
        events.append(
            {
                "name": name, "ph": "X", "pid": 1, "tid": thread, "ts": begin / 1e3,
                "dur": (end - begin) / 1e3, "args": arguments,
            }
        )  # fmt: skip

    for times in engine.traced:
        span("schedule", 1, times.begin, times.scheduled)
        span("execute", 1, times.scheduled, times.executed)
        span("update", 1, times.executed, times.done)
    names = executor.names
    for step in executor.traced:
        span("step", 2, step.begin, step.end, rows=step.rows, logit_rows=step.logit_rows)
        for name, begin, end in zip(names, step.boundaries, step.boundaries[1:]):
            span(name, 2, begin, end)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
