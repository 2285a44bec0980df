"""Rates and places: exact in time, nothing used up by who is refused, nothing lost by who leaves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from poise.server.callers import Caller, Limits
from poise.server.http_errors import HTTPStatusError
from poise.server.limits import Limiter, Ticket


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def refused(limiter: Limiter, caller: Caller) -> int:
    """Seconds after which to try again."""
    with pytest.raises(HTTPStatusError) as caught:
        limiter.enter(caller)
    assert caught.value.status == 429
    return int(caught.value.headers["Retry-After"])


def test_requests_per_minute_are_a_bucket_that_fills() -> None:
    clock = Clock()
    limiter, caller = Limiter(clock), Caller("a", Limits(requests_per_minute=6))
    for _ in range(6):
        limiter.enter(caller)
    assert refused(limiter, caller) == 10
    assert refused(limiter, caller) == 10  # a refusal uses nothing
    clock.now += 9
    assert refused(limiter, caller) == 1
    clock.now += 1
    limiter.enter(caller)
    assert refused(limiter, caller) == 10
    limiter.enter(Caller("b", Limits(requests_per_minute=6)))


def test_places_come_back_exactly_once() -> None:
    limiter, caller = Limiter(Clock()), Caller("a", Limits(max_concurrent_requests=2))
    first, second = limiter.enter(caller), limiter.enter(caller)
    assert refused(limiter, caller) == 1
    first.close()
    first.close()
    with limiter.enter(caller):
        assert refused(limiter, caller) == 1
    second.close()
    for _ in range(2):
        limiter.enter(caller)
    assert refused(limiter, caller) == 1


def retry_after(ticket: Ticket, num_tokens: int) -> int:
    with pytest.raises(HTTPStatusError) as caught:
        ticket.charge_prompt(num_tokens)
    return int(caught.value.headers["Retry-After"])


def test_answers_are_paid_when_they_are_known() -> None:
    clock = Clock()
    limiter, caller = Limiter(clock), Caller("a", Limits(tokens_per_minute=600))
    ticket = limiter.enter(caller)
    ticket.charge_prompt(100)
    ticket.charge_answer(1100)  # 600 in debt
    other = limiter.enter(caller)
    assert retry_after(other, 1) == 61
    clock.now += 61
    other.charge_prompt(10)
    assert retry_after(other, 100) == 10
    clock.now += 3600
    other.charge_prompt(5000)  # more than a minute's worth waits for a full bucket, no longer
    assert retry_after(other, 5000) == 500


def test_a_change_of_the_limits_keeps_what_was_used() -> None:
    clock = Clock()
    limiter = Limiter(clock)
    for _ in range(4):
        limiter.enter(Caller("a", Limits(requests_per_minute=4)))
    assert refused(limiter, Caller("a", Limits(requests_per_minute=4))) == 15
    limiter.enter(Caller("a", Limits(requests_per_minute=5)))
    assert refused(limiter, Caller("a", Limits(requests_per_minute=2))) > 60
    limiter.enter(Caller("a"))
    limiter.forget(["b"])
    limiter.enter(Caller("a", Limits(requests_per_minute=1)))


@example(per_minute=1, waits=[1.2742147938826136, 0.0])  # 60 s later, 59.99999999999999 s later
@given(
    per_minute=st.integers(1, 1000),
    waits=st.lists(st.floats(0, 30), min_size=1, max_size=60),
)
def test_no_window_admits_more_than_two_minutes_worth_per_minute(
    per_minute: int, waits: list[float]
) -> None:
    clock = Clock()
    limiter, caller = Limiter(clock), Caller("a", Limits(requests_per_minute=per_minute))
    admitted: list[float] = []
    for wait in waits:
        clock.now += wait
        try:
            limiter.enter(caller).close()
            admitted.append(clock.now)
        except HTTPStatusError as error:
            clock.now += int(error.headers["Retry-After"])
            limiter.enter(caller).close()  # who waits as told is let in
            admitted.append(clock.now)
    for i, start in enumerate(admitted):
        for j, end in enumerate(admitted[i:], i):
            allowed = per_minute + math.ceil((end - start) * per_minute / 60 + 1e-6)
            assert j - i + 1 <= allowed
