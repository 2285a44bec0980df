"""An engine, a tokenizer and a chat template that fit in a screen each, for tests of the HTTP edge.

Tokens are bytes (0…255) and one control token (256, `<|end|>`). The engine's answer is `script`, or letters that depend on
prompt, seed, choice and position, so that equal requests have equal answers and others don't.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import prometheus_client
from starlette.applications import Starlette

from poise.config import ServerConfig
from poise.core.output import TokenLogprobs
from poise.core.tenant import NO_TENANTS, TenantTable
from poise.engine.client import (
    ChoiceDelta,
    Deliver,
    EngineInfo,
    EngineRequest,
    EngineStatus,
    ProfileReport,
    RequestDelta,
    RequestStats,
)
from poise.engine.secret import LocalSecret
from poise.errors import InvalidRequestError
from poise.server import bind_socket, create_app
from poise.server.public_prefix import NOTHING_PUBLIC, PublicPrefix
from poise.server.run import Server
from poise.server.tenants import Tenants

END = 256
VOCAB_SIZE = 257


class ByteTokenizer:
    """Byte by byte; `<|end|>` is one token. A chat has one line per message, `role: content`."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (END,)

    def __init__(self) -> None:
        self.num_encoded = 0

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special: bool = True
    ) -> list[int]:
        self.num_encoded += 1
        ids: list[int] = []
        for index, part in enumerate(text.split("<|end|>")):
            ids += [END] * (index > 0) + list(part.encode())
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        data = b"".join(
            self.token_bytes(token) for token in ids if not (skip_special_tokens and token == END)
        )
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"<|end|>" if token_id == END else bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("latin-1")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        if template_kwargs and "shout" not in template_kwargs:
            raise InvalidRequestError("chat_template_kwargs: only shout", "chat_template_kwargs")
        lines = []
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("content"), str):
                raise InvalidRequestError("messages: content must be text", "messages")
            lines.append(f"{message.get('role')}: {message['content']}")
        text = "\n".join(lines)
        if not continue_final_message:
            text += "\n"
        if add_generation_prompt:
            text += "assistant: "
        return list((text.upper() if template_kwargs else text).encode())


