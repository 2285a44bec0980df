"""What a load generator should have measured on the mock, and how near it came.

Computes from what the mock really did (`Served`), not from what it was asked to do, so a slow machine makes no instrument look
wrong. Knows no client but the record's rows. Invariant: each quantity has its right definition first and the mistaken ones that
are in use after it, by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from poise.bench.mock_server import Served, ServedEvent
from poise.bench.record import RequestRow, RunRecord
from poise.bench.statistics import percentile

TOLERANCE_S = 0.001
TOLERANCE_SHARE = 0.01

Samples = Callable[[Served], list[float]]
"""A quantity of one request: no value where it is not defined, several where it has one per chunk or token."""


def whole(served: Served) -> bool:
    """Whether the client could know that it got the whole answer."""
    return served.outcome == "done" or (
        served.outcome == "no_done" and _sent_tokens(served) == served.completion_tokens
    )


def token_events(served: Served) -> list[ServedEvent]:
    """Events of a stream that hold at least one token."""
    return [event for event in served.events if event.num_tokens and event.kind != "answer"]


def _sent_tokens(served: Served) -> int:
    return sum(event.num_tokens for event in served.events)


def _since_arrival(served: Served, instants: Sequence[float]) -> list[float]:
    return [instant - served.arrived for instant in instants]


def time_to_first_token(served: Served) -> list[float]:
    """To the first chunk with a token, reasoning included."""
    return _since_arrival(served, [event.written for event in token_events(served)[:1]])


def time_to_first_answer(served: Served) -> list[float]:
    """To the first chunk with a token of the answer proper."""
    answers = [event for event in token_events(served) if event.kind == "content"]
    return _since_arrival(served, [event.written for event in answers[:1]])


def time_to_first_event(served: Served) -> list[float]:
    """To any event with choices: mistakes 3 and 4."""
    events = [e for e in served.events if e.kind not in ("comment", "error", "answer")]
    return _since_arrival(served, [event.written for event in events[:1]])


def end_to_end(served: Served) -> list[float]:
    """To the last event of a whole answer."""
    return _since_arrival(served, [served.events[-1].written]) if whole(served) else []


def end_at_any_price(served: Served) -> list[float]:
    """To the last event of whatever came: mistake 10."""
    return _since_arrival(served, [event.written for event in served.events[-1:]])


def chunk_gaps(served: Served) -> list[float]:
    """Between successive chunks with tokens."""
    return [b.written - a.written for a, b in pairwise(token_events(served))]


def token_intervals(served: Served) -> list[float]:
    """One interval per token after the first chunk: a gap before k tokens is k intervals of a kth."""
    return [
        (later.written - earlier.written) / later.num_tokens
        for earlier, later in pairwise(token_events(served))
        for _ in range(later.num_tokens)
    ]


def intervals_with_zeros(served: Served) -> list[float]:
    """A gap before k tokens is that gap and then k − 1 zeros (inference-perf)."""
    events = token_events(served)
    intervals = [0.0] * (events[0].num_tokens - 1) if events else []
    for earlier, later in pairwise(events):
        intervals += [later.written - earlier.written, *[0.0] * (later.num_tokens - 1)]
    return intervals


def gaps_with_first(served: Served) -> list[float]:
    """Chunk gaps and the time to first token among them (llmperf)."""
    return time_to_first_token(served) + chunk_gaps(served)


def time_per_output_token(served: Served) -> list[float]:
    """(end − first token) / (tokens − 1); undefined below two tokens."""
    events = token_events(served)
    if not whole(served) or served.completion_tokens < 2 or not events:
        return []
    return [(served.events[-1].written - events[0].written) / (served.completion_tokens - 1)]


def time_per_token_with_first(served: Served) -> list[float]:
    """End to end / tokens, TTFT included (guidellm)."""
    return [value / served.completion_tokens for value in end_to_end(served)]


def time_per_chunk(served: Served) -> list[float]:
    """As though every chunk were one token: mistake 5."""
    events = token_events(served)
    if len(events) < 2:
        return []
    return [(events[-1].written - events[0].written) / (len(events) - 1)]


QUANTITIES: dict[str, dict[str, Samples]] = {
    "ttft": {
        "first chunk with a token": time_to_first_token,
        "first event of any kind": time_to_first_event,
        "first token of the answer": time_to_first_answer,
    },
    "itl": {
        "a gap before k tokens is k kths": token_intervals,
        "gap between chunks": chunk_gaps,
        "a gap and k − 1 zeros": intervals_with_zeros,
        "gaps with TTFT among them": gaps_with_first,
    },
    "chunk_gap": {"gap between chunks": chunk_gaps},
    "tpot": {
        "(end − first token) / (tokens − 1)": time_per_output_token,
        "end to end / tokens": time_per_token_with_first,
        "per chunk": time_per_chunk,
    },
    "e2el": {
        "whole answers": end_to_end,
        "whatever came": end_at_any_price,
    },
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure: what was reported and what the mock did. `definition` is what the reported figure agrees with."""

    figure: str
    reported: float | None
    expected: float | None
    unit: str
    agrees: bool
    definition: str

    @property
    def difference(self) -> float | None:
        if self.reported is None or self.expected is None:
            return None
        return self.reported - self.expected


