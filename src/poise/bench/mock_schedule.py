"""What the mock server is to do, as data: a schedule per request, compiled to events and then to bytes with their times.

Pure: no clock, no socket. Invariant: the same schedule and request give the same events, times and bytes, and the tokens of
the events add up to the completion tokens of a full answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]

Kind = Literal[
    "role", "empty", "reasoning", "content", "finish", "usage", "error", "done", "comment", "answer"
]
End = Literal["done", "no_done", "cut", "reset", "error_event", "stall"]

DEFAULT_NUM_TOKENS = 16


class MockSchedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one request is answered. Times are seconds from the instant the request was admitted, never from the last write."""

    first_token_s: Seconds = 0.05
    """To the first chunk that holds a token."""
    uncached_token_s: Seconds = 0.0
    """Added to first_token_s for each prompt token that the prefix cache does not hold."""
    gap_s: Annotated[tuple[Seconds, ...], msgspec.Meta(min_length=1)] = (0.01,)
    """Between chunks that hold tokens; repeated from its beginning when it is used up."""

    num_tokens: Count | None = None
    """None: as many as max_tokens asks."""
    tokens_per_chunk: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1)] = (1,)
    """Repeated like gap_s; the last chunk holds what is left."""
    num_reasoning_tokens: Count = 0
    """Of the tokens, the first so many are reasoning (chat only)."""
    reasoning_field: Literal["reasoning_content", "reasoning"] = "reasoning_content"
    role_at_s: Seconds | None = None
    """A first chunk with a role and empty content (chat only)."""
    num_empty_chunks: Count = 0
    """Chunks with empty content, spread evenly before the first token."""
    token_text: str = " t"
    """Each token's text is this and its number."""
    labelled: bool = False
    """Begins each token's text with the answer's id, so that no two answers have one text."""
    finish_reason: Literal["stop", "length"] | None = None
    """None: "length" when max_tokens is reached, else "stop"."""
    finish: Literal["last_token", "own_chunk"] = "last_token"

    usage: Literal["asked", "missing", "continuous", "finish_chunk"] = "asked"
    """asked: as stream_options say. continuous: cumulative in every chunk. finish_chunk: beside the finish reason."""
    prompt_tokens: Count | None = None
    """None: counted from the prompt."""
    cached_tokens: Count | None = None
    """None: what the server's prefix cache holds."""

    end: End = "done"
    """no_done: a whole HTTP body without [DONE]. cut: the connection closes inside the body. reset: it is reset."""
    end_after_chunks: Count | None = None
    """The end comes after so many chunks with tokens; None: after all of them."""
    status: Annotated[int, msgspec.Meta(ge=200, le=599)] = 200
    answer: Literal["as_asked", "json", "html"] = "as_asked"
    """What a request for a stream gets: a stream, one JSON object, or a page that no API would send."""

    line_end: Literal["\n", "\r\n", "\r"] = "\n"
    events_per_write: Positive = 1
    """So many events wait for each other and leave in one write."""
    piece_bytes: Positive | None = None
    """Cuts every write into pieces of so many bytes, through characters and line ends alike."""
    piece_gap_s: Seconds = 0.0
    """Between those pieces."""
    heartbeat_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """A comment line each time so many seconds have passed."""
    padding_bytes: Count = 0
    """Makes each event bigger by an unknown field of this length."""


class MockProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a mock server behaves: its schedules are given to requests in order of arrival, round and round."""

    description: str = ""
    schedules: Annotated[tuple[MockSchedule, ...], msgspec.Meta(min_length=1)] = (MockSchedule(),)
    slots: Positive | None = None
    """At most so many requests are answered at once; the others wait in order of arrival."""
    prefix_cache: bool = False
    """Prompts are remembered in blocks of 16 tokens."""
    metrics: bool = True
    model: str = "mock"


@dataclass(frozen=True, slots=True)
class MockRequest:
    """What the mock understood of a request."""

    chat: bool
    stream: bool
    max_tokens: int
    include_usage: bool
    continuous_usage: bool
    prompt: tuple[Any, ...]
    """Token ids, or the words of a text."""
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event, or the whole body of an answer that is not streamed."""

    at_s: float
    kind: Kind
    num_tokens: int = 0
    data: Any = None
    """A JSON value; a string is sent as it is."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes for one write to the socket, and the events whose last byte it carries."""

    at_s: float
    payload: bytes
    completes: tuple[Event, ...] = field(default=())


class ScheduleMismatch(ValueError):
    """The schedule asks for what this request cannot have; str() is one line."""


def num_completion_tokens(schedule: MockSchedule, request: MockRequest) -> int:
    """Tokens of a full answer."""
    return request.max_tokens if schedule.num_tokens is None else schedule.num_tokens


