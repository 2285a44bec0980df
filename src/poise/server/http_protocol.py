"""uvicorn's HTTP protocol with bounds (bytes and seconds of a request's head, seconds that a reader may stand still) and a
short way for the parts of a streamed answer.

Knows nothing of what is asked. Invariant: a connection that never completes a head costs MAX_HEAD_BYTES and HEAD_SECONDS
at most; one that takes nothing of its answer for STALLED_SECONDS is cut, which aborts the answer.
"""

from __future__ import annotations

import asyncio
import weakref

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from poise.server.http_errors import ErrorBody, encode_error

MAX_HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 30.0
STALLED_SECONDS = 300.0
PARTS = "poise.parts"  # name of the ASGI extension that holds a request's Parts


class Parts:
    """Writes parts of a streamed answer at once and from anywhere, where `send` is a chain of coroutines for a task."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        # Its scope leads here: only the garbage collector would free the two.
        self._cycle = weakref.proxy(cycle)

    @property
    def can_write(self) -> bool:
        """Whether a streamed answer has begun, has not ended, and its reader keeps up."""
        cycle: RequestResponseCycle = self._cycle
        return (
            cycle.chunked_encoding is True
            and not cycle.response_complete
            and not cycle.disconnected
            and not cycle.flow.write_paused
        )

    def write(self, body: bytes) -> None:
        """Writes a part, which isn't empty, while `can_write`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class BoundedHttpProtocol(HttpToolsProtocol):
    """Counts only while a head is incomplete; bodies have their own limit in `json_body`."""

    _num_head_bytes = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None
    _stalled_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_stalled_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_stalled_timer()
        self._stalled_timer = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_stalled_timer()
        super().resume_writing()

    def on_message_begin(self) -> None:
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_head_timer()
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # else it was no request
            self.scope["extensions"] = {PARTS: Parts(self.cycle)}  # type: ignore[dict-item]

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large", "The request's head is too large.")

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", msg)

    def _expect_head(self) -> None:
        self._stop_head_timer()
        self._in_head = True
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stalled_timer(self) -> None:
        if self._stalled_timer is not None:
            self._stalled_timer.cancel()
            self._stalled_timer = None

    def _refuse(self, status: bytes, message: str) -> None:
        body = encode_error(ErrorBody(message, "invalid_request_error", None, "invalid_http"))
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b" % (status, len(body), body)
        )
        self.transport.close()
