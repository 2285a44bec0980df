"""Who asks, as the key told, and what he may ask for.

Plain data; knows no keys, files or HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass

from poise.core.tenant import DEFAULT_TENANT_NAME, ServiceClass

MOST_URGENT, LEAST_URGENT = -(2**31), 2**31 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tenant may ask for at most; None: as much as the server can."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant as the edge sees it. `tenant` is None where there are no tenants: then everybody is one.

    `min_priority` is the most urgent priority that its requests may have (lower goes first).
    """

    tenant: str | None = None
    limits: Limits = NO_LIMITS
    service_class: ServiceClass = "interactive"
    min_priority: int = MOST_URGENT
    is_operator: bool = False  # may see what concerns all tenants, and ask for no answers

    @property
    def name(self) -> str:
        return DEFAULT_TENANT_NAME if self.tenant is None else self.tenant


ANYBODY = Caller()
OPERATOR = Caller(is_operator=True)
