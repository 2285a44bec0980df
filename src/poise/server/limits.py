"""Tenants' limits over time: requests and tokens per minute, and requests at once.

Knows callers, nothing of HTTP bodies or engines. Invariant: a refused request has used up nothing, and a ticket gives
its place back exactly once.

Rates are buckets that hold a minute's worth and fill continuously. A request pays for its prompt's tokens when it is
let in, and for its answer's when they are known: a bucket may be in debt, and lets nobody in until that is paid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from poise.server.callers import Caller
from poise.server.http_errors import HTTPStatusError, whole_seconds

SECONDS_PER_MINUTE = 60.0
LEAST_WAIT_SECONDS = 1e-6  # times are rounded: who has waited as told lacks nothing
BUSY_RETRY_SECONDS = 1.0  # for a place among those at once: nobody knows when one ends


def rate_limited(message: str, retry_after_seconds: float) -> HTTPStatusError:
    """429 in OpenAI's shape; Retry-After in whole seconds, rounded up, at least 1."""
    headers = {"Retry-After": whole_seconds(retry_after_seconds)}
    return HTTPStatusError(429, message, "rate_limit_exceeded", headers)


@dataclass(slots=True)
class _Bucket:
    """`level` of at most `per_minute` units at `since`."""

    per_minute: int
    level: float
    since: float

    def set_rate(self, per_minute: int, now: float) -> None:
        """What was used of the old rate is used of the new one."""
        self._fill(now)
        self.level += per_minute - self.per_minute
        self.per_minute = per_minute

    def _fill(self, now: float) -> None:
        rate = self.per_minute / SECONDS_PER_MINUTE
        self.level = min(float(self.per_minute), self.level + rate * (now - self.since))
        self.since = now

    def seconds_until(self, amount: float, now: float) -> float:
        """How long until `amount` is there (or all that fits, if that is less)."""
        self._fill(now)
        missing = min(amount, self.per_minute) - self.level
        seconds = missing * SECONDS_PER_MINUTE / self.per_minute
        return seconds if seconds > LEAST_WAIT_SECONDS else 0.0

    def take(self, amount: float, now: float) -> None:
        """A negative amount is given back."""
        self._fill(now)
        self.level = min(float(self.per_minute), self.level - amount)


@dataclass(slots=True)
class _Usage:
    """What a tenant has used."""

    num_running: int = 0
    buckets: dict[str, _Bucket] = field(default_factory=dict)

    def bucket(self, name: str, per_minute: int | None, now: float) -> _Bucket | None:
        if per_minute is None:
            self.buckets.pop(name, None)
            return None
        bucket = self.buckets.get(name)
        if bucket is None:
            bucket = self.buckets[name] = _Bucket(per_minute, float(per_minute), now)
        elif bucket.per_minute != per_minute:
            bucket.set_rate(per_minute, now)
        return bucket


class Limiter:
    """Lets requests in, tenant by tenant. `clock` tells seconds that never go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[str, _Usage] = {}

    def enter(self, caller: Caller) -> Ticket:
        """A place for one request, to be closed. Raises HTTPStatusError 429."""
        usage, limits, now = (
            self._usage.setdefault(caller.name, _Usage()),
            caller.limits,
            self._clock(),
        )
        most = limits.max_concurrent_requests
        if most is not None and usage.num_running >= most:
            raise rate_limited(
                f"{caller.name} has {most} requests running, as many as it may.", BUSY_RETRY_SECONDS
            )
        requests = usage.bucket("requests", limits.requests_per_minute, now)
        if requests is not None:
            wait = requests.seconds_until(1, now)
            if wait > 0:
                raise rate_limited(
                    f"{caller.name} has used its {requests.per_minute} requests per minute.", wait
                )
            requests.take(1, now)
        usage.num_running += 1
        return Ticket(caller, usage, self._clock)

    def forget(self, known: Collection[str]) -> None:
        """Drops what is kept of tenants that are no longer known."""
        for name in set(self._usage) - set(known):
            del self._usage[name]


class Ticket:
    """The place of one request that was let in."""

    def __init__(self, caller: Caller, usage: _Usage, clock: Callable[[], float]) -> None:
        self.caller = caller
        self._usage = usage
        self._clock = clock
        self._open = True
        self._num_prompt_tokens = 0

    def charge_prompt(self, num_tokens: int) -> None:
        """Pays for a prompt. Raises HTTPStatusError 429 until a minute's tokens, or those asked for, are there."""
        now = self._clock()
        tokens = self._tokens(now)
        if tokens is None:
            return
        wait = tokens.seconds_until(num_tokens, now)
        if wait > 0:
            raise rate_limited(
                f"{self.caller.name} has used its {tokens.per_minute} tokens per minute "
                f"(this prompt has {num_tokens}).",
                wait,
            )
        tokens.take(num_tokens, now)
        self._num_prompt_tokens = num_tokens

    def give_back(self) -> None:
        """The engine refused the request: it has used nothing."""
        now = self._clock()
        requests = self._usage.buckets.get("requests")
        if requests is not None:
            requests.take(-1, now)
        tokens = self._tokens(now)
        if tokens is not None:
            tokens.take(-self._num_prompt_tokens, now)

    def charge_answer(self, num_tokens: int) -> None:
        """Pays for an answer, on credit if need be."""
        now = self._clock()
        tokens = self._tokens(now)
        if tokens is not None:
            tokens.take(num_tokens, now)

    def _tokens(self, now: float) -> _Bucket | None:
        return self._usage.bucket("tokens", self.caller.limits.tokens_per_minute, now)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._usage.num_running -= 1