@dataclass
class FakeEngine:
    """EngineClient. `pace` is what a step waits for; `fail_after` steps raise `failure`."""

    max_model_len: int = 200
    kv_capacity_tokens: int = 10_000
    policy: str = "priority"
    script: Sequence[int] | None = None
    pace: Callable[[], Any] = lambda: asyncio.sleep(0)
    failure: Exception | None = None
    fail_after: int = 0
    error_choice: str | None = None
    is_ready: bool = True
    requests: list[EngineRequest] = field(default_factory=list)
    num_running: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_steps: int = 0
    closed: bool = False
    profiling: bool = False
    timelines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    tenants: TenantTable = NO_TENANTS

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            "fake-model",
            self.max_model_len,
            VOCAB_SIZE,
            self.kv_capacity_tokens,
            "fp_fake",
            {"scheduling_policy": self.policy},
        )

    def status(self) -> EngineStatus:
        reason = None if self.is_ready else "engine failed: on purpose"
        return EngineStatus(alive=self.is_ready, ready=self.is_ready, reason=reason)

    async def close(self) -> None:
        self.closed = True

    async def timeline(self, request_id: str) -> list[dict[str, Any]]:
        return list(self.timelines.get(request_id, ()))

    def cancel(self, request_id: str) -> None:
        self.cancelled.add(request_id)

    async def set_tenants(self, tenants: TenantTable) -> None:
        self.tenants = tenants

    async def start_profile(self) -> None:
        self.profiling = True

    async def stop_profile(self) -> ProfileReport:
        if not self.profiling:
            raise InvalidRequestError("no profile is running; start one first")
        self.profiling = False
        return ProfileReport({"steps": 3}, {"traceEvents": []})

    def submit(self, request: EngineRequest, deliver: Deliver) -> Callable[[], None]:
        self.requests.append(request)
        self.num_running += 1
        ended = False

        async def run() -> None:
            nonlocal ended
            try:
                async for delta in self._steps(request):
                    if delta.stats is not None:
                        ended = True
                        self.num_running -= 1
                        self.num_finished += 1
                    deliver(delta)
            except Exception as error:
                deliver(error)

        def leave() -> None:
            task.cancel()
            if not ended:
                self.num_running -= 1
                self.num_aborted += 1

        task = asyncio.ensure_future(run())
        return leave

    async def _steps(self, request: EngineRequest) -> AsyncIterator[RequestDelta]:
        params = request.params
        assert params.max_tokens is not None
        decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(params.n)]
        for step in range(params.max_tokens):
            await self.pace()
            self.num_steps += 1
            if self.failure is not None and step >= self.fail_after:
                raise self.failure
            ended = self.closed or request.request_id in self.cancelled
            last = step + 1 == params.max_tokens or ended
            choices = []
            for index, decoder in enumerate(decoders):
                token = self._token(request, index, step)
                text = decoder.decode(bytes([token]), last)
                logprobs = None
                if params.logprobs is not None:
                    logprobs = [self._logprobs(token, params.logprobs)]
                reason: str | None = "length" if last else None
                why: str | None = None
                if last and ended:
                    reason = "abort"
                if last and self.error_choice and index == 0:
                    reason, why = "error", self.error_choice
                choices.append(ChoiceDelta(index, text, (token,), logprobs, reason, why))
            stats = None
            if last:
                num = (step + 1) * params.n
                stats = RequestStats(len(request.prompt_token_ids), 3, num, 0.25, 0.5, 1.0)
            yield RequestDelta(
                request.request_id, choices, 3, self._of_prompt(request, step), stats
            )
            if last:
                return

    def _token(self, request: EngineRequest, choice: int, step: int) -> int:
        if self.script is not None:
            return self.script[step % len(self.script)]
        if request.params.temperature == 0:
            return 97 + (sum(request.prompt_token_ids) + step) % 26
        return 97 + (sum(request.prompt_token_ids) + request.seed + 3 * choice + step * step) % 26

    def _logprobs(self, token: int, width: int) -> TokenLogprobs:
        """The chosen token is third; the best are 65, 66, … ."""
        top = tuple((65 + rank, -0.5 - rank) for rank in range(width))
        return TokenLogprobs(token, -1.75 - token / 1024, 3, top)

    def _of_prompt(self, request: EngineRequest, step: int) -> list[TokenLogprobs | None] | None:
        width = request.params.prompt_logprobs
        if width is None or step > 0:
            return None
        return [None, *(self._logprobs(token, width) for token in request.prompt_token_ids[1:])]


def fake_app(
    engine: FakeEngine,
    *,
    heartbeat_seconds: float = 5.0,
    tenants: Tenants | None = None,
    public_prefix: PublicPrefix = NOTHING_PUBLIC,
    **config: Any,
) -> Starlette:
    """The app over a fake engine; `config` are fields of ServerConfig."""
    return create_app(
        engine,
        ByteTokenizer(),
        ServerConfig(**config),
        prometheus_client.CollectorRegistry(),
        version="9.9.9",
        heartbeat_seconds=heartbeat_seconds,
        tenants=tenants,
        public_prefix=public_prefix,
        secret=LocalSecret(b"secret of the tests"),
    )


def http_client(app: Starlette) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server")


def call(
    engine: FakeEngine, path: str, body: Any = None, *, method: str = "POST", **options: Any
) -> httpx.Response:
    """One request to a fresh app. A `body` of bytes is sent as it is, anything else as JSON."""
    headers = {"content-type": "application/json", **options.pop("headers", {})}
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()

    async def run() -> httpx.Response:
        async with http_client(fake_app(engine, **options)) as http:
            return await http.request(method, path, content=content, headers=headers)

    return asyncio.run(run())


def events(text: str) -> list[Any]:
    """The JSON of each SSE event; the closing one as "[DONE]"; comments left out."""
    data = [part[6:] for part in text.split("\n\n") if part.startswith("data: ")]
    return [part if part == "[DONE]" else json.loads(part) for part in data]


@contextlib.asynccontextmanager
async def real_server(app: Starlette, *, reloads: bool = False) -> AsyncIterator[str]:
    """uvicorn on a free port of the loopback, in this event loop; yields its URL."""
    bound = bind_socket("127.0.0.1", 0)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)  # a slow reader shows soon
    port = bound.getsockname()[1]
    started = asyncio.Event()
    made: asyncio.Future[Starlette] = asyncio.get_running_loop().create_future()
    made.set_result(app)
    server = Server(made, 0.0, started.set, reloads)
    task = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        await started.wait()
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()
        await task
