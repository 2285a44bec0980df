"""The named public prefix: a text whose tokens, where a prompt begins with them, are everybody's.

Knows the tokenizer; does not know blocks or salts. Invariant: a token is public only if it stands at the start of what
the text itself becomes, bare or in a chat template, so that nothing a client wrote is ever public.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from poise.errors import ConfigError, InvalidRequestError
from poise.server.tokenizer_protocol import Tokenizer

logger = logging.getLogger("poise.server")

FILLERS = ("A", "B")  # what stands after the text where it is encoded: no token of both is theirs


class PublicPrefix:
    """The token sequences that a public text may begin a prompt with."""

    def __init__(self, sequences: Sequence[Sequence[int]] = ()) -> None:
        self._sequences = sorted({tuple(ids) for ids in sequences if ids}, key=len, reverse=True)

    @property
    def num_tokens(self) -> int:
        """Of the longest sequence."""
        return max(map(len, self._sequences), default=0)

    def num_public_tokens(self, token_ids: Sequence[int]) -> int:
        """How many of the first tokens are public: those in which the prompt agrees with a sequence."""
        return max((_num_equal(ids, token_ids) for ids in self._sequences), default=0)


NOTHING_PUBLIC = PublicPrefix()


def read_public_text(path: Path) -> str:
    """The text of --public-prefix, without one newline at its end. Raises ConfigError."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"--public-prefix {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--public-prefix {path} is not UTF-8 at byte {error.start}") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise ConfigError(f"--public-prefix {path} is empty")
    return text


def encode_public_prefix(text: str, tokenizer: Tokenizer) -> PublicPrefix:
    """The text as it begins a prompt (with and without special tokens) and as a system message or the first user message
    begins a chat. Whatever follows it, only tokens that don't depend on that are taken.
    """
    sequences = []
    for special in (True, False):
        one, other = (tokenizer.encode(text + f, add_special_tokens=special) for f in FILLERS)
        sequences.append(one[: _num_equal(one, other)])
    for conversation in _system_message, _user_message:
        try:
            one, other = (tokenizer.encode_chat(conversation(text, filler)) for filler in FILLERS)
        except InvalidRequestError as error:
            logger.info("the public prefix has no form as %s: %s", conversation.__name__[1:], error)
            continue
        sequences.append(one[: _num_equal(one, other)])
    return PublicPrefix(sequences)


def _system_message(text: str, filler: str) -> list[dict[str, object]]:
    return [{"role": "system", "content": text}, {"role": "user", "content": filler}]


def _user_message(text: str, filler: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": text + filler}]


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)
