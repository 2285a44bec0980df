"""One request, or a few, from the load client to a mock in the same event loop, with both sides' records.

In one loop the order of the mock's writes and the client's reads does not depend on the machine's speed: an event is stamped
after it was written and before a later one, due milliseconds after it, is.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from poise.bench.arrivals import Arrivals
from poise.bench.client import LoadClient, Target, encode_body
from poise.bench.lengths import Constant
from poise.bench.mock_schedule import MockProfile, MockSchedule
from poise.bench.mock_server import MockServer, Served
from poise.bench.record import ClientOptions, Gate, RequestRow, RunRecord, WindowSummary
from poise.bench.runner import RunSettings, run_schedule
from poise.bench.schedule import PlannedRequest, Schedule
from poise.bench.workloads import RandomTokens, draw_schedule

TEXT = "say ten words"


def target(mock: MockServer, chat: bool = False) -> Target:
    return Target(mock.url, "/v1/chat/completions" if chat else "/v1/completions", "mock")


def one(
    *,
    chat: bool = False,
    max_tokens: int = 8,
    options: ClientOptions | None = None,
    **parts: Any,
) -> tuple[RequestRow, Served]:
    """Row and the mock's record of one request to a schedule; times are perf_counter on both sides."""

    async def inside() -> tuple[RequestRow, Served]:
        profile = MockProfile(schedules=(msgspec.convert(parts, MockSchedule),))
        async with MockServer(profile) as mock:
            chosen = options or ClientOptions()
            prompt: Any = [{"role": "user", "content": TEXT}] if chat else TEXT
            row = RequestRow(index=0, planned=0.0)
            body = encode_body(
                PlannedRequest(prompt, max_tokens), "mock", chosen, continuous_usage=True
            )
            async with LoadClient(target(mock, chat), chosen, keep_text=True) as client:
                await client.send(body, row)
            return row, mock.served[0]

    return asyncio.run(inside())


def written(served: Served, kind: str, number: int = 0) -> float:
    """When the mock wrote its n-th event of a kind."""
    return [event.written for event in served.events if event.kind == kind][number]


@dataclass(frozen=True)
class Outcome:
    """A run's record and rows, and the mock's records of the measured requests in order of arrival."""

    record: RunRecord
    rows: list[RequestRow]
    served: list[Served]

    def gate(self, name: str) -> Gate:
        return next(gate for gate in self.record.gates if gate.name == name)

    @property
    def full(self) -> WindowSummary:
        return self.record.summary["full"]


def run_twice(
    schedule: Schedule,
    profile: MockProfile,
    settings: RunSettings | None = None,
    *,
    times: int = 2,
) -> list[Outcome]:
    """The schedule several times against one mock, which remembers what it was asked."""

    async def inside() -> list[Outcome]:
        outcomes = []
        async with MockServer(profile) as mock:
            for _ in range(times):
                before = len(mock.served)
                record, rows = await run_schedule(
                    schedule, target(mock, schedule.kind == "chat"), settings or RunSettings()
                )
                measured = list(mock.served)[before + len(schedule.warmups) :]
                outcomes.append(Outcome(record, rows, measured))
        return outcomes

    return asyncio.run(inside())


def run(schedule: Schedule, profile: MockProfile, settings: RunSettings | None = None) -> Outcome:
    return run_twice(schedule, profile, settings, times=1)[0]


def profile(*schedules: dict[str, Any], **parts: Any) -> MockProfile:
    """A profile of schedules given as their fields."""
    found = tuple(msgspec.convert(schedule, MockSchedule) for schedule in schedules)
    return MockProfile(schedules=found, **parts)


def drawn(
    arrivals: Arrivals, num_requests: int, *, output: int = 4, prompt: int = 32, seed: int = 1
) -> Schedule:
    """A seeded schedule of random prompts without warm-ups."""
    workload = RandomTokens(Constant(prompt), Constant(output))
    return draw_schedule(workload, arrivals, seed, num_requests=num_requests, num_warmups=0)
