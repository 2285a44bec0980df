"""What the engine holds of an unfinished request: its choices, and what is new of them and not handed out yet.

Knows no scheduler. Invariant: prompt log-probabilities go out once, whole, with the first delta, or not at all.
"""

from __future__ import annotations

from poise.core.output import TokenLogprobs
from poise.core.request import Request
from poise.engine.client import ChoiceDelta, EngineRequest, RequestDelta
from poise.engine.output_processor import ChoiceOutput


class Choice:
    """One choice: its request in the scheduler and its output."""

    __slots__ = ("last_token_time", "output", "owner", "request")

    def __init__(self, owner: RequestState, request: Request, output: ChoiceOutput) -> None:
        self.owner = owner
        self.request = request
        self.output = output
        self.last_token_time: float | None = None


class RequestState:
    """A request with its choices, from add to the last delta."""

    def __init__(self, key: int, request: EngineRequest, arrival_time: float) -> None:
        self.key = key
        self.request = request
        self.arrival_time = arrival_time
        self.choices: list[Choice] = []
        self.num_unfinished = request.params.n
        self.deltas: list[ChoiceDelta] = []  # not handed out yet
        wants_prompt_logprobs = request.params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            [None] if wants_prompt_logprobs else None
        )

    def take_delta(self) -> RequestDelta | None:
        """What may be handed out now. Prompt logprobs go with the first delta, so it waits until
        they are complete.
        """
        if not self.deltas:
            return None
        prompt_logprobs = self.prompt_logprobs
        if prompt_logprobs is not None:
            complete = len(prompt_logprobs) == len(self.request.prompt_token_ids)
            if not complete and not self.choices[0].output.finished:
                return None
            self.prompt_logprobs = None
            if not complete:
                prompt_logprobs = None
        deltas, self.deltas = tuple(self.deltas), []
        return RequestDelta(
            request_id=self.request.request_id,
            choices=deltas,
            num_cached_tokens=self.choices[0].request.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )
