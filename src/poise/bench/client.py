"""The HTTP client under load: sends one planned request and stamps what comes back.

Knows no schedule and no statistics. Invariant: it never retries, never follows a redirect and never waits longer than its
timeout; whatever happens to a request ends in its row.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

from poise.bench.answer import DONE, Event, error_text, excerpt, fail, read_body, read_stream
from poise.bench.record import ClientOptions, RequestRow, ServerInfo
from poise.bench.schedule import PlannedRequest
from poise.bench.sse import EventParser
from poise.bench.wire import Exchange, Wire
from poise.errors import ConfigError, PoiseError

BODY_LIMIT_BYTES = 64 * 2**20
PROBE_TIMEOUT_S = 10.0


class ServerError(PoiseError):
    """The server can't be measured: unreachable, or its first answers are not OpenAI's."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send. The key never enters a record."""

    base_url: str
    endpoint: str
    model: str
    name: str = ""
    api_key: str | None = field(default=None, repr=False)

    def info(self) -> ServerInfo:
        shown = without_credentials(self.base_url)
        return ServerInfo(self.name or shown, shown, self.endpoint, self.model)

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def clean_base_url(text: str) -> str:
    """The address without a trailing slash or /v1; ConfigError names what is wrong with it."""
    parts = urlsplit(text)
    try:
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"--base-url {text!r}: not an address such as http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def without_credentials(url: str) -> str:
    """The address without user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def encode_body(
    request: PlannedRequest, model: str, options: ClientOptions, *, continuous_usage: bool
) -> bytes:
    """The request's JSON, encoded before the clock runs. `extra_body` has the last word."""
    is_chat = isinstance(request.prompt[0], dict)
    body: dict[str, Any] = {
        "model": model,
        "messages" if is_chat else "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": options.stream,
    }
    if request.ignore_eos:
        body["ignore_eos"] = True
    if options.stream:
        usage = {"include_usage": True}
        if continuous_usage:
            usage["continuous_usage_stats"] = True
        body["stream_options"] = usage
    body.update(options.extra_body)
    return msgspec.json.encode(body)


class LoadClient:
    """Sends requests to one server. Use it as an async context manager; `clock_zero` is a reading of `perf_counter`."""

    def __init__(
        self,
        target: Target,
        options: ClientOptions,
        *,
        keep_text: bool = False,
        clock_zero: float = 0.0,
    ) -> None:
        self.clock_zero = clock_zero
        self._target = target
        self._options = options
        self._keep_text = keep_text
        self._wire = Wire(target.base_url, reuse=options.reuse_connections)
        self._headers = target.headers()
        self._post_headers = {"Content-Type": "application/json", **self._headers}

    async def __aenter__(self) -> LoadClient:
        """Finds the server; raises ServerError where nothing listens."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._wire.resolve()
        except OSError as error:
            raise ServerError(
                f"{self._target.info().base_url}: {_connection_error(error)}"
            ) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._wire.close()

    async def send(self, body: bytes, row: RequestRow) -> None:
        """Sends one request and fills its row; raises nothing but cancellation, which the row knows too."""
        zero = self.clock_zero
        answer = _Answer(self._options.stream)
        head = self._wire.head("POST", self._target.endpoint, self._post_headers, len(body))
        exchange = Exchange(head + body, answer.take)
        answer.exchange = exchange
        row.sent = perf_counter() - zero
        failure: BaseException | None = None
        try:
            await self._wire.run(exchange, self._options.timeout_s)
        except (OSError, asyncio.CancelledError) as error:  # TimeoutError is an OSError
            failure = error
            exchange.last_at = perf_counter()
        row.end = exchange.last_at - zero
        row.http_status = exchange.status or None
        if exchange.head_at is not None:
            row.first_byte = exchange.head_at - zero
        self._fill(row, exchange, answer, complete=failure is None)
        if failure is not None:
            self._broken(row, answer, failure)
        answer.exchange = None  # each held the other
        if isinstance(failure, asyncio.CancelledError):
            raise failure

    def _fill(
        self, row: RequestRow, exchange: Exchange, answer: _Answer, *, complete: bool
    ) -> None:
        """Reads what came, once nothing more is to come."""
        if exchange.head_at is None:
            return
        if exchange.status != 200:
            fail(row, f"HTTP {exchange.status}: {_refusal(answer.body())}")
        elif answer.overflow:
            fail(row, f"the answer is larger than {BODY_LIMIT_BYTES} bytes")
        elif answer.is_stream:
            zero = self.clock_zero
            if complete and not answer.done:
                answer.finish()
            events = [(time - zero, data) for time, data in answer.events]
            read_stream(row, events, done=answer.done, keep_text=self._keep_text)
        elif self._options.stream:
            body = excerpt(answer.body())
            fail(row, f"a stream was asked for, {exchange.content_type or 'no type'} came: {body}")
        elif complete:
            row.streamed = False
            read_body(row, answer.body(), keep_text=self._keep_text)

    def _broken(self, row: RequestRow, answer: _Answer, failure: BaseException) -> None:
        """The class of an answer that did not come to its end; an error the server told of before stays."""
        if isinstance(failure, asyncio.CancelledError):
            row.status, row.error = "cancelled", "the run ended before the answer did"
        elif isinstance(failure, TimeoutError):
            row.status = "timeout"
            row.error = f"no end within {self._options.timeout_s:g} s"
        elif row.status != "error":
            row.status = "truncated" if answer.events else "error"
            row.error = _connection_error(failure)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET beside the load, within a bound of time; raises ServerError."""
        answer = _Answer(stream=False)
        exchange = Exchange(self._wire.head("GET", path, self._headers, None), answer.take)
        answer.exchange = exchange
        try:
            await self._wire.run(exchange, PROBE_TIMEOUT_S)
        except TimeoutError:
            reason = f"no answer within {PROBE_TIMEOUT_S:g} s"
        except OSError as error:
            reason = _connection_error(error)
        else:
            return exchange.status, answer.body()
        finally:
            answer.exchange = None
        raise ServerError(f"{self._target.info().base_url}: {reason}")


