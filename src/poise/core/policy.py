"""Who goes first and who gives way: small functions over read-only views of requests.

Policies know no pages, budgets or steps, and change nothing; the scheduler asks and acts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

AGEING_SECONDS: Final = 10.0
"""Under `priority`, waiting this long is worth one level."""
MOST_LEVELS: Final = 100
"""Priorities beyond -100 … 100 count as these, so that the longest wait has a bound."""


class RequestView(Protocol):
    """What a policy may see of a request."""

    @property
    def request_id(self) -> int: ...
    @property
    def tenant(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def arrival_time(self) -> float: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_restarts(self) -> int: ...


class ServiceView(Protocol):
    """What each tenant was served so far, relative to its weight."""

    def __getitem__(self, tenant: str) -> float: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """`urgency`: smaller is admitted first; fixed for the life of a request. `fair`: the tenant that
    was served least goes first, and urgency decides within a tenant only. `cohorts`: nobody is
    admitted while others run.

    `choose_victim`: of the running requests that may be preempted in this step, in order of
    admission, the index of the one to preempt.
    """

    name: str
    urgency: Callable[[RequestView], float]
    choose_victim: Callable[[Sequence[RequestView], ServiceView], int]
    fair: bool = False
    cohorts: bool = False


def _arrival(request: RequestView) -> float:
    return request.request_id


def _level(request: RequestView) -> int:
    return max(-MOST_LEVELS, min(MOST_LEVELS, request.priority))


def _aged(request: RequestView) -> float:
    """A level is worth AGEING_SECONDS of waiting: all grow older alike, so the order never changes."""
    return _level(request) * AGEING_SECONDS + request.arrival_time


def _last_admitted(running: Sequence[RequestView], served: ServiceView) -> int:
    return len(running) - 1


def _least_urgent(running: Sequence[RequestView], served: ServiceView) -> int:
    """Of the lowest level, the one that has computed least; of these the last admitted."""
    return max(
        range(len(running)),
        key=lambda i: (_level(running[i]), -running[i].num_computed_tokens, i),
    )


def _most_served(running: Sequence[RequestView], served: ServiceView) -> int:
    """Of the tenant that was served most, the one that has computed least; of these the last admitted."""
    return max(
        range(len(running)),
        key=lambda i: (served[running[i].tenant], -running[i].num_computed_tokens, i),
    )


FCFS = Policy("fcfs", _arrival, _last_admitted)
"""First come, first served: the oldest admitted request is never made to give way."""

PRIORITY = Policy("priority", _aged, _least_urgent)
"""Lower priorities first, with ageing: p passes q < p for good if it came (p − q) · AGEING_SECONDS
earlier, so nobody waits for requests that arrived more than 2 · MOST_LEVELS · AGEING_SECONDS later."""

FAIR = Policy("fair", _arrival, _most_served, fair=True)
"""The tenant that was served least, relative to its weight, goes first."""

STATIC = Policy("static", _arrival, _last_admitted, cohorts=True)
"""Fixed cohorts: the next ones are admitted when the last of these has ended. The baseline."""

POLICIES = {policy.name: policy for policy in (FCFS, PRIORITY, FAIR, STATIC)}
