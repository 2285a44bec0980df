"""Whom to preempt: the policy's choice among those whom no guarantee and no protection covers.

Changes nothing; the scheduler acts. Invariant: never the oldest admitted request, which therefore always
advances, and never one that has rows in the step being built, since others may have hit what it computes.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from poise.core.fairness import ServiceCounters
from poise.core.limits import Limits
from poise.core.policy import Policy
from poise.core.request import Request
from poise.core.reservations import Reservations


class Victims:
    """Choices over the running requests, in order of admission; None where nobody may be preempted."""

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        served: ServiceCounters,
        reservations: Reservations,
        running: Sequence[Request],
    ) -> None:
        self._limits = limits
        self._policy = policy
        self._served = served
        self._reservations = reservations
        self._running = running

    def _candidates(self, scheduled: Container[int]) -> list[Request]:
        return [r for r in self._running[1:] if r.request_id not in scheduled]

    def _unprotected(self, candidates: Sequence[Request]) -> Sequence[Request]:
        """Without those that were preempted often enough, unless there are no others."""
        limit = self._limits.num_preemptions_to_protect
        return [r for r in candidates if r.num_restarts < limit] or candidates

    def for_pages(self, scheduled: Container[int]) -> Request | None:
        """Who gives way when a running request lacks pages: borrowers first, then as the policy says."""
        candidates: Sequence[Request] = self._candidates(scheduled)
        if self._reservations:
            borrowers = self._reservations.block_borrowers(self._running)
            candidates = [r for r in candidates if r in borrowers] or candidates
        if not candidates:
            return None
        candidates = self._unprotected(candidates)
        return candidates[self._policy.choose_victim(candidates, self._served)]

    def for_quota(self, tenant: str, scheduled: Container[int]) -> Request | None:
        """The newest of a tenant that would hold more pages than its quota."""
        own = [r for r in self._candidates(scheduled) if r.tenant == tenant]
        return self._unprotected(own)[-1] if own else None

    def to_take_back(self, part: str, scheduled: Container[int]) -> Request | None:
        """The newest that borrows `part` (num_sequences or num_blocks) of somebody's pool."""
        if part == "num_sequences":
            borrowers = self._reservations.sequence_borrowers(self._running)
        else:
            borrowers = self._reservations.block_borrowers(self._running)
        candidates = self._candidates(scheduled)
        borrowers = [request for request in borrowers if request in candidates]
        return self._unprotected(borrowers)[-1] if borrowers else None
