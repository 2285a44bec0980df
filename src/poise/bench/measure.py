"""Turns rows into figures: latencies by their definitions, throughput, goodput, on the full and on the steady window.

Knows no network. Invariants: latency is taken of requests planned in the window, throughput of events that happened in it; a
failed request counts as infinitely late; an undefined value is left out, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from poise.bench.record import Distribution, Figure, RequestRow, WindowSummary
from poise.bench.statistics import (
    PercentileChoice,
    distribution,
    percentile,
    wilson_interval,
)
from poise.errors import ConfigError

Value = float | None
PER_REQUEST_PERCENT = 95.0
GOODPUT_NAMES = ("ttft", "tpot", "e2el", "itl_p95", "chunk_gap_p95")


def ttft(row: RequestRow) -> Value:
    return _difference(row.first_token, row.planned)


def ttft_from_send(row: RequestRow) -> Value:
    return _difference(row.first_token, row.sent)


def ttft_reasoning(row: RequestRow) -> Value:
    return _difference(row.first_reasoning, row.planned)


def ttft_answer(row: RequestRow) -> Value:
    return _difference(row.first_answer, row.planned)


def ttft_tool_call(row: RequestRow) -> Value:
    return _difference(row.first_tool_call, row.planned)


def e2el(row: RequestRow) -> Value:
    return _difference(row.end, row.planned)


def e2el_from_send(row: RequestRow) -> Value:
    return _difference(row.end, row.sent)


def client_queue(row: RequestRow) -> Value:
    return _difference(row.ready, row.planned)


def dispatch_lag(row: RequestRow) -> Value:
    return _difference(row.sent, row.ready)


def tpot(row: RequestRow) -> Value:
    """Undefined for fewer than two tokens."""
    if row.first_token is None or row.end is None or (row.completion_tokens or 0) < 2:
        return None
    return (row.end - row.first_token) / (_tokens(row) - 1)


def chunk_gaps(row: RequestRow) -> list[float]:
    times = row.chunk_times
    return [later - earlier for earlier, later in zip(times, times[1:])]  # noqa: RUF007


def token_intervals(row: RequestRow) -> list[float]:
    """A gap before k tokens is k intervals of a kth; empty where the tokens of chunks are not known."""
    if not row.chunk_tokens:
        return []
    intervals: list[float] = []
    for gap, tokens in zip(chunk_gaps(row), row.chunk_tokens[1:], strict=True):
        intervals += [gap / tokens] * tokens
    return intervals


def itl_request_mean(row: RequestRow) -> Value:
    intervals = sum(row.chunk_tokens[1:])
    return (row.chunk_times[-1] - row.chunk_times[0]) / intervals if intervals else None


def _tokens(row: RequestRow) -> int:
    return row.completion_tokens or 0


def _difference(later: Value, earlier: Value) -> Value:
    return None if later is None or earlier is None else later - earlier


@dataclass(frozen=True, slots=True)
class Metric:
    """A latency with one value for each request."""

    name: str
    definition: str
    value: Callable[[RequestRow], Value]
    counts_misses: bool = True
    """Whether a failed request enters as infinitely late."""


METRICS = (
    Metric("ttft", "first chunk with a token − planned instant", ttft),
    Metric("ttft_from_send", "first chunk with a token − send", ttft_from_send),
    Metric("tpot", "(end − first token) / (output tokens − 1)", tpot),
    Metric("itl_request_mean", "mean token interval of each request", itl_request_mean),
    Metric("e2el", "end of the answer − planned instant", e2el),
    Metric("e2el_from_send", "end of the answer − send", e2el_from_send),
    Metric("ttft_reasoning", "first chunk with reasoning − planned", ttft_reasoning, False),
    Metric("ttft_answer", "first chunk with answer text − planned", ttft_answer, False),
    Metric("ttft_tool_call", "first chunk with a tool call − planned", ttft_tool_call, False),
)
CLIENT_METRICS = (
    Metric("client_queue", "let through by the limit − planned instant", client_queue, False),
    Metric("dispatch_lag", "send − the instant it should have been sent", dispatch_lag, False),
)
OPTIONAL = frozenset({"ttft_reasoning", "ttft_tool_call"})
POOLED: Mapping[str, tuple[str, Callable[[RequestRow], list[float]]]] = {
    "itl": ("intervals between tokens, by usage; a gap of k tokens is k kths", token_intervals),
    "chunk_gap": ("gaps between chunks that hold tokens, all requests pooled", chunk_gaps),
}
METRIC_NAMES = (*(metric.name for metric in (*METRICS, *CLIENT_METRICS)), *POOLED)


def summarise(
    rows: Sequence[RequestRow],
    begin: float,
    end: float,
    choice: PercentileChoice,
    slos: Mapping[str, float] | None = None,
) -> WindowSummary:
    """Everything about one window. `rows` is the whole run: events of requests planned outside count where they fall."""
    planned = [row for row in rows if begin <= row.planned <= end]
    return WindowSummary(
        begin=begin,
        end=end,
        num_offered=len(planned),
        distributions=_distributions(planned, choice),
        figures=_figures(rows, planned, begin, end, slos or {}),
        statuses=dict(Counter(row.status for row in planned)),
    )


def _distributions(
    planned: Sequence[RequestRow], choice: PercentileChoice
) -> dict[str, Distribution]:
    answered = [row for row in planned if row.status == "ok"]
    missed = len(planned) - len(answered)
    found: dict[str, Distribution] = {}
    for metric in METRICS:
        values = [value for row in answered if (value := metric.value(row)) is not None]
        if not values and metric.name in OPTIONAL:
            continue
        # with no defined value at all (an answer in one piece has no TTFT) a miss has none either
        misses = missed if metric.counts_misses and values else 0
        found[metric.name] = distribution(values, metric.definition, choice, num_missed=misses)
    for metric in CLIENT_METRICS:
        values = [value for row in planned if (value := metric.value(row)) is not None]
        found[metric.name] = distribution(values, metric.definition, choice)
    for name, (definition, pool) in POOLED.items():
        gaps = [gap for row in answered for gap in pool(row)]
        found[name] = distribution(gaps, definition, choice)
    return found


def _figures(
    rows: Sequence[RequestRow],
    planned: Sequence[RequestRow],
    begin: float,
    end: float,
    slos: Mapping[str, float],
) -> dict[str, Figure]:
    wall = end - begin
    answered = [row for row in planned if row.status == "ok"]
    completed = [
        row
        for row in rows
        if row.status == "ok" and row.end is not None and begin <= row.end <= end
    ]
    output = _output_tokens_in(rows, begin, end)
    prompt = _total(completed, lambda row: row.prompt_tokens)
    figures = {
        "duration": Figure("end of the window − its begin", "s", wall),
        "request_throughput": _rate(
            "answers completed in the window / its length", "req/s", len(completed), wall
        ),
        "output_throughput": _rate(
            "output tokens of completed requests that came in the window / its length",
            "tok/s",
            output,
            wall,
        ),
        "prompt_throughput": _rate(
            "prompt tokens of requests completed in the window / its length", "tok/s", prompt, wall
        ),
        "success_share": _share("answered / offered", len(answered), len(planned)),
        "mean_in_flight": Figure(
            "time average of requests between send and end",
            "requests",
            in_flight_time(rows, begin, end) / wall if wall > 0 else None,
        ),
        "blocked_share": _share(
            "sends held back by the concurrency limit / sends",
            sum(row.ready is not None and row.ready > row.planned for row in planned),
            sum(row.sent is not None for row in planned),
        ),
    }
    cached = _total(answered, lambda row: row.cached_tokens)
    answered_prompt = _total(answered, lambda row: row.prompt_tokens)
    figures["cached_share"] = Figure(
        "cached prompt tokens / prompt tokens, by usage",
        "",
        cached / answered_prompt if cached is not None and answered_prompt else None,
    )
    if slos:
        good = sum(meets(row, slos) for row in planned)
        text = ", ".join(f"{name} ≤ {limit * 1e3:g} ms" for name, limit in slos.items())
        figures["goodput_share"] = _share(f"requests with {text} / offered", good, len(planned))
        figures["goodput"] = _rate(f"requests with {text} / length", "req/s", good, wall)
    return figures


def _output_tokens_in(rows: Sequence[RequestRow], begin: float, end: float) -> float | None:
    """Completed requests' tokens by the instants of their chunks, by the end of the answer where chunks have no counts."""
    total = 0
    for row in rows:
        if row.status != "ok" or row.end is None:
            continue
        if row.completion_tokens is None:
            return None
        if begin <= row.planned and row.end <= end:
            total += row.completion_tokens
        elif row.chunk_tokens:
            stamped = zip(row.chunk_times, row.chunk_tokens, strict=True)
            total += sum(tokens for time, tokens in stamped if begin <= time <= end)
        elif begin <= row.end <= end:
            total += row.completion_tokens
    return total


