"""Runs one valid request and writes its answer: the ASGI half of `/v1/completions` and `/v1/chat/completions`.

Invariant: whatever ends it (last token, engine error, client gone, cancellation), the engine's work for it has ended
when `__call__` returns, and exactly one log line is written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from poise.engine.client import ChoiceDelta, RequestDelta
from poise.errors import DeadlineError, PoiseError, QueueFullError
from poise.server.arrivals import Arrivals, Receive, join_choice
from poise.server.formats import (
    ChatFormat,
    CompletionFormat,
    Format,
    Tally,
    asked_prompt_logprobs,
)
from poise.server.http_errors import ClientGoneError, describe, encode_error, printable
from poise.server.http_protocol import PARTS, Parts
from poise.server.limits import Ticket
from poise.server.protocol import Answer
from poise.server.state import ServerState
from poise.server.valid_request import ValidRequest

logger = logging.getLogger("poise.server")

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

HEARTBEAT = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class Generation:
    """An answer in the making; starlette calls it like any response."""

    def __init__(
        self,
        state: ServerState,
        request: ValidRequest,
        ticket: Ticket,
        *,
        chat: bool,
        client_id: str | None,
    ) -> None:
        """`ticket` is closed when the answer has ended, however it ends."""
        self._state = state
        self._request = request
        self._ticket = ticket
        self._chat = chat
        self._client_id = client_id
        self._tally = Tally(request)
        self._created = int(time.time())
        self._response_started = False
        names = state.token_names
        self._format: Format
        if chat:
            self._format = ChatFormat(request, names)
        else:
            self._format = CompletionFormat(request, self._tally, names, state.tokenizer)

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        begin = time.monotonic()
        outcome: str | None = "error"
        refused = False  # by the engine, before it made anything
        try:
            with self._state.answering():
                async with Arrivals(
                    self._state.client,
                    self._request.engine_requests(),
                    receive,
                    self._state.heartbeat_seconds,
                ) as arrivals:
                    with self._booked():
                        if self._request.stream:
                            parts = scope.get("extensions", {}).get(PARTS)
                            await self._stream(arrivals, send, parts)
                        else:
                            await self._whole(arrivals, send)
            outcome = None
        except ClientGoneError:
            outcome = "disconnect"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except (QueueFullError, DeadlineError) as error:
            if self._response_started:
                await self._fail(error, send)
            else:
                outcome = error.reason
                refused = True
                raise
        except Exception as error:
            if not self._response_started:
                raise  # the app answers it by its status
            await self._fail(error, send)
        finally:
            self._settle(refused)
            total = time.monotonic() - begin
            self._state.request_log.finished(
                self._request.request_id, self._client_id, self._tally, total, outcome
            )

    def _settle(self, refused: bool) -> None:
        """Counts and pays for what was made, and gives the caller's place back."""
        tenant = self._ticket.caller.name
        if refused:
            self._state.usage.refused(tenant)
            self._ticket.give_back()
        else:
            self._state.usage.answered(tenant, self._tally)
            self._ticket.charge_answer(self._tally.num_output_tokens)
        self._ticket.close()

    def _booked(self) -> AbstractContextManager[object]:
        request, tenant = self._request, self._ticket.caller.name
        return self._state.requests.running(
            tenant, request.request_id, self._client_id, request.engine_ids
        )

    async def _whole(self, arrivals: Arrivals, send: Send) -> None:
        collected: dict[int, list[ChoiceDelta]] = {}
        while (arrived := await arrivals.take()) is not None:
            for prompt_index, delta in arrived:
                for index, choice in self._tally.note(prompt_index, delta):
                    collected.setdefault(index, []).append(choice)
        n = self._request.num_choices
        choices: list[Any] = [
            self._format.whole(index // n, index, join_choice(collected[index]))
            for index in sorted(collected)
        ]
        info = self._state.client.info
        answer = Answer(
            self._request.request_id,
            self._format.object,
            self._created,
            info.model,
            info.system_fingerprint,
            choices,
            self._tally.usage(),
        )
        if self._chat and self._request.return_token_ids:
            answer.prompt_token_ids = self._request.prompts[0].token_ids
        if self._chat and self._request.prompt_logprobs is not None:
            answer.prompt_logprobs = asked_prompt_logprobs(
                self._request, self._tally, 0, self._state.token_names
            )
        body = _encode(answer)
        length = (b"content-length", str(len(body)).encode())
        await self._start(send, [(b"content-type", b"application/json"), length])
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, arrivals: Arrivals, send: Send, parts: Parts | None) -> None:
        """Writes one body chunk for all that a step brought, by `parts` where the server has them and the reader keeps up.

        The response starts with the first delta (or heartbeat), so that an error before it still has its own status.
        """
        head, tail = self._frame()
        opening = self._opening(head, tail)
        if parts is not None:
            arrivals.pass_on(partial(self._write_at_once, parts, head, tail))
        while (arrived := await arrivals.take()) is not None:
            if not self._response_started:
                await self._start_stream(send)
                await _send_part(send, opening + (self._events(arrived, head, tail) or HEARTBEAT))
            elif not arrived:
                await _send_part(send, HEARTBEAT)
            elif events := self._events(arrived, head, tail):
                await _send_part(send, events)
        if not self._response_started:
            await self._start_stream(send)
        end = DONE
        if self._request.include_usage:
            end = head + b'],"usage":' + _encode(self._tally.usage()) + b"}\n\n" + DONE
        await send({"type": "http.response.body", "body": end})

    def _write_at_once(self, parts: Parts, head: bytes, tail: bytes, delta: RequestDelta) -> bool:
        """Writes what a delta of the only prompt says, if that can be done now."""
        if not parts.can_write:
            return False
        if events := self._events([(0, delta)], head, tail):
            parts.write(events)
        return True

    def _frame(self) -> tuple[bytes, bytes]:
        """The constant bytes before and after a chunk's one choice."""
        info = self._state.client.info
        fields = {
            "id": self._request.request_id,
            "object": self._format.chunk_object,
            "created": self._created,
            "model": info.model,
            "system_fingerprint": info.system_fingerprint,
        }
        head = b"data: " + _encode(fields)[:-1] + b',"choices":['
        tail = b'],"usage":null}\n\n' if self._request.include_usage else b"]}\n\n"
        return head, tail

    def _opening(self, head: bytes, tail: bytes) -> bytes:
        if self._chat and self._request.return_token_ids:
            tail = b'],"prompt_token_ids":' + _encode(self._request.prompts[0].token_ids) + tail[1:]
        return b"".join(head + _encode(choice) + tail for choice in self._format.opening())

    def _events(self, arrived: list[tuple[int, RequestDelta]], head: bytes, tail: bytes) -> bytes:
        parts: list[bytes] = []
        for prompt_index, delta in arrived:
            for index, choice in self._tally.note(prompt_index, delta):
                chunk: Struct = self._format.chunk(prompt_index, index, choice)
                parts += (head, _encode(chunk), self._tail(tail))
        return b"".join(parts)

    def _tail(self, tail: bytes) -> bytes:
        if not self._request.continuous_usage:
            return tail
        return b'],"usage":' + _encode(self._tally.usage()) + b"}\n\n"

    async def _start_stream(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._start(send, headers)

    async def _start(self, send: Send, headers: Headers) -> None:
        self._response_started = True
        headers.append((b"x-poise-seed", str(self._request.seed).encode()))
        headers += warning_headers(self._request.dropped)
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _fail(self, error: Exception, send: Send) -> None:
        """Tells the client of a stream that has begun: an event with the error, and no [DONE]."""
        if not isinstance(error, PoiseError):
            logger.exception("request %s failed", self._request.request_id)
        _, body = describe(error)
        event = b"data: " + encode_error(body) + b"\n\n"
        await send({"type": "http.response.body", "body": event})


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def warning_headers(dropped: Sequence[str]) -> Headers:
    """One Warning header per parameter that was dropped."""
    return [
        (b"warning", f'299 poise "unknown parameter {printable(name)} was dropped"'.encode())
        for name in dropped
    ]
