"""Finds stop strings in a text that comes in pieces, and decides what of it may be shown.

Knows nothing of tokens. Invariants: each character is shown once; what is held back is always the beginning of some stop
string; of a stop string that was found nothing is shown (unless asked for).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`stop` was found; `text` is the last text to show."""

    text: str
    stop: str


class StopChecker:
    """Stop strings of one choice. The answer ends with the first character that completes one of them; if it completes
    several, the longest (which starts first) counts. So the result is the same however the text was split.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=1)
        self._include_stop = include_stop
        self._held = ""

    def feed(self, text: str) -> str | StopMatch:
        """Takes new text; returns what may be shown now, or the match that ends the answer."""
        text = self._held + text
        found = self._find(text)
        if found is not None:
            start, stop = found
            self._held = ""
            return StopMatch(text[: start + len(stop) if self._include_stop else start], stop)
        cut = self._first_open_start(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The text still held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        """Start and stop string of the match that is complete first."""
        matches = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(matches, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)

    def _first_open_start(self, text: str) -> int:
        """Where the longest end of `text` starts that more text could turn into a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
