"""A server on the loopback that follows its schedules to the byte and writes down when it really did what.

Owns its own small HTTP/1.1, since a library would not let it misbehave; knows nothing of the client it tests. Invariant:
every write is due at an instant counted from the request's admission, so delays do not add up, and what is recorded is the
`perf_counter` of the write itself, comparable with a client on the same machine.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import deque
from dataclasses import dataclass
from hashlib import sha256
from time import perf_counter
from types import TracebackType
from typing import Any

import msgspec

from poise.bench import mock_schedule as plans
from poise.bench.mock_http import HttpRequest, MalformedRequest, head, read_request
from poise.bench.mock_metrics import MockMetrics, PrefixCache
from poise.bench.mock_schedule import MockProfile, MockRequest, MockSchedule, Write
from poise.errors import ConfigError

MAX_SERVED = 20_000
ANSWER_PATHS = {"/v1/completions": False, "/v1/chat/completions": True}
LAST_CHUNK = b"0\r\n\r\n"


class ServedEvent(msgspec.Struct, frozen=True):
    """One event as it happened; `written` is the perf_counter just before its last byte was handed to the socket."""

    kind: plans.Kind
    num_tokens: int
    planned: float
    written: float
    text: str = ""


class Served(msgspec.Struct):
    """One request as it was answered. All times are perf_counter seconds."""

    index: int
    answer_id: str
    stream: bool
    arrived: float
    """When its last byte had been read."""
    admitted: float
    """When a slot was free: the schedule's zero."""
    prompt_tokens: int
    cached_tokens: int
    max_tokens: int
    completion_tokens: int
    """Of a full answer, as usage reports it; the events tell what was sent."""
    events: list[ServedEvent] = []
    finished: float | None = None
    outcome: str = "running"
    """The schedule's end, "status NNN", or "client left"."""

    @property
    def text_sha256(self) -> str:
        """Of the answer's text, reasoning not included, as far as it was sent."""
        text = "".join(event.text for event in self.events if event.kind != "reasoning")
        return sha256(text.encode()).hexdigest()


