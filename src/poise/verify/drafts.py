"""A drafter that knows the answers and spoils some of what it drafts: every place and number of rejections, on any model.

Knows answers as data. Invariant: a draft is a function of the request's tokens, so a trial can be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

from poise.core.drafting import Draft, DraftRoom
from poise.core.request import Request
from poise.core.step_time import StepShape, StepTimeModel
from poise.verify.answers import Answer, Probe, Token

ONE_IN = 4  # drafts that are spoilt

Known = Mapping[tuple[tuple[int, ...], int, int], Sequence[Token]]
"""The tokens of each choice by its prompt, its seed and its index."""


def known_answers(probes: Sequence[Probe], answers: Mapping[str, Answer]) -> Known:
    return {
        (probe.token_ids, probe.seed, index): choice.tokens
        for probe in probes
        for index, choice in enumerate(answers[probe.name].choices)
    }


class KnowingDrafter:
    """See `core.drafting.Drafter`. Counts drafts and those that were accepted."""

    def __init__(self, known: Known, vocab_size: int) -> None:
        self.num_drafted = 0
        self.num_accepted = 0
        self._known = known
        self._vocab_size = vocab_size

    def draft(
        self, rooms: Sequence[DraftRoom], shape: StepShape, step_time: StepTimeModel
    ) -> list[Draft]:
        return [self._draft(*room) for room in rooms]

    def _draft(self, request: Request, most: int) -> Draft:
        prompt = tuple(request.token_ids[: request.num_prompt_tokens])
        known = self._known.get((prompt, request.sampling.seed, request.sampling.choice), ())
        begin = request.num_output_tokens
        drafts = [
            self._spoilt(token, prompt, begin + place)
            for place, token in enumerate(known[begin : begin + most])
        ]
        return Draft(len(drafts), tuple(drafts))

    def _spoilt(self, token: Token, prompt: Sequence[int], place: int) -> int:
        """The token, or where it is spoilt the likeliest other one that is known of."""
        if crc32(f"{place} {prompt}".encode()) % ONE_IN:
            return token.token_id
        others = [token_id for token_id, _ in token.top if token_id != token.token_id]
        return others[0] if others else (token.token_id + 1) % self._vocab_size

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self.num_drafted += num_drafts
        self.num_accepted += num_accepted

    def forget(self, request: Request) -> None:
        pass
