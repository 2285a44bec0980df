"""Who holds how much, what is guaranteed to whom (reserved pools), and what bounds whom (quotas).

Knows owners and amounts, no order and no pages' content. Invariant: holdings equal what the running
requests hold, at every instant; a pool's share is lent while its owner is idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from poise.core.request import Request
from poise.core.tenant import Share, TenantTable
from poise.core.waiting_queue import OwnerKey, WaitingQueue, owner_key
from poise.errors import ConfigError


@dataclass(slots=True)
class Holding:
    """What the running requests of a tenant hold now, and the page-steps they have held in all."""

    num_sequences: int = 0
    num_blocks: int = 0
    num_block_steps: int = 0


class Holdings:
    """By owner, that is tenant and service class."""

    def __init__(self) -> None:
        self.by_owner: dict[OwnerKey, Holding] = {}

    def of(self, request: Request) -> Holding:
        key = owner_key(request.owner)
        holding = self.by_owner.get(key)
        if holding is None:
            holding = self.by_owner[key] = Holding()
        return holding

    def enter(self, request: Request) -> None:
        """It begins to run with the pages that it has; more are counted by `add_blocks`."""
        holding = self.of(request)
        holding.num_sequences += 1
        holding.num_blocks += request.num_blocks

    def leave(self, request: Request) -> None:
        """It stops running and is about to give back the pages that it holds."""
        holding = self.of(request)
        holding.num_sequences -= 1
        holding.num_blocks -= request.num_blocks

    def add_blocks(self, request: Request, num_blocks: int) -> None:
        self.of(request).num_blocks += num_blocks

    def end_step(self) -> None:
        """Counts the pages that are pinned for the step that was just scheduled."""
        for holding in self.by_owner.values():
            holding.num_block_steps += holding.num_blocks

    def tenant(self, name: str) -> Holding:
        """The sum over its service classes."""
        return self.sum(lambda key: key[0] == name)

    def sum(self, concerns: Callable[[OwnerKey], bool]) -> Holding:
        found = [holding for key, holding in self.by_owner.items() if concerns(key)]
        return Holding(
            sum(h.num_sequences for h in found),
            sum(h.num_blocks for h in found),
            sum(h.num_block_steps for h in found),
        )

    def check_invariants(self, running: Iterable[Request]) -> None:
        counted: dict[OwnerKey, list[int]] = {}
        for request in running:
            amounts = counted.setdefault(owner_key(request.owner), [0, 0])
            amounts[0] += 1
            amounts[1] += request.num_blocks
        for key, holding in self.by_owner.items():
            assert [holding.num_sequences, holding.num_blocks] == counted.pop(key, [0, 0]), key
        assert not counted


@dataclass(frozen=True, slots=True)
class Pool:
    """What is guaranteed to a tenant or to a service class, in whole sequences, tokens and pages."""

    name: str
    tenant: str | None  # None: of whatever tenant
    service_class: str | None
    num_sequences: int
    num_tokens: int
    num_blocks: int

    def concerns(self, key: OwnerKey) -> bool:
        return self.tenant == key[0] if self.tenant is not None else self.service_class == key[1]


class Reservations:
    """Of a table of tenants. True if there are any pools.

    `quotas`: pages that the running requests of a tenant may hold at once, where that is not all.
    """

    def __init__(
        self, table: TenantTable, *, num_sequences: int, num_tokens: int, num_blocks: int
    ) -> None:
        self._whole = (num_sequences, num_tokens, num_blocks)
        self.set_table(table)

    def set_table(self, table: TenantTable) -> None:
        """Raises ConfigError, and changes nothing, if a table promises more than there is."""
        _check_sums(table)
        self.quotas = {
            name: max(1, int(tenant.kv_quota * self._whole[2]))
            for name, tenant in table.tenants.items()
            if tenant.kv_quota < 1
        }
        self.pools = tuple(
            [
                _pool(f"tenant {name}", name, None, tenant.reserved, self._whole)
                for name, tenant in table.tenants.items()
                if tenant.reserved is not None
            ]
            + [
                _pool(f"class {name}", None, name, share, self._whole)
                for name, share in table.reserved_by_class.items()
            ]
        )

    def __bool__(self) -> bool:
        return bool(self.pools)

    def pools_of(self, request: Request) -> Sequence[Pool]:
        key = owner_key(request.owner)
        return [pool for pool in self.pools if pool.concerns(key)]

    def guaranteed(self, waiting: WaitingQueue, holdings: Holdings) -> list[tuple[Pool, Request]]:
        """Waiting requests that their pools have sequences for, most urgent first within a pool."""
        found: dict[int, tuple[Pool, Request]] = {}
        for pool in self.pools:
            num_left = pool.num_sequences - holdings.sum(pool.concerns).num_sequences
            if num_left > 0:
                for request in islice(waiting.of(pool.concerns), num_left):
                    found.setdefault(request.request_id, (pool, request))
        return list(found.values())

    def token_claims(
        self, running: Iterable[Request], guaranteed: Iterable[tuple[Pool, Request]]
    ) -> TokenClaims:
        """What pools want for prompts: of running requests, and of those about to be admitted."""
        wanted = dict.fromkeys(self.pools, 0)
        for request in running:
            to_compute = request.num_tokens - request.num_computed_tokens
            if to_compute > 1:
                for pool in self.pools_of(request):
                    wanted[pool] += to_compute
        for pool, request in guaranteed:
            wanted[pool] += request.num_tokens
        return TokenClaims(self, wanted)

    def borrowers(
        self, running: Sequence[Request], amount: Callable[[Request], int], part: str
    ) -> list[Request]:
        """Running requests that no guarantee covers, in order of admission.

        `amount` is what each holds of `part` (a field of Pool). Within a pool the oldest are covered first.
        """
        held = dict.fromkeys(self.pools, 0)
        found = []
        for request in running:
            covered = False
            for pool in self.pools_of(request):
                held[pool] += amount(request)
                covered = covered or held[pool] <= getattr(pool, part)
            if not covered:
                found.append(request)
        return found

    def sequence_borrowers(self, running: Sequence[Request]) -> list[Request]:
        return self.borrowers(running, lambda request: 1, "num_sequences")

    def block_borrowers(self, running: Sequence[Request]) -> list[Request]:
        return self.borrowers(running, lambda request: request.num_blocks, "num_blocks")


def _check_sums(table: TenantTable) -> None:
    shares = [t.reserved for t in table.tenants.values() if t.reserved is not None]
    shares += table.reserved_by_class.values()
    for part in ("sequences", "tokens", "blocks"):
        total = sum(getattr(share, part) for share in shares)
        if total > 1 + 1e-9:
            raise ConfigError(
                f"the reserved shares of {part} add up to {total:g}: tenants and classes together can "
                "be guaranteed 1 at most"
            )


def _pool(
    name: str,
    tenant: str | None,
    service_class: str | None,
    share: Share,
    whole: tuple[int, int, int],
) -> Pool:
    """Shares of sequences are rounded up, so that the least one is a sequence; the others down."""
    num_sequences, num_tokens, num_blocks = whole
    return Pool(
        name,
        tenant,
        service_class,
        -int(-share.sequences * num_sequences // 1),
        int(share.tokens * num_tokens),
        int(share.blocks * num_blocks),
    )


class TokenClaims:
    """Tokens of one step that are held back for pools whose requests have prompts to compute."""

    def __init__(self, reservations: Reservations, wanted: Mapping[Pool, int]) -> None:
        self._reservations = reservations
        self._held = {pool: min(pool.num_tokens, n) for pool, n in wanted.items()}

    def held_for_others(self, request: Request) -> int:
        """Tokens that this request may not take."""
        if not self._held:
            return 0
        own = self._reservations.pools_of(request)
        return sum(n for pool, n in self._held.items() if pool not in own)

    def held_for(self, request: Request) -> int:
        return sum(self._held.get(pool, 0) for pool in self._reservations.pools_of(request))

    def spend(self, request: Request, num_tokens: int) -> None:
        """Its pools' claims shrink first."""
        if not self._held:
            return
        for pool in self._reservations.pools_of(request):
            taken = min(num_tokens, self._held.get(pool, 0))
            if taken:
                self._held[pool] -= taken
                num_tokens -= taken
