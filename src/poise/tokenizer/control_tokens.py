"""Finds control tokens in text, and tells those a template wrote from those a user spelled.

A user's spelling is marked before a template sees it: its first character is swapped for a private-use one that occurs
nowhere else, so lengths and positions stay. Knows nothing of roles or templates. Invariant: no marked string, joined to
any text without the rest of the spelling in it, contains a control token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, models

from poise.errors import InvalidRequestError

_FIRST_MARK = 0x100000  # supplementary private-use area B
_LAST_MARK = 0x10FFFD


@dataclass(frozen=True, slots=True)
class Span:
    """A control token at `start` … `end` of a text, white space that belongs to it included."""

    token_id: int
    start: int
    end: int


class ControlTokens:
    """The control tokens of one vocabulary, by id."""

    def __init__(self, tokens: Mapping[int, AddedToken]) -> None:
        self._ids = [id_ for id_ in sorted(tokens) if tokens[id_].content]
        texts = [tokens[id_].content for id_ in self._ids]
        self._finder = _finder([tokens[id_] for id_ in self._ids])
        self._bare_finder = _finder([AddedToken(text) for text in texts])
        self._openings = {text[:3] for text in texts}
        self._heads = {text[:i] for text in texts for i in range(1, len(text))}
        self._tails = {text[i:] for text in texts for i in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def find(self, text: str) -> list[Span]:
        """Control tokens spelled in `text`, as encoding with control tokens would cut them out."""
        if not self._may_hold_one(text):
            return []
        encoding = self._finder.encode(text, add_special_tokens=False)
        return [
            Span(self._ids[index], start, end)
            for index, (start, end) in zip(encoding.ids, encoding.offsets)
        ]

    def mark(self, texts: Sequence[str], avoid: str) -> tuple[list[str], dict[int, str]]:
        """`texts` with each spelling broken, and the table for `str.translate` that mends the result.

        Broken are whole spellings, and pieces at either end that text beside them could complete. `avoid`: text that the
        marks must not occur in, apart from `texts`.
        """
        positions = [self._positions(text) for text in texts]
        if not any(positions):
            return list(texts), {}
        taken = set(avoid).union(*texts)
        free = (chr(code) for code in range(_FIRST_MARK, _LAST_MARK) if chr(code) not in taken)
        marks: dict[str, str] = {}
        marked = []
        for text, where in zip(texts, positions):
            characters = list(text)
            for i in where:
                if text[i] not in marks:
                    marks[text[i]] = next(free)
                characters[i] = marks[text[i]]
            marked.append("".join(characters))
        return marked, {ord(mark): character for character, mark in marks.items()}

    def _positions(self, text: str) -> set[int]:
        """Where a spelling, or the part of one at an end of `text`, has a character to swap."""
        found: set[int] = set()
        rest = text
        # Again until none is left: spellings may overlap, and one pass finds only those that do not.
        while self._may_hold_one(rest):
            starts = [start for start, _ in self._bare_finder.encode(rest).offsets]
            if not starts:
                break
            found.update(starts)
            characters = list(rest)
            for start in starts:
                characters[start] = chr(_LAST_MARK)
            rest = "".join(characters)
        for length in range(1, min(self._longest, len(text) + 1)):
            if text[-length:] in self._heads:
                found.add(len(text) - length)
            if text[:length] in self._tails:
                found.add(0)
        return found

    def _may_hold_one(self, text: str) -> bool:
        """False where a cheap look already shows that no control token is spelled in `text`."""
        return any(opening in text for opening in self._openings)


def check_unicode(text: str, name: str, param: str | None = None) -> None:
    """InvalidRequestError if `text` holds lone surrogates, which no tokenizer can take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} holds the lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}, which is not valid Unicode",
            param,
        ) from None


def _finder(tokens: list[AddedToken]) -> tokenizers.Tokenizer:
    """A tokenizer that knows these tokens and nothing else: all other text yields nothing."""
    finder = tokenizers.Tokenizer(models.BPE())
    finder.add_tokens(
        [
            AddedToken(
                token.content,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                single_word=token.single_word,
                normalized=False,
            )
            for token in tokens
        ]
    )
    return finder
