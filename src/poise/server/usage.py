"""What each tenant has used since the start: for the tenant himself, and for the operator's metrics.

Knows names and counts. Invariant: counts never decrease, and the metrics have a bounded number of labels, whose sum is
everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from poise.server.formats import Tally

MAX_NAMED = 50
OTHER = "*other*"  # no tenant has this name


@dataclass(slots=True)
class Usage:
    """Totals of one tenant. `refused` requests never reached the engine."""

    requests: int = 0
    refused: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class UsageLedger:
    """Usage by tenant."""

    def __init__(self, max_named: int = MAX_NAMED) -> None:
        self._max_named = max_named
        self._by_tenant: dict[str, Usage] = {}

    def __getitem__(self, tenant: str) -> Usage:
        return self._by_tenant.setdefault(tenant, Usage())

    def answered(self, tenant: str, tally: Tally) -> None:
        """Counts an answer, whole or broken off: all of its prompt, and what was made of the rest."""
        usage = self[tenant]
        usage.requests += 1
        usage.input_tokens += tally.num_prompt_tokens
        usage.cached_tokens += tally.num_cached_tokens
        usage.output_tokens += tally.num_output_tokens

    def refused(self, tenant: str) -> None:
        self[tenant].refused += 1

    def collect(self) -> Iterable[Metric]:
        """Counters with the label `tenant`: the first `max_named` tenants that were served, and all others as one."""
        labelled = self._labelled()
        for field in fields(Usage):
            family = CounterMetricFamily(
                f"poise_tenant_{field.name}", f"{field.name} of each tenant.", labels=["tenant"]
            )
            for name, usage in labelled.items():
                family.add_metric([name], getattr(usage, field.name))
            yield family

    def _labelled(self) -> Mapping[str, Usage]:
        entries = list(self._by_tenant.items())
        labelled = dict(entries[: self._max_named])
        if rest := [astuple(usage) for _, usage in entries[self._max_named :]]:
            labelled[OTHER] = Usage(*map(sum, zip(*rest)))
        return labelled
