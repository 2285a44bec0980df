"""Turns the token ids of one choice into text as they come, never cutting a character.

Knows nothing of stop strings or requests. Invariant: the joined results of `append` and `flush` equal
`tokenizer.decode` of all ids, however the ids were split.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from poise.tokenizer.decoding import fallback_byte
from poise.tokenizer.tokenizer import Tokenizer


class Detokenizer(Protocol):
    """Incremental decoding of one sequence of ids."""

    def append(self, ids: Sequence[int]) -> str:
        """The text that is certain now and was not before; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is left at the end: an incomplete character becomes U+FFFD, as in `decode`."""
        ...


def create_detokenizer(tokenizer: Tokenizer, *, skip_special_tokens: bool) -> Detokenizer:
    """A fresh detokenizer of the kind that this tokenizer's decoder needs."""
    hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    if tokenizer.decoding.byte_level:
        return _ByteLevelDetokenizer(tokenizer, hidden)
    return _ByteFallbackDetokenizer(tokenizer, hidden)


class _ByteLevelDetokenizer:
    """Every token is bytes; the text is their UTF-8 decoding, held back inside a character only."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._bytes_of = tokenizer.bytes_by_id
        self._hidden = hidden
        self._begun = b""  # the bytes of an incomplete character

    def append(self, ids: Sequence[int]) -> str:
        bytes_of, hidden = self._bytes_of, self._hidden
        new = self._begun + b"".join([bytes_of[id_] for id_ in ids if id_ not in hidden])
        text, num_decoded = codecs.utf_8_decode(new, "replace")
        self._begun = new[num_decoded:]
        return text

    def flush(self) -> str:
        begun, self._begun = self._begun, b""
        return begun.decode(errors="replace")


class _ByteFallbackDetokenizer:
    """Tokens are text, except that some are single bytes.

    A run of byte tokens is text if all of it is valid UTF-8, else one U+FFFD per byte: that is known only when the run
    ends, so a run is held back whole.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._text_of = tokenizer.text_by_id
        self._hidden = hidden
        self._run = bytearray()
        self._strip_space = tokenizer.decoding.strip_space  # until the first character is out

    def append(self, ids: Sequence[int]) -> str:
        pieces = []
        for id_ in ids:
            token = self._text_of[id_]
            if id_ in self._hidden or token is None:
                continue
            if (byte := fallback_byte(token)) is not None:
                self._run.append(byte)
            else:
                pieces += [self._end_run(), token.replace("▁", " ")]
        return self._stripped("".join(pieces))

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text