@dataclass(slots=True)
class Connection:
    """One client's two streams."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def left(self) -> bool:
        return self.writer.is_closing() or self.reader.at_eof()

    def send(self, payload: bytes) -> None:
        if self.left:
            raise ConnectionResetError
        self.writer.write(payload)

    def reset(self) -> None:
        """Closes with RST: what the client has not read yet is lost."""
        underlying = self.writer.get_extra_info("socket")
        underlying.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class MockServer:
    """Serves `profile`; a request's own `mock` field (an object) changes single parts of its schedule.

        async with MockServer(profile) as mock:
            ... mock.url, mock.served

    `served` holds the latest 20,000 requests in order of arrival; GET /mock/served gives them as JSON.
    """

    def __init__(self, profile: MockProfile | None = None, port: int = 0) -> None:
        self.profile = profile or MockProfile()
        self.served: deque[Served] = deque(maxlen=MAX_SERVED)
        self.metrics = MockMetrics(self.profile.model)
        self._prefix_cache = PrefixCache() if self.profile.prefix_cache else None
        self._slots = asyncio.Semaphore(self.profile.slots or 2**31)
        self.port = port
        self.num_arrived = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listens; ConfigError when the port is taken."""
        try:
            self._server = await asyncio.start_server(
                self._converse, "127.0.0.1", self.port, backlog=4096
            )
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"port {self.port} on 127.0.0.1: {error}; choose another with --port"
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stops listening and drops every connection."""
        assert self._server is not None
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    async def __aenter__(self) -> MockServer:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        connection = Connection(reader, writer)
        try:
            while await self._next_request(connection):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has left or the server is closing
        finally:
            self._connections.discard(task)
            writer.close()

    async def _next_request(self, connection: Connection) -> bool:
        """Answers one request; False when the connection must close after it."""
        try:
            request = await read_request(connection.reader)
        except MalformedRequest as error:
            _send_json(connection, 400, _error(str(error), 400))
            return False
        if request is None:
            return False
        if (request.method, request.path) == ("POST", "/mock/reset"):
            self.served.clear()
            _send_json(connection, 200, {})
        elif request.method == "GET":
            self._send_page(connection, request.path)
        elif request.method == "POST" and request.path in ANSWER_PATHS:
            return await self._answer(connection, request) and not request.wants_close
        else:
            message = f"the mock has no {request.method} {request.path}"
            _send_json(connection, 404, _error(message, 404))
        await connection.writer.drain()
        return not request.wants_close

    def _send_page(self, connection: Connection, path: str) -> None:
        if path == "/health":
            _send(connection, 200, "text/plain", b"")
        elif path == "/v1/models":
            model = {"id": self.profile.model, "object": "model", "owned_by": "poise"}
            _send_json(connection, 200, {"object": "list", "data": [model]})
        elif path == "/metrics" and self.profile.metrics:
            _send(connection, 200, "text/plain; version=0.0.4", self.metrics.page())
        elif path == "/mock/served":
            _send(connection, 200, "application/json", msgspec.json.encode(list(self.served)))
        else:
            _send_json(connection, 404, _error(f"the mock has no GET {path}", 404))

    async def _answer(self, connection: Connection, http: HttpRequest) -> bool:
        """Answers one generation; True when the connection may serve another request."""
        arrived = perf_counter()
        index = self.num_arrived
        self.num_arrived += 1
        schedules = self.profile.schedules
        try:
            schedule, request = understand(http, schedules[index % len(schedules)])
        except (MalformedRequest, plans.ScheduleMismatch) as error:
            _send_json(connection, 400, _error(str(error), 400))
            return True
        if self._prefix_cache is not None:
            request = self._prefix_cache.look_up(request)
        served = Served(
            index=index,
            answer_id=f"mock-{index}",
            stream=request.stream,
            arrived=arrived,
            admitted=arrived,
            prompt_tokens=plans.prompt_tokens(schedule, request),
            cached_tokens=plans.cached_tokens(schedule, request),
            max_tokens=request.max_tokens,
            completion_tokens=plans.num_completion_tokens(schedule, request),
        )
        self.served.append(served)
        self.metrics.num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.metrics.num_waiting -= 1
        self.metrics.admit(served.prompt_tokens, served.cached_tokens)
        try:
            if self.profile.slots is not None:
                served.admitted = perf_counter()
            return await Answering(connection, schedule, request, served, self.metrics).run()
        except ConnectionError:
            served.outcome = "client left"
            raise
        finally:
            served.finished = perf_counter()
            self._slots.release()
            whole = served.outcome in ("done", "no_done")
            self.metrics.finish(plans.finish_reason(schedule, request) if whole else "abort")


@dataclass(slots=True)
class Answering:
    """One answer being given: `run` sends what the schedule says at the instants it says."""

    connection: Connection
    schedule: MockSchedule
    request: MockRequest
    served: Served
    metrics: MockMetrics

    async def run(self) -> bool:
        """True when the connection can be used again."""
        schedule = self.schedule
        if schedule.status != 200:
            await self._wait(schedule.first_token_s)
            _send_json(
                self.connection,
                schedule.status,
                _error(f"the mock answers {schedule.status}", schedule.status),
            )
            self.served.outcome = f"status {schedule.status}"
            return True
        if schedule.answer == "html":
            await self._wait(schedule.first_token_s)
            _send(self.connection, 200, "text/html", b"<html><body>a proxy's page</body></html>")
            self.served.outcome = "html"
            return True
        if self.request.stream and schedule.answer == "as_asked":
            return await self._stream()
        return await self._whole()

    async def _whole(self) -> bool:
        event = plans.whole_answer(self.schedule, self.request, self.served.answer_id)
        await self._wait(event.at_s)
        self._record(Write(event.at_s, b"", (event,)))
        _send_json(self.connection, 200, event.data)
        self.served.outcome = "done"
        return True

    async def _stream(self) -> bool:
        schedule = self.schedule
        events = plans.timeline(schedule, self.request, self.served.answer_id)
        lines = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}
        self.connection.send(head(200, lines))
        for write in plans.writes(schedule, events):
            await self._wait(write.at_s)
            self._record(write)
            self.connection.send(b"%x\r\n%b\r\n" % (len(write.payload), write.payload))
            await self.connection.writer.drain()
        self.served.outcome = schedule.end
        if schedule.end == "stall":
            await self.connection.reader.read()  # until the client gives up
        elif schedule.end == "reset":
            self.connection.reset()
        elif schedule.end != "cut":
            self.connection.send(LAST_CHUNK)
            return True
        return False

    async def _wait(self, at_s: float) -> None:
        due = self.served.admitted + at_s
        while (left := due - perf_counter()) > 0:  # an event loop may wake early
            await asyncio.sleep(left)
        if self.connection.left:
            raise ConnectionResetError

    def _record(self, write: Write) -> None:
        now = perf_counter()
        for event in write.completes:
            self.metrics.generation_tokens += event.num_tokens
            planned = self.served.admitted + event.at_s
            self.served.events.append(
                ServedEvent(event.kind, event.num_tokens, planned, now, event.text)
            )


def understand(http: HttpRequest, schedule: MockSchedule) -> tuple[MockSchedule, MockRequest]:
    """The schedule with the request's own changes, and the request; MalformedRequest or ScheduleMismatch."""
    chat = ANSWER_PATHS[http.path]
    body = http.json_object()
    options = body.get("stream_options") or {}
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if not (limit is None or (isinstance(limit, int) and 0 < limit <= 1_000_000)):
        raise MalformedRequest(f"max_tokens is {limit!r}, expected 1 to 1000000")
    changes = body.get("mock") or {}
    if not isinstance(changes, dict):
        raise MalformedRequest(f"mock is {changes!r}, expected an object")
    request = MockRequest(
        chat=chat,
        stream=bool(body.get("stream", False)),
        max_tokens=plans.DEFAULT_NUM_TOKENS if limit is None else limit,
        include_usage=bool(options.get("include_usage", False)),
        continuous_usage=bool(options.get("continuous_usage_stats", False)),
        prompt=_prompt_of(body, chat),
    )
    if changes:
        try:
            schedule = msgspec.convert(msgspec.to_builtins(schedule) | changes, MockSchedule)
        except msgspec.ValidationError as error:
            raise MalformedRequest(f"mock: {error}") from None
    plans.check(schedule, request)
    return schedule, request


def _prompt_of(body: dict[str, Any], chat: bool) -> tuple[Any, ...]:
    """Token ids as they are; text as its words."""
    if chat:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise MalformedRequest("messages is missing or empty")
        return tuple(word for message in messages for word in str(message).split())
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return tuple(prompt)
    if isinstance(prompt, str) and prompt:
        return tuple(prompt.split())
    raise MalformedRequest("prompt is neither a text nor a list of token ids")


def _error(message: str, status: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": "mock_error", "param": None, "code": status}}


def _send_json(connection: Connection, status: int, value: Any) -> None:
    _send(connection, status, "application/json", json.dumps(value, ensure_ascii=False).encode())


def _send(connection: Connection, status: int, content_type: str, body: bytes) -> None:
    lines = {"Content-Type": content_type, "Content-Length": str(len(body))}
    if status in (429, 503):
        lines["Retry-After"] = "1"
    connection.send(head(status, lines) + body)
