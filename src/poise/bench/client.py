"""The HTTP client under load: sends one planned request and stamps what comes back.

Knows no schedule and no statistics. Invariant: it never retries, never follows a redirect and never waits longer than its
timeout; whatever happens to a request ends in its row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import msgspec

from poise.bench.answer import DONE, Event, error_text, excerpt, fail, read_body, read_stream
from poise.bench.record import ClientOptions, RequestRow, ServerInfo
from poise.bench.schedule import PlannedRequest
from poise.bench.sse import EventParser
from poise.errors import ConfigError, PoiseError

READ_BUFFER_BYTES = 2**20  # aiohttp's 64 KiB would make a slow client out of a long answer
ERROR_BODY_BYTES = 4096
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

    @property
    def url(self) -> str:
        return self.base_url + self.endpoint

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
    is_chat = isinstance(request.prompt, list) and isinstance(request.prompt[0], dict)
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
    """An aiohttp session set up not to stand in the way. Use it as an async context manager."""

    def __init__(
        self,
        target: Target,
        options: ClientOptions,
        *,
        keep_text: bool = False,
        clock_zero: float = 0.0,
    ) -> None:
        self.clock_zero = clock_zero
        self._url = target.url
        self._base_url = target.base_url
        self._options = options
        self._keep_text = keep_text
        self._headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            **target.headers(),
        }
        self._stack = AsyncExitStack()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> LoadClient:
        connector = aiohttp.TCPConnector(
            limit=0,
            force_close=not self._options.reuse_connections,
            ttl_dns_cache=3600,
        )
        self._session = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=self._options.timeout_s),
                read_bufsize=READ_BUFFER_BYTES,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the client is used outside its context"
        return self._session

    async def send(self, body: bytes, row: RequestRow) -> None:
        """Sends one request and fills its row; raises nothing but cancellation, which the row knows too."""
        zero = self.clock_zero
        events: list[Event] = []
        row.sent = perf_counter() - zero
        try:
            async with self.session.post(
                self._url, data=body, headers=self._headers, allow_redirects=False
            ) as response:
                row.first_byte = perf_counter() - zero
                row.http_status = response.status
                if response.status != 200:
                    await self._refused(response, row)
                elif self._options.stream:
                    await self._stream(response, row, events)
                else:
                    body = await _bounded(response)
                    row.end = perf_counter() - zero
                    row.streamed = False
                    read_body(row, body, keep_text=self._keep_text)
        except asyncio.CancelledError:
            self._interrupted(row, events)
            row.status, row.error = "cancelled", "the run ended before the answer did"
            raise
        except TimeoutError:
            self._interrupted(row, events)
            limit = self._options.timeout_s
            row.status, row.error = "timeout", f"no end within {limit:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._interrupted(row, events)
            row.status = "truncated" if events else "error"
            row.error = _connection_error(error)
        if row.end is None:
            row.end = perf_counter() - zero

    async def _stream(
        self, response: aiohttp.ClientResponse, row: RequestRow, events: list[Event]
    ) -> None:
        """Stamps each event with the instant its last byte was read; parses once the stream has ended."""
        if not response.content_type.startswith("text/event-stream"):
            start = await response.content.read(ERROR_BODY_BYTES)
            fail(row, f"a stream was asked for, {response.content_type} came: {excerpt(start)}")
            return
        zero = self.clock_zero
        content = response.content
        parser = EventParser()
        done = False
        while not done:
            read = await content.readany()
            now = perf_counter() - zero
            for data in parser.feed(read) if read else parser.finish():
                if data == DONE:
                    done = True
                    break
                events.append((now, data))
            if not read:
                break
        row.end = now
        if done and self._options.reuse_connections:
            while await content.readany():  # a connection is reusable once its answer is read
                pass
        read_stream(row, events, done=done, keep_text=self._keep_text)

    async def _refused(self, response: aiohttp.ClientResponse, row: RequestRow) -> None:
        start = await response.content.read(ERROR_BODY_BYTES)
        row.end = perf_counter() - self.clock_zero
        fail(row, f"HTTP {response.status}: {_refusal(start)}")

    def _interrupted(self, row: RequestRow, events: list[Event]) -> None:
        """Keeps what had come of a stream that will not end."""
        row.end = perf_counter() - self.clock_zero
        if events and row.first_event is None:
            read_stream(row, events, done=False, keep_text=self._keep_text)

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Status and body of a GET beside the load, within a bound of time; raises ServerError."""
        try:
            async with self.session.get(
                self._base_url + path,
                headers={**self._headers, **(headers or {})},
                timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S),
            ) as response:
                return response.status, await _bounded(response)
        except TimeoutError:
            raise ServerError(
                f"{without_credentials(self._base_url)}: no answer within {PROBE_TIMEOUT_S:g} s"
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ServerError(
                f"{without_credentials(self._base_url)}: {_connection_error(error)}"
            ) from None


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """The whole body, refused beyond a limit."""
    parts = []
    size = 0
    while part := await response.content.readany():
        size += len(part)
        if size > BODY_LIMIT_BYTES:
            raise ValueError(f"the answer is larger than {BODY_LIMIT_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


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
