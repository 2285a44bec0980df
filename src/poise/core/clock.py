"""The only source of time in core: a clock that is handed in, never asked of the system elsewhere.

Knows nothing of requests. Invariant: `now()` never goes back, whatever the wall clock does.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since an arbitrary start."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that stands still until told to advance: tests and virtual time."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, f"a monotonic clock can't go back by {-seconds} s"
        self._now += seconds