def chunk_plan(schedule: MockSchedule, request: MockRequest) -> Iterator[tuple[float, int]]:
    """(seconds, tokens) of each chunk that holds tokens; reasoning and answer never share one."""
    left = num_completion_tokens(schedule, request)
    reasoning_left = min(schedule.num_reasoning_tokens, left)
    num_prompt = prompt_tokens(schedule, request)
    uncached = max(0, num_prompt - cached_tokens(schedule, request))
    at = schedule.first_token_s + schedule.uncached_token_s * uncached
    index = 0
    while left:
        count = min(schedule.tokens_per_chunk[index % len(schedule.tokens_per_chunk)], left)
        if reasoning_left:
            count = min(count, reasoning_left)
            reasoning_left -= count
        yield at, count
        left -= count
        at += schedule.gap_s[index % len(schedule.gap_s)]
        index += 1


def token_texts(schedule: MockSchedule, answer_id: str, numbers: range) -> str:
    """The joined text of tokens by their numbers."""
    label = f"{schedule.token_text}{answer_id}." if schedule.labelled else schedule.token_text
    return "".join(f"{label}{number}" for number in numbers)


def prompt_tokens(schedule: MockSchedule, request: MockRequest) -> int:
    return len(request.prompt) if schedule.prompt_tokens is None else schedule.prompt_tokens


def cached_tokens(schedule: MockSchedule, request: MockRequest) -> int:
    return request.cached_tokens if schedule.cached_tokens is None else schedule.cached_tokens


def usage(schedule: MockSchedule, request: MockRequest, completion: int) -> dict[str, Any]:
    """The usage object after so many completion tokens."""
    prompt = prompt_tokens(schedule, request)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(schedule, request)},
    }


def finish_reason(schedule: MockSchedule, request: MockRequest) -> str:
    if schedule.finish_reason is not None:
        return schedule.finish_reason
    reached = num_completion_tokens(schedule, request) >= request.max_tokens
    return "length" if reached else "stop"


def check(schedule: MockSchedule, request: MockRequest) -> None:
    """Raises ScheduleMismatch where the schedule has parts that only a chat can show."""
    if request.chat:
        return
    if schedule.role_at_s is not None or schedule.num_reasoning_tokens:
        raise ScheduleMismatch("a role or reasoning in the mock's schedule needs chat completions")


def timeline(schedule: MockSchedule, request: MockRequest, answer_id: str) -> list[Event]:
    """All events of a streamed answer in the order they are sent, up to its scheduled end."""
    plan = list(chunk_plan(schedule, request))
    cut_at = len(plan) if schedule.end_after_chunks is None else schedule.end_after_chunks
    whole = cut_at >= len(plan) and schedule.end in ("done", "no_done")
    events = list(_opening(schedule, request, plan, answer_id))
    sent = 0
    for index, (at, count) in enumerate(plan[:cut_at]):
        kind: Kind = "reasoning" if sent < schedule.num_reasoning_tokens else "content"
        text = token_texts(schedule, answer_id, range(sent, sent + count))
        sent += count
        last = whole and index == len(plan) - 1 and schedule.finish == "last_token"
        data = _chunk(schedule, request, answer_id, {_field(schedule, kind): text}, last)
        events.append(
            Event(at, kind, count, _with_usage(schedule, request, data, sent, last), text)
        )
    at = events[-1].at_s if events else schedule.first_token_s
    if whole:
        events += _closing(schedule, request, answer_id, at, bool(plan))
    if schedule.end == "error_event":
        error = {
            "error": {"message": "the mock's engine died", "type": "server_error", "code": 500}
        }
        events.append(Event(at, "error", 0, error))
    if schedule.heartbeat_s is not None:
        beats = int(at / schedule.heartbeat_s)
        comments = [Event((n + 1) * schedule.heartbeat_s, "comment") for n in range(beats)]
        events = sorted(comments + events, key=lambda event: event.at_s)
    return events


def _opening(
    schedule: MockSchedule, request: MockRequest, plan: Sequence[tuple[float, int]], answer_id: str
) -> Iterator[Event]:
    if schedule.role_at_s is not None:
        data = _chunk(schedule, request, answer_id, {"role": "assistant", "content": ""}, False)
        yield Event(schedule.role_at_s, "role", 0, _with_usage(schedule, request, data, 0, False))
    begin = schedule.role_at_s or 0.0
    first = plan[0][0] if plan else schedule.first_token_s
    step = max(0.0, first - begin) / (schedule.num_empty_chunks + 1)
    for number in range(schedule.num_empty_chunks):
        data = _chunk(schedule, request, answer_id, {"content": ""}, False)
        data = _with_usage(schedule, request, data, 0, False)
        yield Event(begin + (number + 1) * step, "empty", 0, data)


