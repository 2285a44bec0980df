"""Little's law, L = λ·W: requests in flight, arrivals, and time in the system; any two give the third.

Knows means only. Holds for whatever arrives and leaves, in any order, if over the span as much leaves as arrives (Little 1961).
"""

from __future__ import annotations

from poise.errors import ConfigError
from poise.planner.inputs import positive
from poise.planner.report import Report, Unit

CANNOT_TELL = (
    "It holds between means, so it can't tell a percentile: the same mean time may hide a p99 of any size.",
    "It needs a steady state (as many leave as arrive), and says nothing about whether a higher rate is possible.",
)


def plan(
    *,
    concurrency: object = None,
    rate: object = None,
    latency: object = None,
    output_tokens: object = None,
    source: str = "",
) -> Report:
    """L in requests, λ in requests/s, W in seconds: give two, or all three to check them against each other.

    `source` names where the numbers come from, a record for example.
    """
    given = [value for value in (concurrency, rate, latency) if value is not None]
    if len(given) < 2:
        raise ConfigError(
            "give two of --concurrency (L), --rate (λ, requests/s) and --latency (W, s)"
        )
    in_flight = None if concurrency is None else positive("--concurrency", concurrency)
    arrivals = None if rate is None else positive("--rate", rate)
    seconds = None if latency is None else positive("--latency", latency)
    report = Report("little", f"Little's law{f', {source}' if source else ''}")
    given_by = f"from {source}" if source else "as given"
    how = {"concurrency": given_by, "rate": given_by, "latency": given_by}
    if in_flight is None:
        assert arrivals is not None
        assert seconds is not None
        in_flight = arrivals * seconds
        how["concurrency"] = f"λ·W = {arrivals:g} · {seconds:g}"
    elif arrivals is None:
        assert seconds is not None
        arrivals = in_flight / seconds
        how["rate"] = f"L / W = {in_flight:g} / {seconds:g}"
    elif seconds is None:
        seconds = in_flight / arrivals
        how["latency"] = f"L / λ = {in_flight:g} / {arrivals:g}"
    report.add("concurrency", "in flight, L", in_flight, Unit.REQUESTS, how["concurrency"])
    report.add("rate", "arrivals, λ", arrivals, Unit.REQUESTS_PER_SECOND, how["rate"])
    report.add("latency", "time in the system, W", seconds, Unit.SECONDS, how["latency"])
    if len(given) == 3:
        by_law = arrivals * seconds
        off = round(100 * (by_law - in_flight) / in_flight, 6)
        report.add("by_law", "λ·W", by_law, Unit.REQUESTS, f"{arrivals:g} · {seconds:g}")
        report.add("difference", "off by", off, Unit.PERCENT, "(λ·W − L) / L")
    if output_tokens is not None:
        tokens = positive("--output-tokens", output_tokens)
        report.add("output_tokens", "answer", tokens, Unit.TOKENS_PER_REQUEST, "as given")
        report.add(
            "output_throughput", "output", arrivals * tokens, Unit.TOKENS_PER_SECOND,
            f"λ · tokens/request = {arrivals:g} · {tokens:g}",
        )  # fmt: skip
    report.notes += CANNOT_TELL
    return report
