"""Puts deltas of the engine into OpenAI's choices, for both endpoints, streamed or whole.

Knows nothing of HTTP. Invariant: the chunks of a choice, joined, say what the whole choice says; a whole answer is made
by the same code as one chunk that holds everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from poise.core.output import TokenLogprobs
from poise.engine.client import ChoiceDelta, RequestDelta, RequestStats
from poise.server.logprobs import (
    TextOffsets,
    TokenNames,
    chat_logprobs,
    legacy_logprobs,
    prompt_logprobs,
)
from poise.server.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    ChatMessageDelta,
    CompletionChoice,
    CompletionTokensDetails,
    LegacyLogprobs,
    PromptLogprobs,
    PromptTokensDetails,
    Usage,
)
from poise.server.tokenizer_protocol import Tokenizer
from poise.server.valid_request import ValidRequest


class Format(Protocol):
    """What differs between the endpoints. `index` is the choice's index in the response."""

    object: str
    chunk_object: str

    def opening(self) -> list[Struct]: ...

    def chunk(self, prompt_index: int, index: int, delta: ChoiceDelta) -> Struct: ...

    def whole(self, prompt_index: int, index: int, delta: ChoiceDelta) -> Struct: ...


class Tally:
    """Counts what a request used, and keeps what the engine says once per prompt."""

    def __init__(self, request: ValidRequest) -> None:
        self._request = request
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in request.prompts)
        self._cached = [0] * len(request.prompts)
        self.num_output_tokens = 0
        self.stats: list[RequestStats] = []
        self.finish_reasons: list[str] = []
        self.prompt_logprobs: list[Sequence[TokenLogprobs | None] | None] = [None] * len(
            request.prompts
        )

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        return sum(self._cached)

    def note(self, prompt_index: int, delta: RequestDelta) -> list[tuple[int, ChoiceDelta]]:
        """Counts a delta; returns what of it may be shown, as (index in the response, delta)."""
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs[prompt_index] = delta.prompt_logprobs
        self._cached[prompt_index] = max(self._cached[prompt_index], delta.num_cached_tokens)
        if delta.stats is not None:
            self.stats.append(delta.stats)
            self._cached[prompt_index] = delta.stats.num_cached_tokens
        shown = []
        for choice in delta.choices:
            visible = _without_token(choice) if self._request.score_only else choice
            if visible.finish_reason is not None:
                self.finish_reasons.append(visible.finish_reason)
            elif not visible.text and not visible.token_ids:
                continue
            self.num_output_tokens += len(visible.token_ids)
            shown.append((prompt_index * self._request.num_choices + choice.index, visible))
        return shown

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            total_tokens=self._num_prompt_tokens + self.num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._cached)),
            poise_seed=self._request.seed,
            completion_tokens_details=self._drafts(),
        )

    def _drafts(self) -> CompletionTokensDetails | UnsetType:
        """Known when a prompt's answer has ended; nothing where nothing was drafted."""
        drafted = sum(stats.num_drafted_tokens for stats in self.stats)
        accepted = sum(stats.num_accepted_tokens for stats in self.stats)
        return CompletionTokensDetails(accepted, drafted - accepted) if drafted else UNSET


def _without_token(choice: ChoiceDelta) -> ChoiceDelta:
    """max_tokens 0: the engine was asked for one token, because it always draws; the answer has none."""
    reason = choice.finish_reason
    if reason == "stop":
        reason = "length"
    stop_reason = choice.stop_reason if reason == "error" else None
    return ChoiceDelta(choice.index, "", (), None, reason, stop_reason)


