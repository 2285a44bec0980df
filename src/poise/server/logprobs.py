"""Log-probabilities in the three shapes that clients read.

Invariant: the chosen token is always among a position's entries, and every value is the engine's own (only −inf, which
JSON can't hold, is written as −9999).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from poise.core.output import TokenLogprobs
from poise.server.protocol import (
    ChatLogprobs,
    LegacyLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from poise.server.tokenizer_protocol import Tokenizer

LOWEST_LOGPROB = -9999.0


class TokenNames:
    """How single tokens are written: their text, or `bytes:\\xe2\\x80` where they hold a part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names: dict[int, str] = {}

    def data(self, token_id: int) -> bytes:
        """The token's exact bytes."""
        return self._tokenizer.token_bytes(token_id)

    def name(self, token_id: int, as_id: bool) -> str:
        if as_id:
            return f"token_id:{token_id}"
        name = self._names.get(token_id)
        if name is None:
            name = self._names[token_id] = self._spell(token_id)
        return name

    def _spell(self, token_id: int) -> str:
        data = self.data(token_id)
        if not data:
            return self._tokenizer.token_text(token_id) or f"token_id:{token_id}"
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TextOffsets:
    """Character offsets of a choice's tokens; a character cut across tokens counts where it is complete."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._length = 0

    def next(self, token_id: int) -> int:
        """Where this token begins."""
        start = self._length
        self._length += len(self._decoder.decode(self._names.data(token_id)))
        return start


def legacy_logprobs(
    entries: Sequence[TokenLogprobs | None],
    token_ids: Sequence[int],
    names: TokenNames,
    offsets: TextOffsets,
    *,
    width: int,
    as_ids: bool,
) -> LegacyLogprobs:
    """OpenAI's completion logprobs for `token_ids`; an entry of None (a prompt's first token) becomes null.

    `width` caps the alternatives: a prompt may have been scored with more than the completion asked for.
    """
    result = LegacyLogprobs([], [], [], [])
    for token_id, entry in zip(token_ids, entries, strict=True):
        result.text_offset.append(offsets.next(token_id))
        name = names.name(token_id, as_ids)
        result.tokens.append(name)
        if entry is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        logprob = _finite(entry.logprob)
        result.token_logprobs.append(logprob)
        top: dict[str, float] = {}
        for other, value in entry.top[:width]:
            top.setdefault(names.name(other, as_ids), _finite(value))
        top.setdefault(name, logprob)
        result.top_logprobs.append(top)
    return result


def chat_logprobs(
    entries: Sequence[TokenLogprobs], names: TokenNames, *, as_ids: bool
) -> ChatLogprobs:
    """OpenAI's chat logprobs, with each token's exact bytes."""
    return ChatLogprobs(
        [
            TokenLogprob(
                names.name(entry.token_id, as_ids),
                _finite(entry.logprob),
                list(names.data(entry.token_id)),
                [
                    TopLogprob(names.name(other, as_ids), _finite(value), list(names.data(other)))
                    for other, value in entry.top
                ],
            )
            for entry in entries
        ]
    )


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], names: TokenNames, *, width: int
) -> PromptLogprobs:
    """vLLM's prompt_logprobs: per position null or {token id: {logprob, rank, decoded_token}}."""
    result: PromptLogprobs = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        position = {
            str(token): PromptLogprob(_finite(value), rank, names.name(token, False))
            for rank, (token, value) in enumerate(entry.top[:width], start=1)
        }
        own = PromptLogprob(_finite(entry.logprob), entry.rank, names.name(entry.token_id, False))
        position[str(entry.token_id)] = own
        result.append(position)
    return result


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
