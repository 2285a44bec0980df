"""From a parsed request to what the sampler of each choice needs: checks, seeds, stop ids, bad
words as token ids.

Knows the vocabulary and the context, not the load. Invariant: ids that it lets pass are in the
vocabulary.
"""

from __future__ import annotations

import random
from dataclasses import replace

from poise.core.output import EngineSampling
from poise.core.sampling_params import SamplingParams
from poise.core.speculation import SpeculationOffer
from poise.engine.client import EngineRequest
from poise.errors import InvalidRequestError
from poise.tokenizer.tokenizer import Tokenizer

SEED_MASK = 2**64 - 1
_DRAWN_SEED_BITS = 53  # survives clients that hold JSON numbers in a double


def resolve_seed(seed: int | None, source: random.Random) -> int:
    """The seed as the sampler keys by it, 0 … 2**64-1 (a negative one wraps); drawn from `source`
    when None.
    """
    return source.getrandbits(_DRAWN_SEED_BITS) if seed is None else seed & SEED_MASK


class InputProcessor:
    """`max_total_tokens` bounds prompt + output: the context, or the KV pool if that is smaller."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_total_tokens: int,
        speculation: SpeculationOffer,
    ) -> None:
        self._speculation = speculation
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_total_tokens = max_total_tokens

    def process(self, request: EngineRequest) -> list[EngineSampling]:
        """One EngineSampling per choice, with max_tokens resolved; InvalidRequestError names what
        can't be served.
        """
        self._check_prompt(request)
        request.params.check_vocabulary(self._vocab_size)
        params = self._resolve_max_tokens(request)
        stop_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids |= frozenset(self._tokenizer.eos_token_ids)
        bad_word_ids = self._tokenize_bad_words(params)
        speculation = self._speculation.resolve(params.speculative)
        # The prompt is the same for all choices: its logprobs are computed for the first only.
        without_prompt_logprobs = replace(params, prompt_logprobs=None)
        return [
            EngineSampling(
                params=params if choice == 0 else without_prompt_logprobs,
                seed=request.seed & SEED_MASK,
                choice=choice,
                stop_token_ids=stop_token_ids,
                bad_word_ids=bad_word_ids,
                speculation=speculation,
            )
            for choice in range(params.n)
        ]

    def _check_prompt(self, request: EngineRequest) -> None:
        prompt = request.prompt_token_ids
        if not prompt:
            raise InvalidRequestError("the prompt is empty (0 tokens); send at least one", "prompt")
        for token in prompt:
            if type(token) is not int:
                raise InvalidRequestError(f"prompt holds {token!r}, expected token ids", "prompt")
            if not 0 <= token < self._vocab_size:
                raise InvalidRequestError(
                    f"prompt holds token id {token}, the vocabulary ends at {self._vocab_size - 1}",
                    "prompt",
                )

    def _resolve_max_tokens(self, request: EngineRequest) -> SamplingParams:
        """What is left of the context, where nothing was said; the scheduler refuses what can never
        fit.
        """
        params = request.params
        if params.max_tokens is not None:
            return params
        room = self._max_total_tokens - len(request.prompt_token_ids)
        return replace(params, max_tokens=max(1, room))

    def _tokenize_bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word as it is written at the start of a text and after a space."""
        sequences: dict[tuple[int, ...], None] = {}  # a set that keeps order
        for word in params.bad_words:
            bare = word.lstrip()
            if not bare:
                raise InvalidRequestError(
                    f"bad_words holds {word!r}, only white space", "bad_words"
                )
            for text in (bare, " " + bare):
                token_ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if token_ids:
                    sequences[token_ids] = None
        return tuple(sequences)
