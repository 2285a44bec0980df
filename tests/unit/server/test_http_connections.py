"""Over a real socket: hanging up aborts, slow readers cost nobody, heartbeats, draining, and the openai client."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from fake_server_engine import FakeEngine, events, fake_app, real_server
from starlette.applications import Starlette

from poise.engine.client import ChoiceDelta
from poise.errors import EngineDeadError
from poise.server.formats import CompletionFormat
from poise.server.http_protocol import Parts


def over_socket(app: Starlette, scenario: Callable[[str], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with real_server(app) as url:
            return await scenario(url)

    return asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def open_request(url: str, body: dict[str, Any]) -> asyncio.StreamWriter:
    """Sends a completion request over a bare connection, which the writer closes."""
    port = int(url.rsplit(":", 1)[1])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    await writer.drain()
    return writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
def test_hanging_up_aborts(stream: bool, prompt: Any) -> None:
    never = asyncio.Event()
    num_prompts = len(prompt)

    async def scenario(url: str) -> None:
        writer = await open_request(url, {"prompt": prompt, "stream": stream})
        await until(lambda: engine.num_running == num_prompts)
        writer.close()
        await until(lambda: engine.num_aborted == num_prompts)
        assert engine.num_running == 0

    engine = FakeEngine(pace=never.wait)
    over_socket(fake_app(engine), scenario)


def test_random_hang_ups_leave_nothing_behind() -> None:
    """300 connections dropped anywhere: in the headers, the body, before the first token, in the midst, at the end."""
    rng = random.Random(5)
    engine = FakeEngine(pace=lambda: asyncio.sleep(0.001))
    app = fake_app(engine)

    async def one(url: str) -> None:
        stream = rng.random() < 0.5
        body = {"prompt": ["a"] * rng.randint(1, 2), "stream": stream, "max_tokens": 20}
        content = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        sent = head + b"Content-Length: %d\r\n\r\n" % len(content) + content
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(sent[: rng.randrange(len(sent))] if rng.random() < 0.2 else sent)
        await asyncio.sleep(rng.random() * 0.04)
        if rng.random() < 0.5:
            writer.transport.abort()
        writer.close()

    async def scenario(url: str) -> None:
        for _ in range(6):
            await asyncio.gather(*(one(url) for _ in range(50)))
        await until(lambda: engine.num_running == 0 and app.state.server.num_answering == 0)
        async with httpx.AsyncClient(base_url=url) as http:
            response = await http.post("/v1/completions", json={"prompt": "a"})
            assert response.status_code == 200

    over_socket(app, scenario)
    assert engine.num_aborted > 20
    assert engine.num_aborted + engine.num_finished == len(engine.requests)


def test_a_slow_reader_holds_up_nobody_and_misses_nothing() -> None:
    num_tokens = 10_000
    engine = FakeEngine(max_model_len=30_000, kv_capacity_tokens=30_000)
    body = {
        "prompt": "a", "stream": True, "max_tokens": num_tokens, "temperature": 0, "return_token_ids": True,
    }  # fmt: skip

    async def scenario(url: str) -> str:
        async with (
            httpx.AsyncClient(base_url=url) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            # Nothing is read until the engine is done: far more than the socket's buffers hold.
            await until(lambda: engine.num_finished == 1)
            other = await http.post("/v1/completions", json={"prompt": "b"})
            assert other.status_code == 200
            return (await response.aread()).decode()

    chunks = events(over_socket(fake_app(engine), scenario))
    assert chunks[-1] == "[DONE]"
    ids = [token for chunk in chunks[:-1] for token in chunk["choices"][0]["token_ids"]]
    assert ids == tokens_of_a(num_tokens)
    assert len(chunks) < num_tokens  # what waited was joined


def tokens_of_a(num_tokens: int) -> list[int]:
    """The fake engine's answer to the prompt "a" at temperature 0."""
    return [97 + (97 + step) % 26 for step in range(num_tokens)]