class CompletionFormat:
    """`text_completion` objects."""

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, request: ValidRequest, tally: Tally, names: TokenNames, tokenizer: Tokenizer
    ) -> None:
        self._request = request
        self._tally = tally
        self._names = names
        self._tokenizer = tokenizer
        self._begun: set[int] = set()
        self._offsets: dict[int, TextOffsets] = {}
        self._plain = not (request.echo or request.return_token_ids or request.logprobs is not None)

    def opening(self) -> list[Struct]:
        return []

    def chunk(self, prompt_index: int, index: int, delta: ChoiceDelta) -> CompletionChoice:
        if self._plain and delta.finish_reason is None:
            return CompletionChoice(index, delta.text, None, None)
        request = self._request
        first = index not in self._begun
        self._begun.add(index)
        text = delta.text
        if first and request.echo:
            text = self._prompt_text(prompt_index) + text
        choice = CompletionChoice(
            index, text, self._logprobs(prompt_index, index, delta, first), delta.finish_reason
        )
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        if request.return_token_ids:
            choice.token_ids = delta.token_ids
            if first:
                choice.prompt_token_ids = request.prompts[prompt_index].token_ids
        return choice

    def whole(self, prompt_index: int, index: int, delta: ChoiceDelta) -> CompletionChoice:
        choice = self.chunk(prompt_index, index, delta)
        if self._request.prompt_logprobs is not None:
            choice.prompt_logprobs = asked_prompt_logprobs(
                self._request, self._tally, prompt_index, self._names
            )
        return choice

    def _prompt_text(self, prompt_index: int) -> str:
        prompt = self._request.prompts[prompt_index]
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(
            prompt.token_ids,
            skip_special_tokens=self._request.params[prompt_index].skip_special_tokens,
        )

    def _logprobs(
        self, prompt_index: int, index: int, delta: ChoiceDelta, first: bool
    ) -> LegacyLogprobs | None:
        width = self._request.logprobs
        if width is None:
            return None
        entries: list[TokenLogprobs | None] = list(delta.logprobs or ())
        token_ids = [entry.token_id for entry in delta.logprobs or ()]
        if first and self._request.echo:
            of_prompt = self._tally.prompt_logprobs[prompt_index]
            if of_prompt is not None:
                entries = [*of_prompt, *entries]
                token_ids = [*self._request.prompts[prompt_index].token_ids, *token_ids]
        if index not in self._offsets:
            self._offsets[index] = TextOffsets(self._names)
        return legacy_logprobs(
            entries,
            token_ids,
            self._names,
            self._offsets[index],
            width=width,
            as_ids=self._request.tokens_as_ids,
        )


class ChatFormat:
    """`chat.completion` objects; the role comes in an opening chunk of its own."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ValidRequest, names: TokenNames) -> None:
        self._request = request
        self._names = names

    def opening(self) -> list[Struct]:
        count = self._request.num_choices
        delta = ChatMessageDelta(role="assistant", content="")
        return [ChatChunkChoice(index, delta, None, None) for index in range(count)]

    def chunk(self, prompt_index: int, index: int, delta: ChoiceDelta) -> ChatChunkChoice:
        content = ChatMessageDelta(content=delta.text)
        choice = ChatChunkChoice(index, content, self._logprobs(delta), delta.finish_reason)
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        if self._request.return_token_ids:
            choice.token_ids = delta.token_ids
        return choice

    def whole(self, prompt_index: int, index: int, delta: ChoiceDelta) -> ChatChoice:
        message = ChatMessage("assistant", delta.text)
        token_ids = delta.token_ids if self._request.return_token_ids else UNSET
        return ChatChoice(
            index,
            message,
            self._logprobs(delta),
            delta.finish_reason,
            delta.stop_reason,
            token_ids,
        )

    def _logprobs(self, delta: ChoiceDelta) -> ChatLogprobs | None:
        if self._request.logprobs is None:
            return None
        return chat_logprobs(delta.logprobs or (), self._names, as_ids=self._request.tokens_as_ids)


def asked_prompt_logprobs(
    request: ValidRequest, tally: Tally, prompt_index: int, names: TokenNames
) -> PromptLogprobs:
    """vLLM's `prompt_logprobs` field for one prompt."""
    entries = tally.prompt_logprobs[prompt_index] or ()
    return prompt_logprobs(entries, names, width=request.prompt_logprobs or 0)
