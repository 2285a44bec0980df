"""Readings of a server's /metrics before, during and after the load.

A reading is kept as bytes and parsed once the run is over, so that parsing delays no send. Invariant: a server without
/metrics gives readings with an error, never a failure of the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.parser import text_string_to_metric_families

from poise.bench.record import Figure, Scrape

PREFIXES = ("vllm:", "sglang:", "llamacpp:", "poise:")
LEFT_OUT = ("_bucket", "_created")
HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
GAUGES = (
    ("server_running", "vllm:num_requests_running", "requests"),
    ("server_waiting", "vllm:num_requests_waiting", "requests"),
    ("server_kv_usage", "vllm:kv_cache_usage_perc", ""),
)
PREEMPTIONS = "vllm:num_preemptions_total"

Phase = Literal["before", "during", "after"]


@dataclass(frozen=True, slots=True)
class RawScrape:
    """What /metrics said, or why it said nothing."""

    time: float
    phase: Phase
    text: bytes = b""
    error: str | None = None


def parse(raw: RawScrape) -> Scrape:
    """Sums each sample over its labels; buckets of histograms are left out."""
    if raw.error is not None:
        return Scrape(raw.time, raw.phase, {}, raw.error)
    values: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(raw.text.decode("utf-8")):
            for sample in family.samples:
                if sample.name.startswith(PREFIXES) and not sample.name.endswith(LEFT_OUT):
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
    except (ValueError, KeyError, IndexError) as error:
        return Scrape(raw.time, raw.phase, {}, f"not Prometheus text: {error}")
    return Scrape(raw.time, raw.phase, values)


def difference(scrapes: Sequence[Scrape], *names: str) -> float | None:
    """How much the first known counter of `names` grew from the reading before to the one after."""
    before = [scrape for scrape in scrapes if scrape.phase == "before" and scrape.values]
    after = [scrape for scrape in scrapes if scrape.phase == "after" and scrape.values]
    for name in names:
        if before and after and name in before[-1].values and name in after[-1].values:
            return after[-1].values[name] - before[-1].values[name]
    return None


def server_figures(scrapes: Sequence[Scrape]) -> dict[str, Figure]:
    """What the server said of itself under load; a figure is left out where it said nothing."""
    figures: dict[str, Figure] = {}

    def add(name: str, definition: str, unit: str, value: float | None) -> None:
        if value is not None:
            figures[name] = Figure(definition, unit, value)

    hits = difference(scrapes, *HITS)
    add("server_prefix_hits", f"growth of {HITS[0]}", "tokens", hits)
    preemptions = difference(scrapes, PREEMPTIONS)
    add("server_preemptions", f"growth of {PREEMPTIONS}", "requests", preemptions)
    for name, gauge, unit in GAUGES:
        readings = [s.values[gauge] for s in scrapes if s.phase == "during" and gauge in s.values]
        if readings:
            mean = math.fsum(readings) / len(readings)
            add(f"{name}_mean", f"mean of {len(readings)} readings of {gauge}", unit, mean)
            add(f"{name}_peak", f"largest reading of {gauge}", unit, max(readings))
    return figures
