"""The mock's HTTP/1.1: reads one request from a stream, writes heads. Nothing here is a general server.

Invariant: a request is read to its last byte or not at all.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

MAX_BODY_BYTES = 64 * 2**20


class MalformedRequest(ValueError):
    """A request the mock does not understand; str() is one line."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request; header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def wants_close(self) -> bool:
        return self.headers.get("connection", "").lower() == "close"

    def json_object(self) -> dict[str, Any]:
        """The body as a JSON object; MalformedRequest if it is none."""
        try:
            value = msgspec.json.decode(self.body)
        except msgspec.DecodeError as error:
            raise MalformedRequest(f"the body is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise MalformedRequest("the body is not a JSON object")
        return value


async def read_request(reader: asyncio.StreamReader) -> HttpRequest | None:
    """The next request, None when the client has closed. Raises MalformedRequest."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError:
        raise MalformedRequest("the head is too long") from None
    first, *lines = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3:
        raise MalformedRequest(f"not a request line: {first[:100]!r}")
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    path = parts[1].partition("?")[0]
    return HttpRequest(parts[0], path, headers, await _read_body(reader, headers))


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return await _read_chunks(reader)
    length = headers.get("content-length", "0")
    if not length.isdigit() or int(length) > MAX_BODY_BYTES:
        raise MalformedRequest(f"Content-Length is {length[:20]!r}")
    return await reader.readexactly(int(length))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        line = (await reader.readline()).partition(b";")[0].strip()
        try:
            size = int(line, 16)
        except ValueError:
            raise MalformedRequest(f"not a chunk size: {line[:20]!r}") from None
        if not 0 <= size <= MAX_BODY_BYTES - len(body):
            raise MalformedRequest("the body is too long")
        body += (await reader.readexactly(size + 2))[:size]
        if size == 0:
            return body


def head(status: int, headers: dict[str, str]) -> bytes:
    """Status line and headers, to the empty line."""
    lines = [f"HTTP/1.1 {status} {_phrase(status)}", *(f"{k}: {v}" for k, v in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
