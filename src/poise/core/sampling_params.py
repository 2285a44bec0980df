"""What a request asks of the sampler, under vLLM's names, checked once at the edge.

Knows nothing of tokenizers or arrays. Invariant: an instance that passed `validate` is fit for the engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from poise.core.speculation import Speculation, resolve_speculation
from poise.errors import InvalidRequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_BIAS_ENTRIES = 4096
MAX_BAD_WORDS = 128


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request, shaped like vLLM's.

    `max_tokens=None` means "what is left of the context". `top_k=0` (or -1) and `min_p=0` are off.
    `logprobs=None` reports none, `0` only the chosen token's, `k` also the k best. `speculative` has fields of
    `core.speculation.Speculation`, over the engine's own; False switches it off.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    speculative: Mapping[str, Any] | Literal[False] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        self._check_types_and_ranges()

    def _check_types_and_ranges(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _number("temperature", self.temperature, 0.0, 1e4)
        _number("top_p", self.top_p, 0.0, 1.0, exclude_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}", "min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        _strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_LENGTH)
        _strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_STOP_LENGTH)
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequestError(
                    "allowed_token_ids is empty: no token could be drawn", "allowed_token_ids"
                )
            for token in self.allowed_token_ids:
                _integer("allowed_token_ids", token, 0, 2**31 - 1)
        if self.logit_bias:
            if len(self.logit_bias) > MAX_BIAS_ENTRIES:
                raise InvalidRequestError(
                    f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_BIAS_ENTRIES} are taken",
                    "logit_bias",
                )
            for token, bias in self.logit_bias.items():
                _integer("logit_bias", token, 0, 2**31 - 1)
                _number("logit_bias", bias, -100.0, 100.0)
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "include_stop_str_in_output",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(
                    f"{name} is {getattr(self, name)!r}, expected true or false", name
                )
        resolve_speculation(self.speculative, Speculation())
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=true", "stop")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequestError for any token id at or past `vocab_size`."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise InvalidRequestError(
                        f"{name} holds token id {token}, the vocabulary ends at {vocab_size - 1}",
                        name,
                    )

    @property
    def greedy(self) -> bool:
        """True where the most likely token is always taken (temperature below 1e-5)."""
        return self.temperature < 1e-5


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} is {value!r}, expected an integer", name)
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} is {value}, expected {low} to {high}", name)


def _number(name: str, value: object, low: float, high: float, exclude_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(f"{name} is {value!r}, expected a number", name)
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequestError(f"{name} is {value}, expected a finite number", name)
    if not low <= value <= high or (exclude_low and value == low):
        above = "above " if exclude_low else ""
        raise InvalidRequestError(f"{name} is {value}, expected {above}{low} to {high}", name)


def _strings(name: str, values: Sequence[object], max_count: int, max_length: int) -> None:
    if len(values) > max_count:
        raise InvalidRequestError(f"{name} has {len(values)} entries, at most {max_count}", name)
    for value in values:
        if not isinstance(value, str):
            raise InvalidRequestError(f"{name} holds {value!r}, expected a string", name)
        if not value:
            raise InvalidRequestError(f"{name} holds an empty string", name)
        if len(value) > max_length:
            raise InvalidRequestError(
                f"{name} holds a string of {len(value)} characters, at most {max_length}", name
            )