def _closing(
    schedule: MockSchedule, request: MockRequest, answer_id: str, at: float, any_tokens: bool
) -> Iterator[Event]:
    total = num_completion_tokens(schedule, request)
    if schedule.finish == "own_chunk" or not any_tokens:
        data = _chunk(schedule, request, answer_id, {"content": ""}, True)
        yield Event(at, "finish", 0, _with_usage(schedule, request, data, total, True))
    if schedule.usage in ("asked", "continuous") and request.include_usage:
        data = _envelope(request, answer_id, [])
        yield Event(at, "usage", 0, data | {"usage": usage(schedule, request, total)})
    if schedule.end == "done":
        yield Event(at, "done", 0, "[DONE]")


def _field(schedule: MockSchedule, kind: Kind) -> str:
    return schedule.reasoning_field if kind == "reasoning" else "content"


def _envelope(request: MockRequest, answer_id: str, choices: list[Any]) -> dict[str, Any]:
    name = "chat.completion.chunk" if request.chat else "text_completion"
    return {"id": answer_id, "object": name, "created": 0, "model": "mock", "choices": choices}


def _chunk(
    schedule: MockSchedule,
    request: MockRequest,
    answer_id: str,
    delta: dict[str, str],
    last: bool,
) -> dict[str, Any]:
    reason = finish_reason(schedule, request) if last else None
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
    if request.chat:
        choice["delta"] = delta
    else:
        choice["text"] = delta["content"]
    data = _envelope(request, answer_id, [choice])
    if schedule.padding_bytes:
        data["padding"] = "x" * schedule.padding_bytes
    return data


def _with_usage(
    schedule: MockSchedule, request: MockRequest, data: dict[str, Any], sent: int, last: bool
) -> dict[str, Any]:
    continuous = schedule.usage == "continuous" or (
        schedule.usage == "asked" and request.include_usage and request.continuous_usage
    )
    if continuous or (schedule.usage == "finish_chunk" and last):
        return data | {"usage": usage(schedule, request, sent)}
    return data


def whole_answer(schedule: MockSchedule, request: MockRequest, answer_id: str) -> Event:
    """The one JSON object of an answer that is not streamed, due when its last token is."""
    plan = list(chunk_plan(schedule, request))
    total = num_completion_tokens(schedule, request)
    num_reasoning = min(schedule.num_reasoning_tokens, total)
    reasoning = token_texts(schedule, answer_id, range(num_reasoning))
    text = token_texts(schedule, answer_id, range(num_reasoning, total))
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason(schedule, request)}
    if request.chat:
        message = {"role": "assistant", "content": text}
        choice["message"] = (
            message | {schedule.reasoning_field: reasoning} if reasoning else message
        )
    else:
        choice["text"] = text
    data = _envelope(request, answer_id, [choice])
    data["object"] = "chat.completion" if request.chat else "text_completion"
    if schedule.usage != "missing":
        data["usage"] = usage(schedule, request, total)
    at = plan[-1][0] if plan else schedule.first_token_s
    return Event(at, "answer", total, data, reasoning + text)


def writes(schedule: MockSchedule, events: Sequence[Event]) -> Iterator[Write]:
    """The bytes of a stream, before HTTP's own framing, in the pieces in which they leave."""
    group: list[Event] = []
    payload = b""
    for number, event in enumerate(events, 1):
        payload += event_bytes(schedule, event)
        group.append(event)
        if len(group) == schedule.events_per_write or number == len(events):
            yield from _pieces(schedule, Write(group[-1].at_s, payload, tuple(group)))
            group, payload = [], b""


def event_bytes(schedule: MockSchedule, event: Event) -> bytes:
    """One event as `data: …` and an empty line, in UTF-8 as it is (no \\u escapes)."""
    if event.kind == "comment":
        return f": heartbeat{schedule.line_end * 2}".encode()
    data = event.data.encode() if isinstance(event.data, str) else msgspec.json.encode(event.data)
    end = schedule.line_end.encode()
    return b"data: " + data + end + end


def _pieces(schedule: MockSchedule, write: Write) -> Iterator[Write]:
    if schedule.piece_bytes is None:
        yield write
        return
    size = schedule.piece_bytes
    count = -(-len(write.payload) // size)
    for index in range(count):
        yield Write(
            write.at_s + index * schedule.piece_gap_s,
            write.payload[index * size : (index + 1) * size],
            write.completes if index == count - 1 else (),
        )
