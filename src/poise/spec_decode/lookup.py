"""Drafts from the request's own prompt and output: what followed the last tokens when they occurred before.

Knows tokens of one request at a time. Invariant: proposing changes nothing but the request's automaton, so
drafts are a function of the tokens known.
"""

from __future__ import annotations

from typing import Final

from poise.core.request import Request
from poise.core.speculation import Speculation
from poise.spec_decode.suffix_automaton import SuffixAutomaton

DRAFTS_PER_MATCHED_TOKEN: Final = 1.0
"""Of `suffix`: a longer match is trusted for longer (Oliaro et al., "SuffixDecoding", 2024, section 4.2)."""


class LookupProposer:
    """`ngram` drafts all it may behind any match long enough; `suffix` as many tokens as it has matched."""

    def __init__(self) -> None:
        self._automata: dict[int, SuffixAutomaton] = {}

    def propose(
        self, request: Request, speculation: Speculation, num_tokens: int
    ) -> tuple[int, ...]:
        """Up to `num_tokens` tokens; none where too little repeats."""
        automaton = self._automata.get(request.request_id)
        if automaton is None:
            automaton = self._automata[request.request_id] = SuffixAutomaton()
        automaton.extend(request.token_ids[len(automaton.tokens) :])
        length, end = automaton.longest_repeat(speculation.prompt_lookup_max)
        if length < speculation.prompt_lookup_min:
            return ()
        if speculation.method == "suffix":
            num_tokens = min(num_tokens, max(1, int(length * DRAFTS_PER_MATCHED_TOKEN)))
        return tuple(automaton.continuation(end, num_tokens))

    def forget(self, request: Request) -> None:
        self._automata.pop(request.request_id, None)
