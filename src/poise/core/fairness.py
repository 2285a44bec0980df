"""What each tenant was served, in virtual tokens: the counters behind the fair policy.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2, with weights and with
cached prompt tokens free. Knows tenants' names and counts of tokens, no requests. Invariant: a counter
never goes down, so idling earns no credit.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from poise.core.tenant import TenantTable

PROMPT_WEIGHT: Final = 1.0  # w_p: of a computed prompt token
OUTPUT_WEIGHT: Final = 2.0  # w_q: of an output token (the paper's ratio)


class ServiceCounters:
    """Virtual tokens of each tenant: (w_p · computed prompt tokens + w_q · output tokens) / weight.

    While two tenants both have requests waiting, their counters differ by at most U and the service that
    they get over any such interval by at most 2U, U = max(w_p · longest prompt, w_q · M) with M the most
    tokens that running requests can hold (theorem 4.4 of the paper), if their weights are 1.
    """

    def __init__(self, tenants: TenantTable) -> None:
        self._counters: dict[str, float] = {}
        self._last_to_leave: str | None = None
        self.set_tenants(tenants)

    def set_tenants(self, tenants: TenantTable) -> None:
        """Weights from now on."""
        self._weights = {name: tenant.weight for name, tenant in tenants.tenants.items()}

    def __getitem__(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def join(self, tenant: str, waiting: Collection[str]) -> None:
        """`tenant`, which had nothing waiting, gets a request; `waiting` are those that have some.

        Its counter is lifted to the least of theirs, or to that of the last one that left the queue.
        """
        if waiting:
            floor = min(self[other] for other in waiting)
        elif self._last_to_leave is not None:
            floor = self[self._last_to_leave]
        else:
            floor = 0.0
        self._counters[tenant] = max(self[tenant], floor)

    def leave(self, tenant: str) -> None:
        """`tenant` has nothing waiting any more."""
        self._last_to_leave = tenant

    def charge(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        service = PROMPT_WEIGHT * num_prompt_tokens + OUTPUT_WEIGHT * num_output_tokens
        self._counters[tenant] = self[tenant] + service / self._weights.get(tenant, 1.0)

    def snapshot(self) -> dict[str, float]:
        """Every tenant's counter."""
        return dict(self._counters)
