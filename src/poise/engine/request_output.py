"""Finished answers of the offline API, shaped like vLLM's, and how deltas add up to them.

Knows nothing of the engine. Invariant: text, token_ids and logprobs are the concatenation of the
deltas, nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from poise.core.output import TokenLogprobs
from poise.engine.client import ChoiceDelta, RequestDelta, RequestStats


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of one token before any processing; `rank` 1 is the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One choice. `logprobs` has one dict per token: the drawn token first, then the best `k`."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its `n` choices. `seed` is the one used: the same again repeats the answer."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    seed: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: RequestStats | None = None


class RequestOutputBuilder:
    """Adds deltas up to a RequestOutput. `token_text` gives the readable form of a token id."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        n: int,
        seed: int,
        token_text: Callable[[int], str],
    ) -> None:
        self._token_text = token_text
        self._texts: list[list[str]] = [[] for _ in range(n)]
        self.output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=list(prompt_token_ids),
            outputs=[CompletionOutput(index) for index in range(n)],
            seed=seed,
        )

    def append(self, delta: RequestDelta) -> None:
        output = self.output
        output.num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = [
                None if entry is None else self._logprob_dict(entry)
                for entry in delta.prompt_logprobs
            ]
        for choice in delta.choices:
            self._append_choice(choice)
        if delta.stats is not None:
            for texts, completion in zip(self._texts, output.outputs, strict=True):
                completion.text = "".join(texts)
            output.metrics = delta.stats
            output.finished = True

    def _append_choice(self, choice: ChoiceDelta) -> None:
        completion = self.output.outputs[choice.index]
        self._texts[choice.index].append(choice.text)
        completion.token_ids.extend(choice.token_ids)
        if choice.logprobs is not None:
            if completion.logprobs is None:
                completion.logprobs = []
            completion.logprobs.extend(self._logprob_dict(entry) for entry in choice.logprobs)
            completion.cumulative_logprob = sum(
                (entry.logprob for entry in choice.logprobs), completion.cumulative_logprob or 0.0
            )
        if choice.finish_reason is not None:
            completion.finish_reason = choice.finish_reason
            completion.stop_reason = choice.stop_reason

    def _logprob_dict(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        logprobs = {
            entry.token_id: Logprob(entry.logprob, entry.rank, self._token_text(entry.token_id))
        }
        for place, (token_id, logprob) in enumerate(entry.top, start=1):
            logprobs.setdefault(token_id, Logprob(logprob, place, self._token_text(token_id)))
        return logprobs
