"""The shapes of answers: OpenAI's, with vLLM's additions where they say more.

Plain structs, encoded by msgspec. Invariant: a field at UNSET isn't written; a field at None is written as null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Drafts of speculative decoding that became tokens of the answer, and that did not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    poise_seed: int
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class LegacyLogprobs(Struct):
    """Log-probabilities of `/v1/completions`: four lists, one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of `/v1/chat/completions`."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(Struct):
    """vLLM's entry of `prompt_logprobs`, keyed there by token id."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(Struct):
    """A choice of a text completion, whole or one chunk of it."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatMessage(Struct):
    role: str
    content: str
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatMessageDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatMessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET


class Answer(Struct):
    """The body of an answer that isn't streamed."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice] | list[ChatChoice]
    usage: Usage
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ModelCard(Struct):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "poise"


class ModelList(Struct):
    data: list[ModelCard]
    object: str = "list"


class TokenizeAnswer(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Struct):
    prompt: str


class Cancellation(Struct):
    """`cancelled`: the answers' ids of the requests that were running under the id asked for."""

    id: str
    cancelled: list[str]
    object: str = "request.cancellation"


class UsageAnswer(Struct):
    """What a tenant has used since the server started; `refused` requests never reached the engine."""

    tenant: str
    requests: int
    refused: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    object: str = "usage"


class PromptTimes(Struct):
    """One prompt of a request: where each choice's time went (`ChoiceTimes`), and its events (core/timeline.py)."""

    choices: list[dict[str, Any]]
    events: list[dict[str, Any]]


class RequestAnswer(Struct):
    """A request that is `running` or `finished`."""

    id: str
    status: str
    prompts: list[PromptTimes]
    object: str = "request"
