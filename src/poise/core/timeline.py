"""Where a request's time went: a short log of events, and what closed the door while it waited.

Knows names and numbers, no requests. Invariant: a timeline's size is bounded, however long the
request lives; what was left out is counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

NUM_KEPT_AT_EACH_END: Final = 32


@dataclass(slots=True)
class Event:
    """Something that happened to a request at `time` (seconds on the engine's clock).

    arrived      prompt_tokens, max_tokens, tenant, num_waiting; predicted_* seconds where predicted
    held         because: it was next in line, and what it needed was not there
    admitted     cached_tokens, waited_seconds, waited_for: seconds by cause (see `WaitCauses`)
    prefill      start, tokens, steps: rows of the prompt, or of what is recomputed; consecutive
                 steps are one event, `until` is when the last of them was scheduled
    preempted    because, by: the request that got the room (absent: a failed step)
    first_token
    finished     reason, output_tokens, steps: how many gave it rows; drafted_tokens, accepted_tokens if it drafted
    """

    time: float
    kind: str
    fields: dict[str, Any]


class Timeline:
    """The first and the last events of one request."""

    __slots__ = ("_head", "_tail", "num_dropped")

    def __init__(self) -> None:
        self._head: list[Event] = []
        self._tail: deque[Event] = deque()
        self.num_dropped = 0

    def add(self, time: float, kind: str, **fields: Any) -> None:
        event = Event(time, kind, fields)
        if len(self._head) < NUM_KEPT_AT_EACH_END:
            self._head.append(event)
            return
        self._tail.append(event)
        if len(self._tail) > NUM_KEPT_AT_EACH_END:
            self._tail.popleft()
            self.num_dropped += 1

    def add_held(self, time: float, because: str) -> None:
        """Says what a request next in line lacks, once for each change of the reason."""
        last = self.last
        if last is None or last.kind != "held" or last.fields["because"] != because:
            self.add(time, "held", because=because)

    def add_prefill(self, time: float, start: int, num_tokens: int) -> None:
        """Rows other than a decode's; joined to the step before if that was prefill too."""
        last = self.last
        if last is None or last.kind != "prefill":
            self.add(time, "prefill", start=start, tokens=num_tokens, steps=1, until=time)
            return
        last.fields["tokens"] += num_tokens
        last.fields["steps"] += 1
        last.fields["until"] = time

    @property
    def last(self) -> Event | None:
        if self._tail:
            return self._tail[-1]
        return self._head[-1] if self._head else None

    @property
    def events(self) -> Sequence[Event]:
        """Oldest first; `num_dropped` are missing in the middle."""
        return (*self._head, *self._tail)


WAIT_CAUSES: Final = (
    "step",  # a step was running, or the engine was about to schedule one
    "sequences",  # as many requests ran as may
    "tokens",  # the step had no tokens left for another prompt
    "kv_blocks",  # too few free pages
    "cohort",  # static batches: the last one was still running
    "partial_prefills",  # as many prompts were half computed as may be
    "shared_prefix",  # many in front wait for blocks that others are about to compute
    "kv_quota",  # many tenants in front hold as many pages as they may
    "preemption",  # a request had just been preempted for pages
)


class WaitCauses:
    """Seconds for which each cause closed the door of the queue, since the start.

    A request's own wait by cause is the difference between its admission and its arrival.
    """

    def __init__(self, now: float) -> None:
        self._seconds = [0.0] * len(WAIT_CAUSES)
        self._cause = 0
        self._since = now

    def close(self, now: float, cause: str) -> None:
        """From now on, `cause` keeps the next in line waiting."""
        self._advance(now)
        self._cause = WAIT_CAUSES.index(cause)

    def _advance(self, now: float) -> None:
        self._seconds[self._cause] += now - self._since
        self._since = now

    def snapshot(self, now: float) -> tuple[float, ...]:
        self._advance(now)
        return tuple(self._seconds)

    def since(self, snapshot: Sequence[float], now: float) -> dict[str, float]:
        """Seconds by cause, those of no time left out."""
        later = self.snapshot(now)
        return {
            cause: after - before
            for cause, before, after in zip(WAIT_CAUSES, snapshot, later, strict=True)
            if after > before
        }
