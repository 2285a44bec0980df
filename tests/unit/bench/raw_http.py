"""A client of bytes for tests of the mock: what came over the socket, read by read, with nothing interpreted."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class RawAnswer:
    """`reads` are the pieces as they came; `ended` tells how: "closed" or "reset"."""

    reads: list[bytes]
    ended: str

    @property
    def status(self) -> int:
        return int(b"".join(self.reads).split(b" ", 2)[1])

    @property
    def head(self) -> str:
        return b"".join(self.reads).partition(b"\r\n\r\n")[0].decode()

    @property
    def http_chunks(self) -> list[bytes]:
        """The chunks of a chunked body; the empty last one included if it came."""
        rest = b"".join(self.reads).partition(b"\r\n\r\n")[2]
        chunks = []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            chunks.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        return chunks

    @property
    def body(self) -> bytes:
        if "chunked" in self.head:
            return b"".join(self.http_chunks)
        return b"".join(self.reads).partition(b"\r\n\r\n")[2]

    @property
    def data(self) -> list[Any]:
        """The events of a stream: JSON values, and "[DONE]"."""
        lines = self.body.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")
        values = [line[6:] for line in lines if line.startswith("data: ")]
        return [value if value == "[DONE]" else json.loads(value) for value in values]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    url: str,
    path: str,
    body: object | None = None,
    *,
    headers: str = "",
    stop_after: int | None = None,
) -> RawAnswer:
    """One request on its own connection; POST where there is a body. `stop_after` reads the client leaves."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    payload = (
        b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    )
    method = "GET" if body is None else "POST"
    length = f"Content-Length: {len(payload)}\r\n" if payload or method == "POST" else ""
    writer.write(
        f"{method} {path} HTTP/1.1\r\nHost: mock\r\nConnection: close\r\n{length}{headers}\r\n".encode()
        + payload
    )
    reads: list[bytes] = []
    ended = "closed"
    try:
        while stop_after is None or len(reads) < stop_after:
            piece = await reader.read(2**20)
            if not piece:
                break
            reads.append(piece)
    except ConnectionResetError:
        ended = "reset"
    writer.close()
    return RawAnswer(reads, ended)
