"""Requests and their answers as data, compared to the bit.

Knows nothing of engines. Invariant: two answers are the same iff every id, every float's bits, text and
finish reason are; a float is kept as the bits of the float32 that it is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from poise.core.output import TokenLogprobs
from poise.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Probe:
    """A request that the checks send: everything that its answer may depend on."""

    name: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int


class Token(NamedTuple):
    """One position: the token and, where logprobs were asked for, the bits of its log-probability,
    its rank, and (id, bits) of the best.
    """

    token_id: int
    logprob: int | None = None
    rank: int | None = None
    top: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    """One of the `n` choices. `text` is None where nobody made text of it."""

    tokens: tuple[Token, ...]
    finish_reason: str | None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """`prompt` holds the prompt's log-probabilities from its second token on, where asked for."""

    choices: tuple[ChoiceAnswer, ...]
    prompt: tuple[Token, ...] = ()

    @property
    def num_positions(self) -> int:
        return len(self.prompt) + sum(len(choice.tokens) for choice in self.choices)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position where two answers part."""

    where: str
    expected: str
    actual: str


def float_bits(value: float) -> int:
    """The bits of a value that was a float32."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def token(entry: TokenLogprobs) -> Token:
    top = tuple((token_id, float_bits(value)) for token_id, value in entry.top)
    return Token(entry.token_id, float_bits(entry.logprob), entry.rank, top)


def tokens(ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> tuple[Token, ...]:
    """Drawn tokens with the log-probabilities that came with them."""
    if logprobs is None:
        return tuple(Token(token_id) for token_id in ids)
    return tuple(token(entry) for entry in logprobs)


def first_difference(expected: Answer, actual: Answer) -> Difference | None:
    """None if the answers are the same."""
    for where, left, right in _walk(expected, actual):
        if left != right:
            return Difference(where, _shown(left), _shown(right))
    return None


def _walk(expected: Answer, actual: Answer) -> Iterator[tuple[str, object, object]]:
    for i, (left, right) in enumerate(zip_longest(expected.prompt, actual.prompt), start=1):
        yield f"prompt position {i}", left, right
    yield "number of choices", len(expected.choices), len(actual.choices)
    for index, (one, other) in enumerate(zip(expected.choices, actual.choices)):
        for i, (left, right) in enumerate(zip_longest(one.tokens, other.tokens)):
            yield f"choice {index}, output token {i}", left, right
        yield f"choice {index}, finish reason", one.finish_reason, other.finish_reason
        if one.text is not None and other.text is not None:
            yield f"choice {index}, text", one.text, other.text


def _shown(value: object) -> str:
    if not isinstance(value, Token):
        return "nothing" if value is None else repr(value)
    if value.logprob is None:
        return f"token {value.token_id}"
    logprob = struct.unpack("<f", struct.pack("<I", value.logprob))[0]
    text = (
        f"token {value.token_id}, logprob {logprob:.7g} (0x{value.logprob:08x}), rank {value.rank}"
    )
    if value.top:
        text += ", best " + " ".join(f"{token_id}:0x{bits:08x}" for token_id, bits in value.top)
    return text
