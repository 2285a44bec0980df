"""What the edge asks of a tokenizer; `poise.tokenizer` provides it, tests have their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text and chats to token ids, and back."""

    @property
    def vocab_size(self) -> int: ...

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special: bool = True
    ) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def token_text(self, token_id: int, /) -> str: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Messages through the model's chat template; raises InvalidRequestError for what it refuses."""
        ...
