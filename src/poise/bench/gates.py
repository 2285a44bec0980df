"""Checks that a run can be believed; one that fails makes the run invalid, and its reason stands in the output.

Judges observations, changes none. Invariant: each gate gives a verdict on every run; where there was nothing to check it says
"unchecked" and why, never "pass".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from poise.bench.measure import dispatch_lag, e2el_from_send, ttft_from_send
from poise.bench.record import Gate, RequestRow, Scrape
from poise.bench.schedule import Schedule, shareable_tokens
from poise.bench.scrape import HITS, difference
from poise.bench.statistics import percentile

HANDLING_S = 5e-4
"""What parsing and closing a request may take between the two readings of the clock at its end."""


@dataclass(frozen=True, slots=True)
class GateLimits:
    """How far off is too far."""

    little: float = 0.02
    rate: float = 0.005
    rate_seconds: float = 0.01
    """Slack on the span of sends, for schedules so short that a late last send alone would break `rate`."""
    dispatch_lag_s: float = 0.005
    loop_lag_s: float = 0.01
    share_of_latency: float = 0.01
    """A lag may be this share of the median latency where that is more than the limit above."""
    tokens: float = 0.01
    length: float = 0.01
    length_each: float = 0.1
    failed_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Observed:
    """What the client saw of its own run, independently of the rows."""

    rows: Sequence[RequestRow]
    duration_s: float
    in_flight_s: float
    """∫ requests in flight dt, counted by the dispatcher with its own clock readings."""
    loop_lags: Sequence[float]
    scrapes: Sequence[Scrape]
    stopped: str | None = None


def judge(
    observed: Observed, schedule: Schedule, cache: str, limits: GateLimits | None = None
) -> list[Gate]:
    """Every gate's verdict on a run."""
    limits = limits or GateLimits()
    return [
        completion(observed, limits),
        little(observed, limits),
        rate(observed.rows, schedule, limits),
        dispatch(observed.rows, limits),
        event_loop(observed, limits),
        tokens(observed.rows, limits),
        output_length(observed.rows, limits),
        cache_label(observed, schedule, cache),
    ]


def completion(observed: Observed, limits: GateLimits) -> Gate:
    """Every request was answered, but for the share that is allowed to fail."""
    name = "answered"
    rows = observed.rows
    failed = [row for row in rows if row.status != "ok"]
    share = len(failed) / len(rows) if rows else 1.0
    if observed.stopped is not None:
        return Gate(name, "fail", observed.stopped, share, limits.failed_share)
    if not rows:
        return Gate(name, "fail", "nothing was offered", share, limits.failed_share)
    if share <= limits.failed_share:
        reason = f"{len(rows) - len(failed)} of {len(rows)} answered"
        return Gate(name, "pass", reason, share, limits.failed_share)
    reasons = Counter(row.error or row.status for row in failed).most_common(1)
    text, count = reasons[0]
    return Gate(
        name,
        "fail",
        f"{len(failed)} of {len(rows)} requests failed; {count} of them: {text}",
        share,
        limits.failed_share,
    )


def little(observed: Observed, limits: GateLimits) -> Gate:
    """L = λ W over the whole run, L counted by the dispatcher, λ W from the rows."""
    name = "little's law"
    times = [
        row.end - row.sent for row in observed.rows if row.sent is not None and row.end is not None
    ]
    if observed.duration_s <= 0 or not times:
        return Gate(name, "unchecked", "nothing was in flight")
    measured = observed.in_flight_s / observed.duration_s
    by_law = sum(times) / observed.duration_s
    slack = limits.little * measured + len(times) * HANDLING_S / observed.duration_s
    off = abs(measured - by_law) / measured if measured > 0 else float("inf")
    reason = f"{measured:.3f} in flight on average, λW = {by_law:.3f}"
    if abs(measured - by_law) > slack:
        reason += ": the clock, the window or a lost request is wrong"
        return Gate(name, "fail", reason, off, limits.little)
    return Gate(name, "pass", reason, off, limits.little)


def rate(rows: Sequence[RequestRow], schedule: Schedule, limits: GateLimits) -> Gate:
    """Sends came at the rate at which the client was free to send."""
    name = "achieved rate"
    if schedule.is_closed:
        return Gate(name, "unchecked", "a closed loop offers no rate of its own")
    sent = [(row.ready, row.sent) for row in rows if row.sent is not None and row.ready is not None]
    offered = max((r for r, _ in sent), default=0.0) - min((r for r, _ in sent), default=0.0)
    achieved = max((s for _, s in sent), default=0.0) - min((s for _, s in sent), default=0.0)
    if len(sent) < 2 or offered <= 0 or achieved <= 0:
        return Gate(name, "unchecked", "fewer than two sends, or all at one instant")
    ratio = offered / achieved
    limit = limits.rate + limits.rate_seconds / offered
    reason = (
        f"{(len(sent) - 1) / achieved:.2f} of {(len(sent) - 1) / offered:.2f} requests a second"
    )
    if abs(1.0 - ratio) > limit:
        return Gate(name, "fail", f"{reason}: the client did not keep up", ratio, 1.0 - limit)
    return Gate(name, "pass", reason, ratio, 1.0 - limit)


