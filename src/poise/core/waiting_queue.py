"""The requests that wait, in the order of a policy, however many there are.

Knows urgency and owners, no pages and no steps. Invariant: the first few can be read without looking at
the others, and each owner's requests are sorted by urgency.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from poise.core.fairness import ServiceCounters
from poise.core.policy import Policy
from poise.core.request import Request, RequestOwner

OwnerKey = tuple[str, str]  # tenant, service class
_Entry = tuple[float, int, Request]  # urgency, request id (unique, so requests are never compared)


class WaitingQueue:
    """Tells the counters who joins and leaves; never charges."""

    def __init__(self, policy: Policy, counters: ServiceCounters) -> None:
        self._policy = policy
        self._counters = counters
        self._by_owner: dict[OwnerKey, list[_Entry]] = {}
        self._num_by_tenant: dict[str, int] = {}
        self.num_requests = 0
        self.num_tokens = 0  # known tokens of all: what there is to compute, hits aside

    def __len__(self) -> int:
        return self.num_requests

    def __contains__(self, request: Request) -> bool:
        entries = self._by_owner.get(owner_key(request.owner), [])
        place = bisect_left(entries, self._entry(request))
        return place < len(entries) and entries[place][2] is request

    def _entry(self, request: Request) -> _Entry:
        return self._policy.urgency(request), request.request_id, request

    def add(self, request: Request, is_new: bool) -> None:
        """A request joins; one that ran already (not `is_new`) joins where it stood, and unlifted."""
        tenant = request.tenant
        if is_new and tenant not in self._num_by_tenant:
            self._counters.join(tenant, self._num_by_tenant.keys())
        self._num_by_tenant[tenant] = self._num_by_tenant.get(tenant, 0) + 1
        insort(self._by_owner.setdefault(owner_key(request.owner), []), self._entry(request))
        self.num_requests += 1
        self.num_tokens += request.num_tokens

    def remove(self, request: Request) -> None:
        key = owner_key(request.owner)
        entries = self._by_owner[key]
        place = bisect_left(entries, self._entry(request))
        assert entries[place][2] is request
        del entries[place]
        if not entries:
            del self._by_owner[key]
        self.num_requests -= 1
        self.num_tokens -= request.num_tokens
        tenant = request.tenant
        self._num_by_tenant[tenant] -= 1
        if self._num_by_tenant[tenant] == 0:
            del self._num_by_tenant[tenant]
            self._counters.leave(tenant)

    def in_order(self, skipped: Collection[str] = ()) -> Iterator[Request]:
        """First to admit first, without the tenants that are in `skipped`.

        Counters and `skipped` may change between two that are taken, the queue may not.
        """
        if self._policy.fair:
            return self._by_service(skipped)
        return self._merged(self._by_owner.values(), skipped)

    def of(self, concerns: Callable[[OwnerKey], bool]) -> Iterator[Request]:
        """Those of some owners, most urgent first."""
        return self._merged([e for key, e in self._by_owner.items() if concerns(key)])

    def _merged(
        self, lists: Collection[list[_Entry]], skipped: Collection[str] = ()
    ) -> Iterator[Request]:
        heads = [(entries[0], 0, entries) for entries in lists]
        heapq.heapify(heads)
        while heads:
            (_, _, request), place, entries = heads[0]
            if request.tenant not in skipped:
                yield request
            if place + 1 < len(entries) and request.tenant not in skipped:
                heapq.heapreplace(heads, (entries[place + 1], place + 1, entries))
            else:
                heapq.heappop(heads)

    def _by_service(self, skipped: Collection[str]) -> Iterator[Request]:
        """Again and again the next one of the tenant that was served least."""
        lists: dict[str, list[list[_Entry]]] = {}
        for (tenant, _), entries in self._by_owner.items():
            lists.setdefault(tenant, []).append(entries)
        tenants = {tenant: self._merged(of_tenant) for tenant, of_tenant in sorted(lists.items())}
        while tenants:
            tenant = min(tenants, key=self._counters.__getitem__)
            request = None if tenant in skipped else next(tenants[tenant], None)
            if request is None:
                del tenants[tenant]
            else:
                yield request

    @property
    def tenants(self) -> dict[str, int]:
        """How many requests of each tenant wait."""
        return self._num_by_tenant

    def check_invariants(self) -> None:
        requests = list(self.in_order())
        assert self.num_tokens == sum(request.num_tokens for request in requests)
        for entries in self._by_owner.values():
            assert entries
            assert entries == sorted(entries, key=lambda entry: entry[:2])
        counted = Counter(request.tenant for request in requests)
        assert self._num_by_tenant == counted


def owner_key(owner: RequestOwner) -> OwnerKey:
    return owner.tenant, owner.service_class
