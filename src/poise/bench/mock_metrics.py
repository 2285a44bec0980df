"""What the mock counts, under vLLM's metric names, and its prefix cache of remembered prompts.

Invariant: every counter follows from what was served, so that a client's view can be held against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from poise.bench.mock_schedule import MockRequest

BLOCK = 16


class MockMetrics(Collector):
    """Counters and gauges of one mock server."""

    def __init__(self, model: str) -> None:
        self.num_running = 0
        self.num_waiting = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.finished = {"stop": 0, "length": 0, "abort": 0}
        self._labels = {"model_name": model, "engine": "0"}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def admit(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.num_running += 1
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def finish(self, reason: str) -> None:
        self.num_running -= 1
        self.finished[reason] += 1

    def page(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        gauges = {
            "vllm:num_requests_running": self.num_running,
            "vllm:num_requests_waiting": self.num_waiting,
            "vllm:kv_cache_usage_perc": 0,
        }
        counters = {
            "vllm:prefix_cache_queries": self.prompt_tokens,
            "vllm:prefix_cache_hits": self.cached_tokens,
            "vllm:prompt_tokens": self.prompt_tokens,
            "vllm:generation_tokens": self.generation_tokens,
            "vllm:num_preemptions": 0,
        }
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(name, "of the mock", labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge
        for name, value in counters.items():
            counter = CounterMetricFamily(name, "of the mock", labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter
        labels = [*self._labels, "finished_reason"]
        success = CounterMetricFamily("vllm:request_success", "of the mock", labels=labels)
        for reason, count in self.finished.items():
            success.add_metric([*self._labels.values(), reason], count)
        yield success


class PrefixCache:
    """Remembers every prompt it was shown, in whole blocks; never evicts."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def look_up(self, request: MockRequest) -> MockRequest:
        """The request with the tokens it shares with earlier prompts; its last token is never a hit."""
        prompt = request.prompt
        key, hits, hitting = 0, 0, True
        for begin in range(0, len(prompt) - BLOCK + 1, BLOCK):
            key = hash((key, prompt[begin : begin + BLOCK]))
            hitting = hitting and key in self._seen
            if hitting and begin + BLOCK < len(prompt):
                hits = begin + BLOCK
            self._seen.add(key)
        return replace(request, cached_tokens=hits)
