"""Who goes first and who gives way: small functions over read-only views of requests.

Policies know no pages, budgets or steps, and change nothing; the scheduler asks and acts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class RequestView(Protocol):
    """What a policy may see of a request."""

    @property
    def request_id(self) -> int: ...
    @property
    def arrival_time(self) -> float: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_restarts(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """`order_waiting`: the queue (arrivals in order, preempted ones in front) to request ids, first
    to admit first.

    `choose_victim`: of the running requests that may be preempted in this step, in order of
    admission, the index of the one to preempt.
    """

    name: str
    order_waiting: Callable[[Iterable[RequestView]], Iterable[int]]
    choose_victim: Callable[[Sequence[RequestView]], int]


def _as_queued(waiting: Iterable[RequestView]) -> Iterable[int]:
    return (request.request_id for request in waiting)


def _last_admitted(running: Sequence[RequestView]) -> int:
    return len(running) - 1


FCFS = Policy("fcfs", _as_queued, _last_admitted)
"""First come, first served: the oldest admitted request is never made to give way."""
