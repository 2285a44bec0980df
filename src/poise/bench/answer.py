"""Reads answers of OpenAI's shape into a request's row: tokens, usage, finish reason, and the class it falls in.

Knows no network and no clock: it gets the data of events with the instants they arrived. Invariant: running usage is never
summed, an empty role delta is no token, and tokens of single chunks are given only where they add up to the usage.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import msgspec

from poise.bench.record import RequestRow

DONE = b"[DONE]"
FAILED_FINISHES = frozenset({"abort", "error"})
ERROR_LENGTH = 300

Event = tuple[float, bytes]
"""Seconds from the start of the run, and the event's data."""


class Delta(msgspec.Struct):
    """The parts of a chat delta, or of a whole chat message, that can hold tokens."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    message: Delta | None = None
    finish_reason: str | None = None

    @property
    def answer(self) -> str:
        part = self.delta or self.message
        if part is None:
            return self.text or ""
        return part.content or part.refusal or ""

    @property
    def reasoning(self) -> str:
        part = self.delta or self.message
        return (part.reasoning_content or part.reasoning or "") if part else ""

    @property
    def has_tool_call(self) -> bool:
        part = self.delta or self.message
        return bool(part and part.tool_calls)


class CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: CachedTokens | None = None


class Payload(msgspec.Struct):
    """An event's data, or the whole body of an answer that is not streamed."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(Payload)


def read_body(row: RequestRow, body: bytes, *, keep_text: bool = False) -> None:
    """Fills the row from an answer that came in one piece; TTFT and the like stay None."""
    try:
        payload = _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError):
        fail(row, f"the answer is not an OpenAI object: {excerpt(body)}")
        return
    if payload.error is not None or not payload.choices:
        fail(row, error_text(payload.error) if payload.error is not None else "no choices")
        return
    _take_usage(row, payload.usage)
    row.finish_reason = next((c.finish_reason for c in payload.choices if c.finish_reason), None)
    _take_text(row, "".join(choice.answer for choice in payload.choices), keep_text)
    _classify(row, ended=True)


def read_stream(
    row: RequestRow, events: Sequence[Event], *, done: bool, keep_text: bool = False
) -> None:
    """Fills the row from the events of a stream, without `[DONE]`; `done` says whether that came."""
    chunks = _ChunkCounter()
    text: list[str] = []
    if events:
        row.first_event = events[0][0]
    for position, (time, data) in enumerate(events):
        try:
            payload = _decoder.decode(data)
        except (msgspec.MsgspecError, ValueError):
            if position == len(events) - 1 and not done:
                break  # cut in the middle of an event
            fail(row, f"an event is not an OpenAI object: {excerpt(data)}")
            break
        if payload.error is not None:
            fail(row, error_text(payload.error))
            break
        _take_usage(row, payload.usage)
        if payload.choices:
            _take_choices(row, time, payload.choices, text)
            chunks.add(time, payload)
    chunks.settle(row)
    _take_text(row, "".join(text), keep_text)
    _classify(row, ended=done)


class _ChunkCounter:
    """Gives each chunk its tokens: differences of running usage where every chunk has it, else one for each chunk."""

    def __init__(self) -> None:
        self.by_usage: list[tuple[float, int]] = []
        self.by_text: list[float] = []
        self.running = 0
        self.is_continuous = True

    def add(self, time: float, payload: Payload) -> None:
        choices = payload.choices or []
        has_token = any(c.answer or c.reasoning or c.has_tool_call for c in choices)
        if has_token:
            self.by_text.append(time)
        count = payload.usage.completion_tokens if payload.usage else None
        if count is None:
            if has_token:
                self.is_continuous = False
            return
        if count < self.running:
            self.is_continuous = False
        elif count > self.running:
            self.by_usage.append((time, count - self.running))
            self.running = count

    def settle(self, row: RequestRow) -> None:
        """Takes one of the two counts; where neither adds up, chunk gaps are all that is known."""
        total = row.completion_tokens
        if self.is_continuous and self.by_usage:
            row.chunk_times = [time for time, _ in self.by_usage]
            row.chunk_tokens = [tokens for _, tokens in self.by_usage]
            row.token_source = "continuous usage"
        else:
            row.chunk_times = self.by_text
            if self.by_text and total == len(self.by_text):
                row.chunk_tokens = [1] * total
                row.token_source = "one per chunk"
        row.first_token = row.chunk_times[0] if row.chunk_times else None


def _take_choices(row: RequestRow, time: float, choices: list[Choice], text: list[str]) -> None:
    for choice in choices:
        answer = choice.answer
        if answer:
            text.append(answer)
            if row.first_answer is None:
                row.first_answer = time
        if row.first_reasoning is None and choice.reasoning:
            row.first_reasoning = time
        if row.first_tool_call is None and choice.has_tool_call:
            row.first_tool_call = time
        row.finish_reason = choice.finish_reason or row.finish_reason


def _take_usage(row: RequestRow, usage: Usage | None) -> None:
    """The last value wins: usage is a running total, not an increment."""
    if usage is None:
        return
    if usage.completion_tokens is not None:
        row.completion_tokens = usage.completion_tokens
    if usage.prompt_tokens is not None:
        row.prompt_tokens = usage.prompt_tokens
    if usage.prompt_tokens_details is not None:
        row.cached_tokens = usage.prompt_tokens_details.cached_tokens


def _take_text(row: RequestRow, text: str, keep_text: bool) -> None:
    row.text_sha256 = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    if keep_text:
        row.text = text


def _classify(row: RequestRow, *, ended: bool) -> None:
    if row.error is not None:
        return
    if row.finish_reason in FAILED_FINISHES:
        fail(row, f"finish reason {row.finish_reason!r}")
    elif row.finish_reason is not None or ended:
        row.status = "ok"
    else:
        row.status = "truncated"
        row.error = "the stream ended without a finish reason and without [DONE]"


def fail(row: RequestRow, reason: str) -> None:
    """Marks an error; the first reason stays."""
    row.status = "error"
    row.error = row.error or reason[:ERROR_LENGTH]


def error_text(error: Any) -> str:
    """The message of an OpenAI error object, or whatever came in its place."""
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    return str(error)


def excerpt(body: bytes) -> str:
    """The beginning of a body in one printable line."""
    text = " ".join(body[:ERROR_LENGTH].decode("utf-8", "replace").split())
    return text[:160] or "(empty)"