def close(
    reported: float, expected: float, tolerance: float = TOLERANCE_S, share: float = TOLERANCE_SHARE
) -> bool:
    """Within 1 ms or 1 %, whichever is more."""
    return abs(reported - expected) <= max(tolerance, share * abs(expected))


def compare_seconds(
    figure: str, reported: float | None, candidates: Mapping[str, float | None]
) -> Comparison:
    """Holds a time against the right definition, the first of `candidates`, then against the mistaken ones."""
    right, expected = next(iter(candidates.items()))
    if reported is None or expected is None:
        agrees = reported is None and expected is None
        name = (
            right if agrees else "no value" if reported is None else "a value where none is defined"
        )
        return Comparison(figure, reported, expected, "s", agrees, name)
    matches = [
        name for name, value in candidates.items() if value is not None and close(reported, value)
    ]
    agrees = right in matches
    name = right if agrees else ", ".join(matches) or "none that is known"
    return Comparison(figure, reported, expected, "s", agrees, name)


def compare_number(
    figure: str, reported: float | None, expected: float, unit: str, share: float = TOLERANCE_SHARE
) -> Comparison:
    """A count (share 0) or a rate."""
    agrees = reported is not None and close(reported, expected, 0.0, share)
    return Comparison(figure, reported, expected, unit, agrees, "" if agrees else "differs")


def expected_statistic(
    served: Sequence[Served], samples: Samples, statistic: str, hyndman_fan_type: int = 7
) -> float | None:
    """`mean`, `median` or `pNN` of a quantity over requests; None without values."""
    ordered = sorted(value for one in served for value in samples(one))
    if not ordered:
        return None
    if statistic == "mean":
        return fmean(ordered)
    percent = 50.0 if statistic == "median" else float(statistic.removeprefix("p"))
    return percentile(ordered, percent, hyndman_fan_type)


def compare_statistic(
    metric: str,
    statistic: str,
    reported: float | None,
    served: Sequence[Served],
    hyndman_fan_type: int = 7,
) -> Comparison:
    """A reported statistic of a metric, in seconds, against every definition of it in use."""
    candidates = {
        name: expected_statistic(served, samples, statistic, hyndman_fan_type)
        for name, samples in QUANTITIES[metric].items()
    }
    return compare_seconds(f"{statistic} {metric}", reported, candidates)


def span(served: Sequence[Served]) -> float:
    """Seconds from the first arrival to the last end."""
    ends = [one.finished for one in served if one.finished is not None]
    return max(ends) - min(one.arrived for one in served) if ends else math.nan


MOCK_METRICS = {
    "ttft_from_send": "ttft",
    "itl": "itl",
    "chunk_gap": "chunk_gap",
    "tpot": "tpot",
    "e2el_from_send": "e2el",
}
"""Distributions of our own records that the mock can know, and its names for them."""


def compare_run(record: RunRecord, served: Sequence[Served]) -> list[Comparison]:
    """Every figure of our record's full window that the mock can judge. `served` is without warm-ups."""
    summary = record.summary["full"]
    complete = [one for one in served if whole(one)]
    tokens = sum(one.completion_tokens for one in complete)
    comparisons = [
        compare_number("answered", summary.statuses.get("ok", 0), len(complete), "", share=0)
    ]
    rates = {"request_throughput": len(complete), "output_throughput": tokens}
    for name, count in rates.items():
        reported = record.figure(name)
        comparisons.append(compare_number(name, reported, count / span(served), "1/s"))
    for name, metric in MOCK_METRICS.items():
        found = summary.distributions[name]
        comparisons.append(compare_statistic(metric, "mean", found.mean, complete))
        comparisons += [
            compare_statistic(
                metric, f"p{item.percent:g}", item.value, complete, item.hyndman_fan_type
            )
            for item in found.percentiles
        ]
    return comparisons


def pair(rows: Sequence[RequestRow], served: Sequence[Served]) -> list[tuple[RequestRow, Served]]:
    """Rows with the mock's records of them, by the digest of the answer's text; needs a profile with labelled texts."""
    by_digest = {one.text_sha256: one for one in served}
    return [
        (row, by_digest[row.text_sha256])
        for row in rows
        if row.text_sha256 is not None and row.text_sha256 in by_digest
    ]
