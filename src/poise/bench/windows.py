"""Which part of a run is steady: neither the first burst nor the last stragglers.

Closed loops: the longest span whose requests in flight stay near the peak. Open arrivals: from MSER-5's cut (White 1997, on
end-to-end times in order of arrival) to the last arrival. Invariant: where there is no such span, a note says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from poise.bench.record import RequestRow

NEAR_PEAK = 0.9
BATCH = 5
FEWEST_REQUESTS = 20

Window = tuple[float, float]


def full_window(rows: Sequence[RequestRow]) -> Window:
    """From the first planned instant to the last end."""
    if not rows:
        return 0.0, 0.0
    begin = min(row.planned for row in rows)
    ends = [row.end for row in rows if row.end is not None]
    return begin, max(ends, default=begin)


def steady_window(rows: Sequence[RequestRow], *, is_closed: bool) -> tuple[Window | None, str]:
    """The steady span and a note in words; None where there is none."""
    answered = [row for row in rows if row.status == "ok" and row.sent is not None]
    if len(answered) < FEWEST_REQUESTS:
        return None, f"no steady window: {len(answered)} answers, {FEWEST_REQUESTS} needed"
    if is_closed:
        return _near_peak(answered)
    return _after_warming(answered)


def in_flight_steps(rows: Sequence[RequestRow]) -> list[tuple[float, int]]:
    """Instants at which the number in flight changes, with the number from then on."""
    changes: dict[float, int] = {}
    for row in rows:
        if row.sent is not None and row.end is not None:
            changes[row.sent] = changes.get(row.sent, 0) + 1
            changes[row.end] = changes.get(row.end, 0) - 1
    steps = []
    number = 0
    for time in sorted(changes):
        number += changes[time]
        steps.append((time, number))
    return steps


def _near_peak(rows: Sequence[RequestRow]) -> tuple[Window | None, str]:
    """Dips shorter than 20 ms, between an end and the send it triggers, do not end a span."""
    steps = in_flight_steps(rows)
    peak = max(number for _, number in steps)
    best = (0.0, 0.0)
    begin: float | None = None
    dip: float | None = None
    for time, number in steps:
        if number >= NEAR_PEAK * peak:
            if begin is None or (dip is not None and time - dip > 0.02):
                begin = time
            dip = None
        elif begin is not None and dip is None:
            dip = time
        if begin is not None:
            last = dip if dip is not None else time
            if last - begin > best[1] - best[0]:
                best = (begin, last)
    planned = sum(best[0] <= row.planned <= best[1] for row in rows)
    if planned < FEWEST_REQUESTS:
        return None, f"no steady window: {planned} requests were planned near the peak of {peak}"
    return best, f"in flight ≥ {NEAR_PEAK:.0%} of the peak of {peak}"


def _after_warming(rows: Sequence[RequestRow]) -> tuple[Window | None, str]:
    ordered = sorted(rows, key=lambda row: row.planned)
    times = np.array([row.end - row.planned for row in ordered if row.end is not None])
    cut = mser5_cut(times)
    if cut is None:
        return None, "no steady window: the end-to-end times never settle (MSER-5)"
    begin, end = ordered[cut].planned, ordered[-1].planned
    if len(ordered) - cut < FEWEST_REQUESTS:
        return None, f"no steady window: {len(ordered) - cut} arrivals after warming up"
    growth = _growth(rows, begin, end)
    if growth is not None:
        return None, growth
    return (begin, end), f"after {cut} arrivals of warming up (MSER-5), to the last arrival"


def mser5_cut(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> int | None:
    """How many first values to leave out: the cut, in batches of five, with the least standard error of what stays.

    None where the best cut lies in the second half, which MSER-5 reads as not settled.
    """
    batches = values[: len(values) // BATCH * BATCH].reshape(-1, BATCH).mean(axis=1)
    num = len(batches)
    if num < 2:
        return 0
    half = num // 2
    errors = [float(np.var(batches[cut:])) / (num - cut) for cut in range(num - 1)]
    best = int(np.argmin(errors[: max(1, min(len(errors), num - 2))]))
    return best * BATCH if best <= half else None


def _growth(rows: Sequence[RequestRow], begin: float, end: float) -> str | None:
    """Words for a queue that grows through the window: its second half holds far more than its first."""
    steps = in_flight_steps(rows)
    middle = (begin + end) / 2

    def mean(low: float, high: float) -> float:
        area = sum(
            number * max(0.0, min(following, high) - max(time, low))
            for (time, number), (following, _) in pairwise(steps)
        )
        return area / (high - low) if high > low else 0.0

    first, second = mean(begin, middle), mean(middle, end)
    if second > 1.5 * first + 1.0:
        return (
            f"no steady window: saturated, {first:.1f} requests in flight in its first half, "
            f"{second:.1f} in its second"
        )
    return None
