"""Text to ids and ids to text, over the `tokenizers` library.

Owns which ids are special and what bytes a token stands for; knows nothing of requests or files. Safe to use from
many threads. Invariant: `encode(..., parse_special=False)` never yields a control token, whatever the text spells.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import tokenizers
from tokenizers import pre_tokenizers

from poise.errors import InvalidRequestError, ModelFileError
from poise.models.config import TokenizerData
from poise.tokenizer.chat_template import ChatTemplate, RenderedChat
from poise.tokenizer.control_tokens import ControlTokens, check_unicode
from poise.tokenizer.decoding import TokenDecoding, read_decoding
from poise.tokenizer.gguf_metadata import build_from_gguf, set_template

_Value = TypeVar("_Value")


class Tokenizer:
    """Built once per model from `TokenizerData`; ModelFileError if that is damaged or unsupported."""

    def __init__(self, data: TokenizerData) -> None:
        if data.tokenizer_json is not None:
            self._tokenizer = _from_json(data)
        else:
            self._tokenizer = build_from_gguf(data.gguf, add_bos=data.add_bos_token)
        self.bos_token_id = data.bos_token_id
        self.eos_token_ids = data.eos_token_ids
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token: entry for token, entry in added.items() if entry.special}
        self.special_ids: frozenset[int] = frozenset(special)
        self.control_tokens = ControlTokens(special)
        self.decoding: TokenDecoding = read_decoding(self._tokenizer)
        self.chat_template = ChatTemplate(
            data.chat_template, data.special_tokens, self.control_tokens
        )
        self.text_by_id: Mapping[int, str | None] = _Cache(self._tokenizer.id_to_token)
        self.bytes_by_id: Mapping[int, bytes] = _Cache(self.token_bytes)
        self._lock = threading.Lock()
        self._plain: _PlainTokenizer | None = None

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special: bool = True
    ) -> list[int]:
        """Ids of `text`. `parse_special=False` takes control tokens that the text spells as ordinary characters.

        `add_special_tokens` adds what the model wants around a text (mostly BOS before it). Raises
        InvalidRequestError for text that is not valid Unicode (lone surrogates).
        """
        check_unicode(text, "text")
        if parse_special:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        ids = self._plain_tokenizer().encode(text, starts_text=True)
        return self._with_special(ids) if add_special_tokens else ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Ids of a chat as the model's template writes it; see `ChatTemplate.render` for arguments and errors."""
        return self.encode_rendered(
            self.chat_template.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=template_kwargs,
            )
        )

    def encode_rendered(self, chat: RenderedChat) -> list[int]:
        """Ids of a rendered chat: control tokens that the template wrote are parsed, those in messages are not."""
        spans = self.control_tokens.find(chat.marked)
        if spans == self.control_tokens.find(chat.text):
            return self.encode(chat.text, add_special_tokens=False)
        plain = self._plain_tokenizer()
        ids: list[int] = []
        position = 0
        for span in spans:
            ids += plain.encode(chat.text[position : span.start], starts_text=position == 0)
            ids.append(span.token_id)
            position = span.end
        return ids + plain.encode(chat.text[position:], starts_text=position == 0)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `ids`, ids past the vocabulary skipped; broken UTF-8 becomes U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def is_special(self, token: int) -> bool:
        """True for control tokens, which `skip_special_tokens` hides."""
        return token in self.special_ids

    def token_text(self, token: int) -> str:
        """The token as the vocabulary spells it (byte-level BPE: with Ġ for a space); "" past the vocabulary."""
        return self.text_by_id[token] or ""

    def token_bytes(self, token: int) -> bytes:
        """The bytes this token adds to a text; b"" past the vocabulary."""
        return self.decoding.token_bytes(self.token_text(token))

    def _with_special(self, ids: list[int]) -> list[int]:
        """`ids` with what `add_special_tokens` puts around a text."""
        around: list[int] = self._tokenizer.encode("", add_special_tokens=True).ids
        marked: list[int] = self._tokenizer.encode("a", add_special_tokens=True).ids
        before = 0
        while before < len(around) and around[before] == marked[before]:
            before += 1
        return around[:before] + ids + around[before:]

    def _plain_tokenizer(self) -> _PlainTokenizer:
        with self._lock:
            if self._plain is None:
                self._plain = _PlainTokenizer(self._tokenizer, self.special_ids)
            return self._plain


class _Cache(dict[int, _Value]):
    """Values by token id, computed when first asked for; `text_by_id` and `bytes_by_id` are read in every step."""

    def __init__(self, compute: Callable[[int], _Value]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token: int) -> _Value:
        value = self[token] = self._compute(token)
        return value


class _PlainTokenizer:
    """The same vocabulary with control tokens switched off. Built from the other one's parts; never changed after."""

    def __init__(self, original: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._special_ids = special_ids
        self._first = self._copy(original)
        self._later = self._first
        if (later := _without_first_space(original)) is not None:
            self._later = self._copy(original)
            self._later.pre_tokenizer = later

    def encode(self, text: str, *, starts_text: bool) -> list[int]:
        """Ids of `text`, where no control token is; `starts_text` is False after a control token."""
        if not text:
            return []
        tokenizer = self._first if starts_text else self._later
        encoding = tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self._special_ids.isdisjoint(ids):
            return ids
        for token, (start, end) in zip(ids, encoding.offsets):
            spelled = text[
                start:end
            ]  # something else where the token stands for an unknown character
            if token in self._special_ids and spelled == tokenizer.id_to_token(token):
                raise InvalidRequestError(
                    f"the text spells the control token {spelled!r}, which this model's tokenizer "
                    "can't write as plain text"
                )
        return ids

    @staticmethod
    def _copy(original: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        """A tokenizer that shares `original`'s model (which is immutable) and parses no special tokens."""
        copy = tokenizers.Tokenizer(original.model)
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if getattr(original, part) is not None:
                setattr(copy, part, getattr(original, part))
        added = original.get_added_tokens_decoder()
        copy.add_tokens([added[token] for token in sorted(added)])
        contents = {token: entry.content for token, entry in added.items()}
        if contents != {t: entry.content for t, entry in copy.get_added_tokens_decoder().items()}:
            # The ids have gaps, so adding in order gave other ones.
            copy = tokenizers.Tokenizer.from_str(original.to_str())
        copy.encode_special_tokens = True
        return copy


def _without_first_space(tokenizer: tokenizers.Tokenizer) -> pre_tokenizers.PreTokenizer | None:
    """A pre-tokenizer for text that is not the start, where the original adds a space to the start only."""
    original = tokenizer.pre_tokenizer
    if isinstance(original, pre_tokenizers.Metaspace) and original.prepend_scheme == "first":
        return pre_tokenizers.Metaspace(
            replacement=original.replacement, prepend_scheme="never", split=original.split
        )
    return None


def _from_json(data: TokenizerData) -> tokenizers.Tokenizer:
    assert data.tokenizer_json is not None
    try:
        tokenizer = tokenizers.Tokenizer.from_str(data.tokenizer_json)
    except Exception as error:  # the library raises nothing narrower
        raise ModelFileError(f"tokenizer.json can't be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if data.add_bos_token and data.bos_token_id is not None:
        if not 0 <= data.bos_token_id < size:
            raise ModelFileError(
                f"bos_token_id is {data.bos_token_id}, the tokenizer has {size} tokens"
            )
        if tokenizer.encode("a", add_special_tokens=True).ids[:1] != [data.bos_token_id]:
            set_template(tokenizer, data.bos_token_id, None)
    return tokenizer