@pytest.fixture
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every part of an answer that is written past the chain of `send`s."""
    parts: list[bytes] = []
    write = Parts.write
    monkeypatch.setattr(Parts, "write", lambda self, body: (parts.append(body), write(self, body)))
    return parts


def test_a_reader_in_fits_and_starts_has_all_tokens_in_order(written_at_once: list[bytes]) -> None:
    num_tokens = 12_000
    engine = FakeEngine(max_model_len=30_000, kv_capacity_tokens=30_000)
    body = {
        "prompt": "a", "stream": True, "max_tokens": num_tokens, "temperature": 0, "return_token_ids": True,
    }  # fmt: skip
    rng = random.Random(3)

    async def scenario(url: str) -> bytes:
        parts = []
        async with (
            httpx.AsyncClient(base_url=url) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            async for part in response.aiter_raw():
                parts.append(part)
                if rng.random() < 0.02:
                    goal = min(engine.num_steps + 2_000, num_tokens)
                    await until(lambda goal=goal: engine.num_steps >= goal)
        return b"".join(parts)

    text = over_socket(fake_app(engine), scenario).decode()
    chunks = events(text)
    assert chunks[-1] == "[DONE]"
    tokens = [chunk["choices"][0]["token_ids"] for chunk in chunks[:-1]]
    assert [token for some in tokens for token in some] == tokens_of_a(num_tokens)
    assert max(map(len, tokens)) > 1  # some had to wait,
    assert len(written_at_once) > 100  # and some had not


def test_a_stream_whose_reader_keeps_up_is_written_at_once(written_at_once: list[bytes]) -> None:
    engine = FakeEngine(pace=lambda: asyncio.sleep(0.01))
    body = {"prompt": "a", "n": 2, "stream": True, "max_tokens": 8, "temperature": 0}

    async def scenario(url: str) -> str:
        async with httpx.AsyncClient(base_url=url) as http:
            return (await http.post("/v1/completions", json=body)).text

    chunks = events(over_socket(fake_app(engine), scenario))
    text = bytes(tokens_of_a(8)).decode()
    for index in range(2):
        mine = [c["choices"][0]["text"] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert "".join(mine) == text
    assert len(written_at_once) == 8 - 2  # the first begins the answer, the last ends it


def test_an_answer_that_cant_be_written_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(pace=lambda: asyncio.sleep(0.01))
    chunk = CompletionFormat.chunk

    def broken(self: Any, prompt_index: int, index: int, delta: ChoiceDelta) -> Any:
        if delta.text == chr(tokens_of_a(4)[3]):
            raise RuntimeError("on purpose")
        return chunk(self, prompt_index, index, delta)

    monkeypatch.setattr(CompletionFormat, "chunk", broken)

    async def scenario(url: str) -> list[str]:
        async with httpx.AsyncClient(base_url=url) as http:
            bodies = [
                {"prompt": prompt, "stream": True, "max_tokens": 8, "temperature": 0}
                for prompt in ("a", "m")  # the other's letters never meet the broken one
            ]
            answers = await asyncio.gather(
                *(http.post("/v1/completions", json=body) for body in bodies)
            )
            return [answer.text for answer in answers]

    failed, whole = (events(text) for text in over_socket(fake_app(engine), scenario))
    assert [c["choices"][0]["text"] for c in failed[:-1]] == [chr(t) for t in tokens_of_a(3)]
    assert failed[-1]["error"]["code"] == "internal_error"
    assert len(whole) == 8 + 1
    assert whole[-1] == "[DONE]"
    assert (engine.num_running, engine.num_aborted, engine.num_finished) == (0, 1, 1)


def test_heartbeats_while_a_stream_waits() -> None:
    engine = FakeEngine(pace=lambda: asyncio.sleep(0.12))

    async def scenario(url: str) -> str:
        async with httpx.AsyncClient(base_url=url) as http:
            body = {"prompt": "a", "stream": True, "max_tokens": 3}
            return (await http.post("/v1/completions", json=body)).text

    text = over_socket(fake_app(engine, heartbeat_seconds=0.03), scenario)
    assert text.startswith(": waiting\n\n")
    assert text.count(": waiting\n\n") >= 6
    assert events(text)[-1] == "[DONE]"
    assert len(events(text)) == 4


def test_one_body_chunk_per_step() -> None:
    engine = FakeEngine(pace=lambda: asyncio.sleep(0.01))

    async def scenario(url: str) -> list[bytes]:
        body = {"prompt": ["a", "b"], "n": 3, "stream": True, "max_tokens": 4}
        async with (
            httpx.AsyncClient(base_url=url) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            return [part async for part in response.aiter_raw()]

    parts = over_socket(fake_app(engine), scenario)
    assert len(events(b"".join(parts).decode())) == 2 * 3 * 4 + 1
    assert len(parts) <= 2 * 4 + 1


def test_draining_refuses_with_the_reason() -> None:
    engine = FakeEngine()
    app = fake_app(engine)

    async def scenario(url: str) -> None:
        async with httpx.AsyncClient(base_url=url) as http:
            assert (await http.get("/ready")).status_code == 200
            app.state.server.draining = True
            for response in (
                await http.get("/ready"),
                await http.post("/v1/completions", json={"prompt": "a"}),
            ):
                assert response.status_code == 503
                assert "draining" in response.json()["error"]["message"]
                assert response.headers["retry-after"] == "1"
            assert (await http.get("/health")).status_code == 200

    over_socket(app, scenario)
    assert engine.closed


def test_stopping_ends_running_answers_with_abort() -> None:
    engine = FakeEngine(pace=lambda: asyncio.sleep(0.01), max_model_len=60_000)
    engine.kv_capacity_tokens = 60_000

    async def run() -> str:
        async with httpx.AsyncClient() as http:
            async with real_server(fake_app(engine)) as url:
                body = {"prompt": "a", "stream": True, "max_tokens": 50_000}
                request = asyncio.create_task(http.post(f"{url}/v1/completions", json=body))
                await until(lambda: engine.num_steps > 2)
            return (await request).text

    chunks = events(asyncio.run(run()))
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"][0]["finish_reason"] == "abort"


def test_openai_client() -> None:
    engine = FakeEngine()

    async def scenario(url: str) -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        models = await client.models.list()
        assert [model.id for model in models.data] == ["fake-model"]
        assert (await client.models.retrieve("fake-model")).id == "fake-model"
        chat: Any = {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}]}
        whole = await client.chat.completions.create(**chat, max_tokens=5, seed=2)
        assert whole.usage.prompt_tokens_details.cached_tokens == 3
        text = ""
        usage: Any = None
        stream = await client.chat.completions.create(
            **chat, max_tokens=5, seed=2, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            usage = chunk.usage or usage
        assert text == whole.choices[0].message.content
        assert usage.completion_tokens == 5
        scored = await client.completions.create(
            model="fake-model", prompt=[1, 2, 3], max_tokens=2, logprobs=1, echo=True
        )
        logprobs = scored.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert len(logprobs.token_logprobs) == 5
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(**{**chat, "model": "other"})
        with pytest.raises(openai.BadRequestError, match="temperature") as caught:
            await client.completions.create(model="fake-model", prompt="a", temperature=-1)
        assert caught.value.param == "temperature"
        engine.failure, engine.fail_after = EngineDeadError("engine failed: step 3"), 2
        broken = await client.completions.create(model="fake-model", prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="step 3"):
            _ = [chunk async for chunk in broken]
        await client.close()

    over_socket(fake_app(engine), scenario)


def test_api_key_guards_everything_but_probes() -> None:
    app = fake_app(FakeEngine(), api_keys=("first", "second"))

    async def scenario(url: str) -> None:
        async with httpx.AsyncClient(base_url=url) as http:
            public = {"/health", "/ready", "/metrics"}
            paths = {getattr(route, "path", "") for route in app.routes}
            assert public < paths
            for path in [*paths, "/v1/nothing", "//v1/models", "/V1/models", "/v1/models/."]:
                for method in ("GET", "POST"):
                    response = await http.request(method, path)
                    assert (response.status_code == 401) == (path not in public), path
            for key, status in (("second", 200), ("first", 200), ("firs", 401), ("x", 401)):
                headers = {"Authorization": f"Bearer {key}"}
                response = await http.get("/v1/models", headers=headers)
                assert response.status_code == status
            wrong = await http.get("/v1/models", headers={"Authorization": "Basic first"})
            assert wrong.status_code == 401
            assert wrong.json()["error"]["code"] == "invalid_api_key"

    over_socket(app, scenario)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /health HTTP/1.1\r\nX: " + b"a" * 100_000, 431),
        (b"GET /" + b"a" * 100_000, 431),
        (b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 20_000, 431),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
    ],
)
def test_malformed_http(sent: bytes, status: int) -> None:
    async def scenario(url: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(sent)
        async with asyncio.timeout(60):
            answer = await reader.read()
        writer.close()
        return answer

    head, _, body = over_socket(fake_app(FakeEngine()), scenario).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert ("error" in json.loads(body)) == (status != 200)


def test_a_head_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poise.server.http_protocol.HEAD_SECONDS", 0.05)

    async def scenario(url: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(b"GET /health HTTP/1.1\r\n")
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()

    over_socket(fake_app(FakeEngine()), scenario)


def test_a_reader_that_stands_still_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poise.server.http_protocol.STALLED_SECONDS", 0.1)
    engine = FakeEngine(max_model_len=300_000, kv_capacity_tokens=300_000)

    async def scenario(url: str) -> None:
        body = {"prompt": "a", "stream": True, "max_tokens": 250_000}
        writer = await open_request(url, body)
        await until(lambda: engine.num_aborted == 1)
        writer.close()

    over_socket(fake_app(engine), scenario)
