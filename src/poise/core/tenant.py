"""Whose a request is and what its owner is due: plain data that the edge resolves and the scheduler obeys.

Knows no keys, no HTTP and no pages. Invariant: a table always knows a tenant, since names it was
never given stand for one with the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ServiceClass = Literal["interactive", "batch"]
SERVICE_CLASSES: tuple[ServiceClass, ...] = ("interactive", "batch")
DEFAULT_TENANT_NAME = "default"


@dataclass(frozen=True, slots=True)
class Share:
    """A guaranteed part of the engine, each from 0 to 1: of `max_num_seqs`, of a step's tokens and of the pages."""

    sequences: float = 0.0
    tokens: float = 0.0
    blocks: float = 0.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """What the scheduler knows of a tenant.

    `weight` is its share under the fair policy, relative to the others'. `kv_quota` is the largest part of
    the pages that its running requests may hold at once, and the part of the cache that others can't flush.
    `reserved` is guaranteed even while others are backlogged.
    """

    name: str
    weight: float = 1.0
    kv_quota: float = 1.0
    reserved: Share | None = None


@dataclass(frozen=True, slots=True)
class TenantTable:
    """All tenants by name, and what each service class is guaranteed; replaced as a whole on reload."""

    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    reserved_by_class: Mapping[ServiceClass, Share] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tenant:
        return self.tenants.get(name) or Tenant(name)

    def protected_share(self, name: str) -> float:
        """The part of the pages, 0 to 1, that others can't take from the tenant's cached prefixes: its
        `kv_quota`, scaled down where the quotas of all together exceed the pool. A name that is not
        in the table is protected only where nobody is in it.
        """
        if not self.tenants:
            return 1.0
        if name not in self.tenants:
            return 0.0
        promised = sum(tenant.kv_quota for tenant in self.tenants.values())
        return self.tenants[name].kv_quota / max(1.0, promised)


NO_TENANTS = TenantTable()
"""Everybody is one and the same tenant."""
