"""Servers to be measured, whether they run already or are started for it, and the comparison of two of them.

Joins managed servers, schedules and paired runs; knows no command line. Invariant: at most two servers run at a time, and what was
measured before a failure is in the record, marked invalid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import uvloop

from poise.bench.client import Target, clean_base_url
from poise.bench.compare import CONFIDENCE
from poise.bench.managed_server import ManagedServer, ServerSpec
from poise.bench.paired_runs import Comparison, Report, judge, run_pairs
from poise.bench.presets import find_spec, placeholders
from poise.bench.record import RunRecord
from poise.bench.runner import RunSettings, provenance, reach, run_schedule
from poise.bench.schedule import Schedule
from poise.errors import PoiseError

ENDPOINT = "/v1/completions"


@dataclass(slots=True)
class Contestant:
    """A server by URL, or one that is started by its description. `facts` fills up as it is used."""

    name: str
    model: str | None
    base_url: str | None = None
    spec: ServerSpec | None = None
    values: dict[str, str] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)
    endpoint: str = ENDPOINT
    facts: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def running(self, instance: str = "") -> Iterator[Target]:
        """The server, ready to be measured; one that we start is gone afterwards."""
        if self.spec is None:
            assert self.base_url is not None
            target = Target(self.base_url, self.endpoint, self.model or "", self.name, self.api_key)
            yield uvloop.run(reach(target))
            return
        with ManagedServer(self.spec, self.values) as server:
            self.facts |= {
                "command": [_without_folder(word) for word in server.command],
                "environment": dict(self.spec.environment),
                "seconds_to_ready": round(server.seconds_to_ready, 3),
            }
            name = self.name + instance
            try:
                yield Target(server.url, self.endpoint, self.model or self.spec.model, name)
            except PoiseError:
                server.check_alive()  # a server that died says more than what it did to the client
                raise


def contestant(
    text: str,
    *,
    model: str | None = None,
    threads: int | None = None,
    api_key: str | None = None,
    model_path: Callable[[str], str],
) -> Contestant:
    """What a user means: http://…, a preset's name, or a TOML file. Raises ConfigError.

    `model_path` finds the file of a model; it is asked only where the description has a place for it.
    """
    if "://" in text:
        url = clean_base_url(text)
        return Contestant(text, model, base_url=url, api_key=api_key)
    spec = find_spec(text)
    name = model or spec.model
    is_local = "{model_path}" in " ".join((*spec.command, *spec.environment.values()))
    path = model_path(name) if is_local else ""
    values = placeholders(spec, model=name, model_path=path, threads=threads)
    return Contestant(spec.name, name, spec=spec, values=values)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a comparison is done."""

    schedule: Callable[[int], Schedule]
    """A block's load from its seed."""
    num_pairs: int = 10
    num_null_pairs: int = 10
    seed: int = 0
    confidence: float = CONFIDENCE
    least_effect: float = 0.0
    settings: RunSettings = field(default_factory=RunSettings)

    def schedules(self, first: int, count: int) -> Iterator[Schedule]:
        """`count` blocks' loads, each with a seed of its own."""
        return (self.schedule(self.seed + first + index) for index in range(count))


class ComparisonStopped(PoiseError):
    """A comparison ended before all its pairs; `comparison` holds those that were run, marked invalid."""

    def __init__(self, message: str, comparison: Comparison) -> None:
        super().__init__(message)
        self.comparison = comparison


def compare_contestants(a: Contestant, b: Contestant, plan: Plan, report: Report) -> Comparison:
    """A against A, then A against B, and the verdicts.

    Raises ComparisonStopped, with what there is, where a server fails or the user interrupts.
    """
    example = plan.schedule(plan.seed)
    comparison: Comparison | None = None
    try:
        with a.running() as target:
            comparison = Comparison(
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                a=target.info(),
                b=target.info(),
                workload=example.workload,
                arrivals=example.arrivals,
                seed=plan.seed,
                provenance=provenance(),
                confidence=plan.confidence,
                least_effect=plan.least_effect,
            )
            _measure(target, a, b, plan, comparison, report)
    except (KeyboardInterrupt, PoiseError) as error:
        if comparison is None:
            raise
        comparison.stopped = str(error) or "interrupted"
        raise ComparisonStopped(comparison.stopped, _judged(comparison, a, b)) from error
    return _judged(comparison, a, b)


def _judged(comparison: Comparison, a: Contestant, b: Contestant) -> Comparison:
    comparison.provenance |= {"a": a.facts, "b": b.facts}
    judge(comparison)
    return comparison


def _measure(
    target: Target,
    a: Contestant,
    b: Contestant,
    plan: Plan,
    comparison: Comparison,
    report: Report,
) -> None:
    async def run(where: Target, schedule: Schedule) -> RunRecord:
        record, _ = await run_schedule(schedule, where, plan.settings)
        return record

    with a.running(" (again)") as again:
        report(f"A/A: {target.name} against itself, {plan.num_null_pairs} pairs")
        nulls = plan.schedules(plan.num_pairs, plan.num_null_pairs)
        uvloop.run(run_pairs(target, again, nulls, run, into=comparison.null_pairs, report=report))
    with b.running() as other:
        comparison.b = other.info()
        report(f"A/B: {target.name} against {other.name}, {plan.num_pairs} pairs")
        schedules = plan.schedules(0, plan.num_pairs)
        uvloop.run(run_pairs(target, other, schedules, run, into=comparison.pairs, report=report))


def _without_folder(word: str) -> str:
    """A record says what was run, not where this machine keeps it."""
    return word.rsplit("/", 1)[-1] if word.startswith("/") else word