def dispatch(rows: Sequence[RequestRow], limits: GateLimits) -> Gate:
    """The 99th percentile of send − the instant it should have been."""
    latency = _median([ttft_from_send(row) or e2el_from_send(row) for row in rows])
    lags = [lag for row in rows if (lag := dispatch_lag(row)) is not None]
    return _lag("dispatch lag", lags, limits.dispatch_lag_s, latency, limits)


def event_loop(observed: Observed, limits: GateLimits) -> Gate:
    """The 99th percentile of how late the client's heartbeat came."""
    latency = _median([e2el_from_send(row) for row in observed.rows])
    return _lag("event-loop lag", observed.loop_lags, limits.loop_lag_s, latency, limits)


def _lag(
    name: str, lags: Sequence[float], floor: float, latency: float, limits: GateLimits
) -> Gate:
    if not lags:
        return Gate(name, "unchecked", "no readings")
    value = percentile(sorted(lags), 99.0)
    limit = max(floor, limits.share_of_latency * latency)
    reason = f"p99 {value * 1e3:.2f} ms of {len(lags)}, limit {limit * 1e3:.2f} ms"
    if value > limit:
        return Gate(name, "fail", f"{reason}: the client was the bottleneck", value, limit, "s")
    return Gate(name, "pass", reason, value, limit, "s")


def _median(values: Sequence[float | None]) -> float:
    known = sorted(value for value in values if value is not None)
    return percentile(known, 50.0) if known else 0.0


def tokens(rows: Sequence[RequestRow], limits: GateLimits) -> Gate:
    """Usage came with every answer, and the chunks' tokens add up to it."""
    name = "token reconciliation"
    answered = [row for row in rows if row.status == "ok"]
    if not answered:
        return Gate(name, "unchecked", "no answers")
    without = sum(row.completion_tokens is None for row in answered)
    if without:
        reason = f"the server sent no usage with {without} of {len(answered)} answers"
        return Gate(name, "fail", reason, without / len(answered), 0.0)
    streamed = [row for row in answered if row.streamed]
    if not streamed:
        return Gate(name, "unchecked", "answers in one piece have no chunks")
    impossible = sum(len(row.chunk_times) > (row.completion_tokens or 0) for row in streamed)
    if impossible:
        reason = f"{impossible} of {len(streamed)} answers have more chunks with text than tokens"
        return Gate(name, "fail", reason, impossible / len(streamed), 0.0)
    counted = [row for row in streamed if row.chunk_tokens]
    if not counted:
        reason = "chunks hold several tokens each and usage comes at the end: no token intervals"
        return Gate(name, "unchecked", reason)
    by_chunks = sum(sum(row.chunk_tokens) for row in counted)
    by_usage = sum(row.completion_tokens or 0 for row in counted)
    off = abs(by_chunks - by_usage) / max(1, by_usage)
    reason = f"{by_chunks} tokens in chunks, {by_usage} by usage"
    if len(counted) < len(streamed):
        reason += f", {len(streamed) - len(counted)} answers without token intervals"
    return Gate(name, "pass" if off <= limits.tokens else "fail", reason, off, limits.tokens)


def output_length(rows: Sequence[RequestRow], limits: GateLimits) -> Gate:
    """With ignore_eos the server gave as many tokens as were asked for."""
    name = "output length"
    known = [
        (row.completion_tokens, row.expected_output_tokens)
        for row in rows
        if row.status == "ok"
        and row.completion_tokens is not None
        and row.expected_output_tokens is not None
    ]
    if not known:
        return Gate(name, "unchecked", "no output length was prescribed, or none is known")
    given = sum(given for given, _ in known)
    asked = sum(asked for _, asked in known)
    odd = sum(abs(given - asked) > limits.length_each * asked for given, asked in known)
    off = abs(given - asked) / asked
    reason = f"{given} tokens given, {asked} asked for"
    if odd or off > limits.length:
        reason += f", {odd} of {len(known)} answers off by more than {limits.length_each:.0%}"
        return Gate(name, "fail", reason, off, limits.length)
    return Gate(name, "pass", reason, off, limits.length)


def cache_label(observed: Observed, schedule: Schedule, cache: str) -> Gate:
    """The label cold or warm agrees with the server's hit counters or with the cached tokens in its usage."""
    name = "cache label"
    if cache == "natural":
        return Gate(name, "unchecked", "the run claims neither a cold nor a warm cache")
    known = [row.cached_tokens for row in observed.rows if row.cached_tokens is not None]
    counter = difference(observed.scrapes, *HITS)
    seen = [float(sum(known))] if known else []
    seen += [counter] if counter is not None else []
    if not seen:
        return Gate(name, "unchecked", "the server tells neither cached tokens nor prefix hits")
    hits = max(seen)
    if cache == "warm":
        reason = f"labelled warm, {hits:.0f} prompt tokens came from the cache"
        return Gate(name, "pass" if hits > 0 else "fail", reason, hits)
    shareable = shareable_tokens(schedule.requests)
    if shareable is None:
        shareable = 0 if hits == 0 else None
    if shareable is None:
        return Gate(
            name, "unchecked", f"{hits:.0f} cached tokens of text that may share a template"
        )
    reason = f"labelled cold, {hits:.0f} cached tokens, {shareable} shared within the schedule"
    return Gate(name, "pass" if hits <= shareable else "fail", reason, hits, shareable, "tokens")