class _Answer:
    """Takes the pieces of one answer as they come: events of a stream with their instants, else the body."""

    __slots__ = (
        "_parts",
        "_size",
        "_stream",
        "_wants_stream",
        "done",
        "events",
        "exchange",
        "overflow",
    )

    def __init__(self, stream: bool) -> None:
        self.exchange: Exchange | None = None
        self.events: list[Event] = []
        self.done = False
        """`[DONE]` came."""
        self.overflow = False
        self._wants_stream = stream
        self._stream: EventParser | None = None
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def is_stream(self) -> bool:
        """An answer that says it is a stream is one, even before its first piece."""
        exchange = self.exchange
        assert exchange is not None
        return (
            self._wants_stream
            and exchange.status == 200
            and exchange.content_type == "text/event-stream"
        )

    def take(self, piece: bytes, now: float) -> bool:
        """True when the rest does not matter."""
        parser = self._stream
        if parser is None:
            if not self.is_stream:
                return self._keep(piece)
            parser = self._stream = EventParser()
        for data in parser.feed(piece):
            if data == DONE:
                self.done = True
                return True
            self.events.append((now, data))
        return False

    def finish(self) -> None:
        """The stream ended: what stands before its end without a blank line counts too."""
        if self._stream is None:
            return
        assert self.exchange is not None
        for data in self._stream.finish():
            if data == DONE:
                self.done = True
            else:
                self.events.append((self.exchange.last_at, data))

    def _keep(self, piece: bytes) -> bool:
        self._parts.append(piece)
        self._size += len(piece)
        self.overflow = self._size > BODY_LIMIT_BYTES
        return self.overflow

    def body(self) -> bytes:
        return b"".join(self._parts)


def _refusal(body: bytes) -> str:
    """The message in an error body, or its beginning."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError):
        return excerpt(body)
    if isinstance(decoded, dict) and decoded.get("error") is not None:
        return error_text(decoded["error"])
    return error_text(decoded)


def _connection_error(error: BaseException) -> str:
    """One line for a failure of the connection."""
    text = " ".join(str(error).split())
    return text or type(error).__name__


def default_model(status: int, body: bytes) -> str | None:
    """The first model that /v1/models names; None where the answer is not such a list."""
    try:
        listed = msgspec.json.decode(body) if status == 200 else {}
        name = listed["data"][0]["id"]
    except (msgspec.MsgspecError, ValueError, KeyError, IndexError, TypeError):
        return None
    return name if isinstance(name, str) else None