def _total(rows: Sequence[RequestRow], value: Callable[[RequestRow], int | None]) -> int | None:
    """Sum over rows; None where one of them does not say, or there is none."""
    values = [value(row) for row in rows]
    known = [item for item in values if item is not None]
    return sum(known) if known and len(known) == len(values) else None


def _rate(definition: str, unit: str, count: float | None, wall: float) -> Figure:
    return Figure(definition, unit, count / wall if count is not None and wall > 0 else None)


def _share(definition: str, successes: int, n: int) -> Figure:
    low, high = wilson_interval(successes, n)
    value = successes / n if n else None
    return Figure(definition, "", value, low, high, 0.95 if n else None, n)


def in_flight_time(rows: Sequence[RequestRow], begin: float, end: float) -> float:
    """Request-seconds in flight inside the window."""
    return sum(
        max(0.0, min(row.end, end) - max(row.sent, begin))
        for row in rows
        if row.sent is not None and row.end is not None
    )


def meets(row: RequestRow, slos: Mapping[str, float]) -> bool:
    """Whether a request kept every limit; one that failed, or has no such value, did not."""
    if row.status != "ok":
        return False
    for name, limit in slos.items():
        value = _slo_value(row, name)
        if value is None or value > limit:
            return False
    return True


def _slo_value(row: RequestRow, name: str) -> Value:
    if name == "ttft":
        return ttft(row)
    if name == "tpot":
        return tpot(row)
    if name == "e2el":
        return e2el(row)
    values = sorted(token_intervals(row) if name == "itl_p95" else chunk_gaps(row))
    return percentile(values, PER_REQUEST_PERCENT) if values else None


def parse_slos(texts: Sequence[str]) -> dict[str, float]:
    """`ttft:1000 tpot:50` in milliseconds, as vLLM writes it, to seconds; ConfigError names the part."""
    slos: dict[str, float] = {}
    for text in (part for item in texts for part in item.split()):
        name, _, limit = text.partition(":")
        try:
            milliseconds = float(limit)
        except ValueError:
            milliseconds = -1.0
        if name not in GOODPUT_NAMES or not 0.0 < milliseconds < 1e12:
            raise ConfigError(
                f"--goodput {text!r}: NAME:MILLISECONDS with NAME one of {', '.join(GOODPUT_NAMES)}"
            )
        slos[name] = milliseconds / 1e3
    return slos
