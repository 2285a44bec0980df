"""Turns what a client calls a prompt into token ids, refusing what could never fit before the work is done.

Knows the tokenizer and the engine's limits, nothing of sampling. Invariant: every prompt it returns has at least one
token, each within the vocabulary, and leaves room for at least one more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from poise.engine.client import EngineInfo
from poise.errors import InvalidRequestError
from poise.server.fields import check_token_ids, wrong_type
from poise.server.http_errors import shown
from poise.server.tokenizer_protocol import Tokenizer

INLINE_CHARACTERS = 8192  # longer texts are tokenised off the event loop


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `text` is what the client sent, None where it sent ids or messages."""

    token_ids: Sequence[int]
    text: str | None = None


class PromptEncoder:
    """Encodes prompts for one model."""

    def __init__(self, tokenizer: Tokenizer, info: EngineInfo) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._longest_token: int | None = None

    @property
    def context(self) -> int:
        """Tokens that prompt and answer together may take."""
        return min(self._info.max_model_len, self._info.kv_capacity_tokens)

    async def completion(
        self, value: object, *, add_special_tokens: bool, max_prompts: int
    ) -> list[Prompt]:
        """The prompts of a completion request: a text, texts, ids, or lists of ids."""
        rows = _rows(value, max_prompts)
        prompts = []
        for name, row in rows:
            if isinstance(row, str):
                ids = await self.text(name, row, add_special_tokens=add_special_tokens)
                prompt = Prompt(ids, row)
            else:
                check_token_ids(name, row, self._info.vocab_size)
                prompt = Prompt(cast("list[int]", row))
            self._check_length(name, len(prompt.token_ids))
            prompts.append(prompt)
        return prompts

    async def text(self, name: str, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encodes one text; a long one in a thread, one that can't fit not at all."""
        if len(text) <= INLINE_CHARACTERS:
            return self._encode(name, text, add_special_tokens)
        return await asyncio.to_thread(self._encode, name, text, add_special_tokens)

    def _encode(self, name: str, text: str, add_special_tokens: bool) -> list[int]:
        self._check_characters(name, len(text))
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not ids:
            raise InvalidRequestError(f"{name} encodes to no tokens.", name)
        return ids

    async def chat(
        self,
        messages: object,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: dict[str, object] | None,
        check_length: bool = True,
    ) -> Prompt:
        """The prompt that the model's chat template makes of the messages."""
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other; "
                "send add_generation_prompt: false.",
                "continue_final_message",
            )
        checked = _messages(messages)
        characters = _num_characters(checked)

        def encode() -> list[int]:
            self._check_characters("messages", characters)
            return self._tokenizer.encode_chat(
                checked,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=template_kwargs,
            )

        ids = encode() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(encode)
        if not ids:
            raise InvalidRequestError("messages encode to no tokens.", "messages")
        if check_length:
            self._check_length("messages", len(ids))
        return Prompt(ids)

    def _check_characters(self, name: str, num_characters: int) -> None:
        """A token covers at most as many characters as its bytes, so a text can be too long to need counting."""
        if num_characters <= self._info.max_model_len:
            return
        if self._longest_token is None:
            sizes = map(self._tokenizer.token_bytes, range(self._tokenizer.vocab_size))
            self._longest_token = max(1, max(map(len, sizes), default=1))
        if num_characters > self._info.max_model_len * self._longest_token:
            raise InvalidRequestError(
                f"{name} has {num_characters} characters, which can't fit this model's maximum context length "
                f"of {self._info.max_model_len} tokens.",
                name,
                "context_length_exceeded",
            )

    def _check_length(self, name: str, num_tokens: int) -> None:
        if num_tokens < self.context:
            return
        if self.context == self._info.max_model_len:
            limit = f"this model's maximum context length is {self.context} tokens"
        else:
            limit = f"the KV cache holds {self.context} tokens (see --kv-cache-memory-bytes)"
        raise InvalidRequestError(
            f"{name} has {num_tokens} tokens and the answer needs at least one; {limit}.",
            name,
            "context_length_exceeded",
        )


def _rows(value: object, max_prompts: int) -> list[tuple[str, str | list[object]]]:
    """Splits the field into named rows: ("prompt", …) for one prompt, ("prompt[3]", …) for the fourth of several."""
    expected = "a string, a list of strings, token ids, or a list of lists of token ids"
    if value is None:
        raise InvalidRequestError(f"prompt is missing, expected {expected}.", "prompt")
    if isinstance(value, str):
        rows: list[tuple[str, object]] = [("prompt", value)]
    elif not isinstance(value, list):
        raise wrong_type("prompt", value, expected)
    elif value and isinstance(value[0], (str, list)):
        rows = [(f"prompt[{index}]", row) for index, row in enumerate(value)]
    else:
        rows = [("prompt", value)]
    if len(rows) > max_prompts:
        raise InvalidRequestError(
            f"prompt holds {len(rows)} prompts, at most {max_prompts} are taken in one request.",
            "prompt",
        )
    kind = type(rows[0][1])
    for name, row in rows:
        if not isinstance(row, (str, list)) or type(row) is not kind:
            same = "a string" if kind is str else "a list of token ids"
            raise wrong_type(name, row, f"{same} like prompt[0]")
        if not row:
            raise InvalidRequestError(f"{name} is empty ({shown(row)}).", name)
    return cast("list[tuple[str, str | list[object]]]", rows)


def _messages(value: object) -> list[Mapping[str, object]]:
    """The messages as a list; what each may hold is the chat encoder's affair."""
    if value is None:
        raise InvalidRequestError("messages is missing, expected a list of messages.", "messages")
    if not isinstance(value, list) or not value:
        raise wrong_type("messages", value, "a list of messages, at least one")
    return cast("list[Mapping[str, object]]", value)


def _num_characters(messages: list[Mapping[str, object]]) -> int:
    """Characters of all contents, whole or in parts; anything misshapen counts as none."""
    count = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            count += len(text) if isinstance(text, str) else 0
    return count
