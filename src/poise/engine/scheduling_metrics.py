"""What the scheduler decided and predicted, as metric families; read from its plain numbers when somebody scrapes.

Knows no requests. Invariant: nothing here writes, so it may run beside the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from poise.core.scheduler import Scheduler

QUANTILES = (0.5, 0.9, 0.99)


class SchedulingMetrics:
    """Families of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def families(self, labels: Mapping[str, str]) -> Iterable[Metric]:
        """Those that name no tenant."""
        yield self._admission(labels)
        yield from self._drafts(labels)
        yield from self._queue(labels)
        yield _errors(
            "poise_step_time_error",
            "Measured seconds of the last steps against the predicted ones: |measured / predicted - 1|, by quantile.",
            self._scheduler.step_time.errors,
            labels,
        )
        yield _errors(
            "poise_first_token_error",
            "How far the first token was from its prediction at arrival, as a part of the real time, by quantile.",
            self._scheduler.admission.first_token_errors,
            labels,
        )

    def _admission(self, labels: Mapping[str, str]) -> Metric:
        family = CounterMetricFamily(
            "poise_admission",
            "Requests (choices) accepted, refused and dropped, by reason.",
            labels=[*labels, "decision", "reason"],
        )
        for (decision, reason), count in dict(self._scheduler.admission.decisions).items():
            family.add_metric([*labels.values(), decision, reason], count)
        return family

    def _drafts(self, labels: Mapping[str, str]) -> Iterable[Metric]:
        """Speculative decoding, under vLLM's names."""
        counters = self._scheduler.draft_counters
        for name, documentation, value in (
            ("num_drafts", "Drafts, one for each step of a request.", counters.num_drafts),
            ("num_draft_tokens", "Drafted tokens.", counters.num_draft_tokens),
            (
                "num_accepted_tokens",
                "Drafted tokens that were accepted.",
                counters.num_accepted_tokens,
            ),
        ):
            family = CounterMetricFamily(
                f"vllm:spec_decode_{name}", documentation, labels=list(labels)
            )
            family.add_metric(list(labels.values()), value)
            yield family
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were accepted, by their place in the draft.",
            labels=[*labels, "position"],
        )
        for position, value in enumerate(tuple(counters.accepted_per_position)):
            family.add_metric([*labels.values(), str(position)], value)
        yield family

    def tenant_families(self, labels: Mapping[str, str]) -> Iterable[Metric]:
        """What each tenant holds and was served: for the operator's eyes."""
        names = [*labels, "tenant", "service_class"]
        running = GaugeMetricFamily(
            "poise_tenant_requests_running", "Requests in execution, by owner.", labels=names
        )
        blocks = GaugeMetricFamily(
            "poise_tenant_kv_blocks",
            "KV blocks that running requests hold, by owner.",
            labels=names,
        )
        steps = CounterMetricFamily(
            "poise_tenant_kv_block_steps", "KV blocks held, summed over steps.", labels=names
        )
        for owner, holding in dict(self._scheduler.holdings.by_owner).items():
            values = [*labels.values(), *owner]
            running.add_metric(values, holding.num_sequences)
            blocks.add_metric(values, holding.num_blocks)
            steps.add_metric(values, holding.num_block_steps)
        yield from (running, blocks, steps)
        service = CounterMetricFamily(
            "poise_tenant_service",
            "Virtual tokens of the fair policy: what a tenant was served, over its weight.",
            labels=[*labels, "tenant"],
        )
        for tenant, virtual_tokens in self._scheduler.served.snapshot().items():
            service.add_metric([*labels.values(), tenant], virtual_tokens)
        yield service

    def _queue(self, labels: Mapping[str, str]) -> Iterable[Metric]:
        load = self._scheduler.admission.load
        most = None if load is None else self._scheduler.admission.max_num_queued_tokens(load)
        waiting = 0 if load is None else load.num_waiting_tokens
        for name, documentation, value in (
            ("poise_queued_tokens", "Tokens of waiting requests.", waiting),
            ("poise_queue_limit_tokens", "Prompt tokens that may wait.", most),
        ):
            if value is not None:
                family = GaugeMetricFamily(name, documentation, labels=list(labels))
                family.add_metric(list(labels.values()), value)
                yield family


def _errors(
    name: str, documentation: str, errors: Sequence[float], labels: Mapping[str, str]
) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=[*labels, "quantile"])
    ordered = sorted(abs(error) for error in tuple(errors))
    for quantile in QUANTILES if ordered else ():
        value = ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]
        family.add_metric([*labels.values(), str(quantile)], value)
    return family
