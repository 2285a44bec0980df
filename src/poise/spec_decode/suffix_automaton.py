"""The repeats of a growing text: the longest suffix that occurred before, and where.

Knows tokens, nothing of requests. Built online (Blumer et al., "The smallest automaton recognizing the subwords of a
text", 1985), in time and memory linear in the text. Invariant: the substring of `lengths[state]` tokens that ends at
`ends[state]` is one of the state's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_ROOT = 0


class SuffixAutomaton:
    """States stand for sets of substrings with the same end positions; `links` lead to shorter suffixes."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._links = [-1]
        self._lengths = [0]
        self._ends = [
            -1
        ]  # an end of the state's substrings before the last token, as late as is known
        self._last = _ROOT

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        position = len(self.tokens)
        self.tokens.append(token)
        repeat = self._links[self._last]
        if repeat > _ROOT:
            self._ends[repeat] = position - 1  # what repeats at the end of the text does so here
        state, new = self._last, self._new({}, self._lengths[self._last] + 1, position)
        while state >= _ROOT and token not in self._next[state]:
            self._next[state][token] = new
            state = self._links[state]
        self._links[new] = _ROOT if state < _ROOT else self._suffix(state, token)
        self._last = new

    def _new(self, following: dict[int, int], length: int, end: int) -> int:
        self._next.append(following)
        self._links.append(-1)
        self._lengths.append(length)
        self._ends.append(end)
        return len(self._links) - 1

    def _suffix(self, state: int, token: int) -> int:
        """The state of exactly the longest substring of `state` followed by `token`, split off if need be."""
        target = self._next[state][token]
        length = self._lengths[state] + 1
        if self._lengths[target] == length:
            return target
        clone = self._new(dict(self._next[target]), length, self._ends[target])
        self._links[clone] = self._links[target]
        self._links[target] = clone
        while state >= _ROOT and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._links[state]
        return clone

    def longest_repeat(self, most: int = 0) -> tuple[int, int]:
        """(length, end) of an occurrence, before the last token, of the longest suffix that has one.

        `most` bounds the length, 0 does not. (0, −1) where the last token is new.
        """
        state = self._links[self._last]
        if state <= _ROOT:
            return 0, -1
        length = self._lengths[state]
        if 0 < most < length:
            while self._lengths[self._links[state]] >= most:
                state = self._links[state]
            length = most
        return length, self._ends[state]

    def continuation(self, end: int, num_tokens: int) -> Sequence[int]:
        """What followed the occurrence that ends at `end`; a text that ends within goes on as it did from there."""
        found = self.tokens[end + 1 : end + 1 + num_tokens]
        period = len(self.tokens) - 1 - end
        while len(found) < num_tokens:
            found.append(found[len(found) - period])
        return found
