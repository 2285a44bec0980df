"""Where a request's time went, worked out of its event log (`core/timeline.py`).

Knows events as plain data, nothing of HTTP. Invariant: the seconds of a finished choice add up to the time from its
arrival to its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]

WAITING, PROMPT, OUTPUT = "waiting", "prompt", "output"
REQUEUED, AGAIN = (
    "waiting_again",
    "recomputing",
)  # after a preemption; until its next output token is not told


@dataclass(slots=True)
class ChoiceTimes:
    """One choice: seconds by what it was doing, and what its waiting was for.

    waiting        in the queue, until it was first admitted
    prompt         its prompt was computed, in turn with others
    output         it drew tokens, from the first one on
    waiting_again  in the queue after a preemption
    recomputing    running again after one, while what was dropped is computed again (in output, once it draws again)
    """

    index: int
    seconds: dict[str, float] = field(default_factory=dict)
    waited_for: dict[str, float] = field(default_factory=dict)
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None

    def add(self, what: str, seconds: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + max(0.0, seconds)


def explain(events: Sequence[Event]) -> list[ChoiceTimes]:
    """The times of each choice, by the events of all, which are in order of time."""
    choices: dict[int, ChoiceTimes] = {}
    by_choice: dict[int, list[Event]] = {}
    for event in events:
        by_choice.setdefault(event["choice"], []).append(event)
    for index, own in sorted(by_choice.items()):
        choices[index] = _times(index, own)
    return list(choices.values())


def _times(index: int, events: Sequence[Event]) -> ChoiceTimes:
    times = ChoiceTimes(index)
    doing, since, has_output = WAITING, events[0]["seconds"], False
    for event in events:
        now, kind = event["seconds"], event["kind"]
        before = doing
        if kind == "admitted":
            doing = AGAIN if times.num_preemptions else PROMPT
            for cause, seconds in event["waited_for"].items():
                times.waited_for[cause] = times.waited_for.get(cause, 0.0) + seconds
            if not times.num_preemptions:
                times.cached_tokens = event["cached_tokens"]
        elif kind == "preempted":
            times.num_preemptions += 1
            doing = REQUEUED
        elif kind == "first_token":
            has_output = True
            doing = OUTPUT
        elif kind == "prefill" and before == AGAIN and has_output:
            # Rows of what was dropped: it draws again with the last of them.
            times.add(AGAIN, event["until"] - event["time"] + now - since)
            since, doing = now + event["until"] - event["time"], OUTPUT
            continue
        elif kind == "finished":
            times.finish_reason = event["reason"]
            times.drafted_tokens = event.get("drafted_tokens", 0)
            times.accepted_tokens = event.get("accepted_tokens", 0)
        elif kind != "held":
            continue
        times.add(before, now - since)
        since = now
    return times
