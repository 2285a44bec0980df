"""What the engine counts, and how Prometheus reads it, under vLLM's names, labels and buckets.

The engine's thread writes plain numbers; they become samples only when somebody scrapes. Knows
nothing of requests beyond the figures handed to it. Invariant: counters and histograms never
decrease.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from poise.engine.scheduling_metrics import SchedulingMetrics
from poise.engine.utilisation import Utilisation

FINISH_REASONS = ("stop", "length", "abort", "error", "deadline")
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)


def one_two_five_buckets(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 … up to `largest`."""
    buckets: list[int] = []
    scale = 1
    while True:
        for factor in (1, 2, 5):
            if factor * scale > largest:
                return tuple(buckets)
            buckets.append(factor * scale)
        scale *= 10


class Histogram:
    """Counts per bucket (the last one is +Inf) and the sum of what was observed."""

    __slots__ = ("bounds", "counts", "documentation", "name", "total")

    def __init__(self, name: str, documentation: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.documentation = documentation
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def family(self, labels: Mapping[str, str]) -> HistogramMetricFamily:
        counts = list(self.counts)  # one copy, so that the buckets agree with each other
        cumulative = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), counts, strict=True):
            cumulative += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), cumulative))
        family = HistogramMetricFamily(self.name, self.documentation, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self.total)
        return family


class EngineMetrics(Collector):
    """Counters, gauges and histograms of one engine; `registry` holds nothing else.

    `tenant_registry` has the families that name tenants, apart, since not everybody may read them.

    `cache_config` becomes the labels of `vllm:cache_config_info`.
    """

    def __init__(
        self,
        model_name: str,
        *,
        max_model_len: int,
        num_blocks: int,
        cache_config: Mapping[str, str],
        work: Utilisation | None = None,
        scheduling: SchedulingMetrics | None = None,
        engine: str = "0",
    ) -> None:
        self._work = work
        self._scheduling = scheduling
        self.tenant_registry = CollectorRegistry(auto_describe=False)
        self.tenant_registry.register(_TenantCollector(self))
        self._labels = {"model_name": model_name, "engine": engine}
        self._cache_config = dict(cache_config)
        # gauges, set once per step
        self.num_running = 0
        self.num_waiting = 0
        self.num_blocks = num_blocks
        self.num_free_blocks = num_blocks
        # counters
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.corrupted_requests = 0
        self.num_steps = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        # histograms
        lengths = one_two_five_buckets(max_model_len)
        self.time_to_first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "Seconds from arrival to the first token.",
            FIRST_TOKEN_BUCKETS,
        )
        self.inter_token_latency = Histogram(
            "vllm:inter_token_latency_seconds",
            "Seconds between outputs of one request, from the second token on.",
            PER_TOKEN_BUCKETS,
        )
        self.time_per_output_token = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "Decode seconds divided by the tokens after the first, per finished request.",
            PER_TOKEN_BUCKETS,
        )
        self.e2e_latency = Histogram(
            "vllm:e2e_request_latency_seconds", "Seconds from arrival to finish.", REQUEST_BUCKETS
        )
        self.queue_time = Histogram(
            "vllm:request_queue_time_seconds",
            "Seconds from arrival to first scheduling.",
            REQUEST_BUCKETS,
        )
        self.prefill_time = Histogram(
            "vllm:request_prefill_time_seconds",
            "Seconds from first scheduling to the first token.",
            REQUEST_BUCKETS,
        )
        self.decode_time = Histogram(
            "vllm:request_decode_time_seconds",
            "Seconds from the first to the last token.",
            REQUEST_BUCKETS,
        )
        self.inference_time = Histogram(
            "vllm:request_inference_time_seconds",
            "Seconds from first scheduling to the last token.",
            REQUEST_BUCKETS,
        )
        self.request_prompt_tokens = Histogram(
            "vllm:request_prompt_tokens", "Prompt tokens per finished request.", lengths
        )
        self.request_generation_tokens = Histogram(
            "vllm:request_generation_tokens", "Generated tokens per finished request.", lengths
        )
        self.request_params_n = Histogram(
            "vllm:request_params_n", "The parameter n of finished requests.", N_BUCKETS
        )
        self.request_params_max_tokens = Histogram(
            "vllm:request_params_max_tokens",
            "The parameter max_tokens of finished requests.",
            lengths,
        )
        self.iteration_tokens = Histogram(
            "vllm:iteration_tokens_total", "Tokens computed per engine step.", ITERATION_BUCKETS
        )
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def render(self) -> bytes:
        """The Prometheus text format, as `/metrics` sends it."""
        return generate_latest(self.registry)

    def tenant_families(self) -> Iterable[Metric]:
        """Those with a tenant's name among their labels."""
        if self._scheduling is not None:
            yield from self._scheduling.tenant_families(self._labels)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield from self._gauges()
        yield from self._counters()
        if self._work is not None:
            yield from self._work.families(self._labels)
        if self._scheduling is not None:
            yield from self._scheduling.families(self._labels)
        for value in vars(self).values():
            if isinstance(value, Histogram):
                yield value.family(self._labels)

    def _gauges(self) -> Iterable[Metric]:
        used = 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0
        for name, documentation, value in (
            ("vllm:num_requests_running", "Requests in execution.", self.num_running),
            ("vllm:num_requests_waiting", "Requests waiting to be scheduled.", self.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", used),
            ("poise_kv_blocks_total", "KV blocks in the pool.", self.num_blocks),
            ("poise_kv_blocks_free", "KV blocks that no request holds.", self.num_free_blocks),
        ):
            family = GaugeMetricFamily(name, documentation, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family
        labels = {**self._labels, **self._cache_config}
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "How the KV cache is set up.", labels=list(labels)
        )
        info.add_metric(list(labels.values()), 1.0)
        yield info

    def _counters(self) -> Iterable[Metric]:
        for name, documentation, value in (
            (
                "vllm:prefix_cache_queries",
                "Tokens looked up in the prefix cache.",
                self.prefix_cache_queries,
            ),
            (
                "vllm:prefix_cache_hits",
                "Tokens found in the prefix cache.",
                self.prefix_cache_hits,
            ),
            ("vllm:num_preemptions", "Preemptions.", self.num_preemptions),
            ("vllm:prompt_tokens", "Prompt tokens of requests past prefill.", self.prompt_tokens),
            (
                "vllm:prompt_tokens_cached",
                "Prompt tokens served from the prefix cache.",
                self.prompt_tokens_cached,
            ),
            ("vllm:generation_tokens", "Tokens generated.", self.generation_tokens),
            (
                "vllm:corrupted_requests",
                "Requests ended because their logits held a NaN or Inf.",
                self.corrupted_requests,
            ),
            ("poise_engine_steps", "Steps that the engine has run.", self.num_steps),
        ):
            family = CounterMetricFamily(name, documentation, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family
        success = CounterMetricFamily(
            "vllm:request_success",
            "Finished requests by reason.",
            labels=[*self._labels, "finished_reason"],
        )
        for reason in FINISH_REASONS:
            success.add_metric([*self._labels.values(), reason], self.finished[reason])
        yield success


class _TenantCollector(Collector):
    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._metrics.tenant_families()
