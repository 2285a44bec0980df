"""A server in a thread with an event loop of its own: each answer is a script of bytes and pauses."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class ScriptedServer:
    """Counts what it was asked; `bodies` are in order of arrival."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    connections: int = 0


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: dict[str, Any]) -> bytes:
    return chunk(b"data: " + json.dumps(value).encode() + b"\n\n")


def text(token: str, finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"text": token, "finish_reason": finish}], **more})


async def tokens(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """One token a chunk, then usage and [DONE]."""
    number = body["max_tokens"]
    writer.write(HEAD)
    for index in range(number):
        writer.write(text("ab", "length" if index == number - 1 else None))
        await asyncio.sleep(0.001)
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": number}
    writer.write(event({"choices": [], "usage": usage}) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def plain(status: str, kind: str, content: bytes, head: str = "") -> Answer:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        lines = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n"
        writer.write((lines + head + "\r\n").encode() + content)

    return answer


def stream(*parts: bytes | float) -> Answer:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for part in parts:
            if isinstance(part, bytes):
                writer.write(part)
                await writer.drain()
            else:
                await asyncio.sleep(part)

    return answer


@contextmanager
def serving(answer: Answer) -> Iterator[ScriptedServer]:
    """A server on a free port of loopback, in a thread that is gone afterwards."""
    found = ScriptedServer("")
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET /v1/models"):
                    await plain("200 OK", "application/json", b'{"data":[{"id":"tiny"}]}')(
                        {}, writer
                    )
                    continue
                if head.startswith(b"GET"):
                    await plain("404 Not Found", "text/plain", b"no")({}, writer)
                    continue
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                found.heads.append(head)
                found.bodies.append(body)
                await answer(body, writer)
                if b"connection: close" in head.lower():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(connection, "127.0.0.1", 0)
        found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    started.wait()
    try:
        yield found
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
