"""Runs pairs of blocks on two servers, A B B A, and keeps them in a record from which the comparison can be computed again.

Knows order, seeds and salt; a block is run by a function handed in, and judged by `compare`. Invariant: both blocks of a pair have
the same lengths and arrivals, and the same prompts wherever that can't make one block find the other's in a cache; a block that
failed a gate leaves its pair out and the comparison invalid.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from poise.bench.client import Target
from poise.bench.compare import CONFIDENCE, Arm, Metric, MetricResult, Pair, compare
from poise.bench.record import RecordError, RunRecord, ServerInfo, write_bytes
from poise.bench.schedule import PlannedRequest, Prompt, Schedule
from poise.bench.workloads import TOKEN_RANGE, word
from poise.errors import PoiseError

SCHEMA = "poise.bench.comparison/1"
METRICS = (
    Metric("output_throughput", "tok/s", "higher"),
    Metric("ttft_p50", "s", "lower"),
    Metric("tpot_p50", "s", "lower"),
    Metric("e2el_p50", "s", "lower"),
    Metric("chunk_gap_p99", "s", "lower"),
)


class BlockStoppedError(PoiseError):
    """A block ended before its schedule: the server is gone, or a signal asked for the end."""


RunBlock = Callable[[Target, Schedule], Awaitable[RunRecord]]
Report = Callable[[str], None]


class Comparison(msgspec.Struct):
    """A whole comparison. `valid` is False when a block failed or the run stopped early; `reasons` says which and why."""

    created: str
    """UTC, ISO 8601."""
    a: ServerInfo
    b: ServerInfo
    workload: dict[str, Any]
    arrivals: dict[str, Any]
    seed: int
    provenance: dict[str, Any]
    """Facts on the client's host, and how managed servers were started."""
    confidence: float = CONFIDENCE
    least_effect: float = 0.0
    null_pairs: list[Pair] = []
    """A against A."""
    pairs: list[Pair] = []
    results: list[MetricResult] = []
    valid: bool = False
    reasons: list[str] = []
    stopped: str | None = None
    """Why it ended before all pairs had been run."""
    schema: str = SCHEMA


async def run_pairs(
    a: Target,
    b: Target,
    schedules: Iterable[Schedule],
    run: RunBlock,
    *,
    into: list[Pair],
    report: Report,
) -> None:
    """Sends each schedule to both, A first and B first in turn, and appends a pair for each to `into`.

    Two targets that are one server get different prompts of equal lengths, else the second block would be answered from the
    first one's cache. Raises BlockStoppedError; the pairs before it stay.
    """
    is_one_server = (a.base_url, a.model) == (b.base_url, b.model)
    for index, schedule in enumerate(schedules):
        first: Arm = "A" if index % 2 == 0 else "B"
        later = salted(schedule) if is_one_server else schedule
        order = [(a, schedule), (b, later)] if first == "A" else [(b, schedule), (a, later)]
        records = []
        for target, block in order:
            record = await run(target, block)
            if record.stopped:
                raise BlockStoppedError(f"pair {index + 1}, {target.name}: {record.stopped}")
            records.append(record)
        of_a, of_b = records if first == "A" else reversed(records)
        failures = [*_failures("A", of_a), *_failures("B", of_b)]
        values_a, values_b = values(of_a), values(of_b)
        into.append(Pair(schedule.seed, schedule.sha256, first, values_a, values_b, failures))
        shown = METRICS[0]
        report(
            f"pair {index + 1}: {shown.name} A {_shown(values_a[shown.name])}, B "
            f"{_shown(values_b[shown.name])} {shown.unit}" + "".join(f"; {f}" for f in failures)
        )


def values(record: RunRecord) -> dict[str, float | None]:
    """Every figure of a run's full window, and of each distribution the mean and the percentiles: `ttft_p50`."""
    window = record.summary["full"]
    found: dict[str, float | None] = {name: f.value for name, f in window.figures.items()}
    for name, item in window.distributions.items():
        found[f"{name}_mean"] = item.mean
        found |= {f"{name}_p{p.percent:g}": p.value for p in item.percentiles}
    return found


def _failures(arm: Arm, record: RunRecord) -> list[str]:
    return [f"{arm} {gate.name}: {gate.reason}" for gate in record.failed_gates]


def _shown(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.1f}"


def salted(schedule: Schedule) -> Schedule:
    """The same lengths, shared prefixes and arrivals with other tokens.

    Token ids are moved half-way round their range, so that equal prefixes stay equal; texts get a word in front.
    """
    low, high = schedule.workload.get("token_range", TOKEN_RANGE)
    width = high - low

    def other(prompt: Prompt) -> Prompt:
        if isinstance(prompt, str):
            return f"{word(schedule.seed)} {prompt}"
        if isinstance(prompt[0], dict):
            first, *rest = prompt
            assert isinstance(first, dict)
            return [{**first, "content": f"{word(schedule.seed)} {first['content']}"}, *rest]
        return [
            low + (number - low + width // 2) % width if low <= number < high else number
            for number in prompt
            if isinstance(number, int)
        ]

    def moved(requests: Iterable[PlannedRequest]) -> list[PlannedRequest]:
        return [replace(request, prompt=other(request.prompt)) for request in requests]

    return Schedule(
        schedule.kind,
        schedule.seed,
        {**schedule.workload, "salted": True},
        schedule.arrivals,
        moved(schedule.requests),
        moved(schedule.warmups),
    )


def judge(comparison: Comparison) -> None:
    """Fills in results and validity from the pairs; the same pairs always give the same."""
    failures = [
        f"{name} {number}: {failure}"
        for name, pairs in (("A/A pair", comparison.null_pairs), ("pair", comparison.pairs))
        for number, pair in enumerate(pairs, 1)
        for failure in pair.failures
    ]
    comparison.reasons = [*([comparison.stopped] if comparison.stopped else []), *failures]
    comparison.valid = not comparison.reasons
    every = [*comparison.pairs, *comparison.null_pairs]
    observed = [
        metric
        for metric in METRICS
        if any(pair.a.get(metric.name) is not None for pair in every)
        or any(pair.b.get(metric.name) is not None for pair in every)
    ]
    comparison.results = compare(
        observed,
        comparison.pairs,
        comparison.null_pairs,
        seed=comparison.seed,
        confidence=comparison.confidence,
        least_effect=comparison.least_effect,
    )


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Writes the record; RecordError where the disk refuses it."""
    write_bytes(path, msgspec.json.format(msgspec.json.encode(comparison), indent=1) + b"\n")


def read_comparison(path: Path) -> Comparison:
    """Reads a record; RecordError names the file and what is wrong with it."""
    try:
        comparison = msgspec.json.decode(path.read_bytes(), type=Comparison)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise RecordError(f"{path}: not a comparison: {error}") from None
    if comparison.schema != SCHEMA:
        raise RecordError(
            f"{path}: schema {comparison.schema!r}, this version of poise reads {SCHEMA!r}"
        )
    return comparison
