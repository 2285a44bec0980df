"""HTTP/1.1 from the client's side, as thin as a load generator needs: one exchange at a time on a connection.

Knows no OpenAI and no schedule. Invariants: bytes are stamped where the event loop hands them over, not when some task wakes up;
nothing is retried; a connection is used again only when its answer was complete and both sides want to keep it.
"""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections.abc import Callable
from time import perf_counter
from typing import cast
from urllib.parse import unquote, urlsplit

import httptools

CLOSED_EARLY = "the server closed the connection before it answered"
CLOSED_INSIDE = "the connection ended inside the answer"


class WireError(OSError):
    """The exchange broke; the message says where."""


class Exchange:
    """One request and what comes back. `on_body` sees each piece as it arrives and returns True when it has enough."""

    __slots__ = ("_on_body", "content_type", "done", "head_at", "last_at", "request", "status")

    def __init__(self, request: bytes, on_body: Callable[[bytes, float], bool]) -> None:
        self.request = request
        self.status = 0
        self.content_type = ""
        self.head_at: float | None = None
        """`perf_counter` when the answer's head was complete."""
        self.last_at = 0.0
        """`perf_counter` of the latest read."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_body = on_body

    def body(self, piece: bytes) -> None:
        if not self.done.done() and self._on_body(piece, self.last_at):
            self.finish()

    def finish(self, error: BaseException | None = None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class Connection(asyncio.Protocol):
    """A connection to the server. httptools calls the `on_…` methods."""

    def __init__(self, on_idle: Callable[[Connection], None] | None) -> None:
        self._on_idle = on_idle
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._has_length = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def begin(self, exchange: Exchange) -> None:
        """Sends the request of an exchange; the answers to earlier ones are complete."""
        assert self._transport is not None
        assert self._exchange is None
        self._exchange = exchange
        self._parser = httptools.HttpResponseParser(self)
        self._has_length = False
        self._transport.write(exchange.request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        exchange = self._exchange
        if exchange is None or self._parser is None:
            self.close()  # bytes nobody asked for
            return
        exchange.last_at = now
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            exchange.finish(WireError(f"the answer is not HTTP/1.1: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        exchange, self._exchange, self._transport = self._exchange, None, None
        self._parser = None  # it holds the connection
        if exchange is None:
            return
        if exchange.head_at is None:
            exchange.finish(WireError(CLOSED_EARLY))
        elif error is None and not self._has_length:
            exchange.last_at = perf_counter()
            exchange.finish()  # the end of the connection is the end of the answer
        else:
            exchange.finish(WireError(CLOSED_INSIDE))

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered == b"content-type" and self._exchange is not None:
            self._exchange.content_type = value.decode("latin-1").partition(";")[0].strip().lower()
        elif lowered in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        assert self._exchange is not None
        self._exchange.status = self._parser.get_status_code()
        if self._exchange.status >= 200:
            self._exchange.head_at = self._exchange.last_at

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.body(body)

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if exchange is None or exchange.status < 200:
            return  # an interim answer such as 100 Continue
        assert self._parser is not None
        keep = self._on_idle is not None and self._parser.should_keep_alive()
        self._exchange = None
        exchange.finish()
        if keep and self._on_idle is not None:
            self._on_idle(self)
        else:
            self.close()


class Wire:
    """Opens connections to one server and runs exchanges on them."""

    def __init__(self, base_url: str, *, reuse: bool) -> None:
        parts = urlsplit(base_url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._address = self._host
        self._reuse = reuse
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        name = f"[{self._host}]" if ":" in self._host else self._host
        self._fixed = f"Host: {name}:{self._port}\r\nAccept-Encoding: identity\r\n"
        self._fixed += f"Connection: {'keep-alive' if reuse else 'close'}\r\n"
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._fixed += f"Authorization: Basic {b64encode(pair.encode()).decode()}\r\n"

    async def resolve(self) -> None:
        """Looks the name up once, and keeps the first address that takes a connection; raises OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._host, self._port, type=1)
        failure: OSError | None = None
        for _, _, _, _, address in found:
            try:
                transport, _ = await loop.create_connection(
                    asyncio.Protocol, str(address[0]), self._port
                )
            except OSError as error:
                failure = error
                continue
            transport.close()
            self._address = str(address[0])
            return
        raise failure or WireError(f"no address for {self._host!r}")

    def head(self, method: str, path: str, headers: dict[str, str], length: int | None) -> bytes:
        """A request's head, ready to be sent."""
        lines = [f"{method} {self._prefix}{path} HTTP/1.1\r\n", self._fixed]
        lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
        if length is not None:
            lines.append(f"Content-Length: {length}\r\n")
        return ("".join(lines) + "\r\n").encode("latin-1")

    async def run(self, exchange: Exchange, timeout: float) -> None:
        """Sends the request and returns when the answer is complete or enough of it came.

        Raises OSError (WireError among them), and TimeoutError after `timeout` seconds in all.
        """
        loop = asyncio.get_running_loop()
        timer = loop.call_later(timeout, exchange.finish, TimeoutError())
        connection: Connection | None = None
        try:
            connection = await self._connection(timeout)
            connection.begin(exchange)
            await exchange.done
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        finally:
            timer.cancel()
            if connection is not None and not self._reuse:
                connection.close()
            if exchange.done.done() and not exchange.done.cancelled():
                exchange.done.exception()  # seen, whoever raised first

    async def _connection(self, timeout: float) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        opening = loop.create_connection(
            self._new_connection,
            self._address,
            self._port,
            ssl=self._tls,
            server_hostname=self._host if self._tls else None,
        )
        async with asyncio.timeout(timeout):
            _, connection = await opening
        if self._reuse:
            self._open = {known for known in self._open if known.is_open}
            self._open.add(connection)
        return connection

    def _new_connection(self) -> Connection:
        return Connection(self._idle.append if self._reuse else None)

    async def close(self) -> None:
        """Ends what is kept open, and lets the event loop see it."""
        for connection in self._open:
            connection.close()
        self._open.clear()
        self._idle.clear()
        await asyncio.sleep(0)
