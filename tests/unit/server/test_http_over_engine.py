"""The edge over the real engine loop (a scripted executor draws the tokens): same answers, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

import httpx
import prometheus_client
import pytest
from fake_server_engine import events, real_server

from poise.config import ServerConfig
from poise.engine.async_client import InProcessClient
from poise.engine.llm_engine import LLMEngine
from poise.server import create_app

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from engine_harness import (  # type: ignore[import-not-found]
    ByteTokenizer,
    TypingDrafter,
    TypingExecutor,
    make_engine,
)


def serve(engine: LLMEngine, scenario: Any) -> Any:
    async def run() -> Any:
        client = InProcessClient.from_engine(engine)
        await client.wait_ready()
        app = create_app(
            client,
            ByteTokenizer(),
            ServerConfig(),
            prometheus_client.CollectorRegistry(),
            version="1",
        )
        async with real_server(app) as url, httpx.AsyncClient(base_url=url, timeout=20) as http:
            return await scenario(http, client)

    return asyncio.run(run())


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "hello", "max_tokens": 12, "temperature": 0, "seed": 0},
        {"prompt": ["hello", "world"], "n": 2, "max_tokens": 9, "seed": 4, "logprobs": 2},
        {"prompt": "score me", "max_tokens": 0, "echo": True, "logprobs": 1},
        {"prompt": "hello", "max_tokens": 5, "echo": True, "logprobs": 0, "seed": 1},
    ],
)
def test_stream_and_whole_agree(body: dict[str, Any]) -> None:
    async def scenario(http: httpx.AsyncClient, client: InProcessClient) -> None:
        whole = (await http.post("/v1/completions", json=body)).json()
        streamed = await http.post("/v1/completions", json={**body, "stream": True})
        chunks = [choice for event in events(streamed.text)[:-1] for choice in event["choices"]]
        for expected in whole["choices"]:
            parts = [chunk for chunk in chunks if chunk["index"] == expected["index"]]
            assert "".join(part["text"] for part in parts) == expected["text"]
            assert parts[-1]["finish_reason"] == expected["finish_reason"]
            if "logprobs" in body:
                for name, values in expected["logprobs"].items():
                    assert [v for part in parts for v in part["logprobs"][name]] == values

    serve(make_engine(), scenario)


def test_the_speculative_field_and_what_usage_says_of_drafts() -> None:
    engine = make_engine(TypingExecutor(lambda prompt: b"twel?s"), drafter=TypingDrafter(b"twelve"))
    body = {"prompt": "hello", "max_tokens": 20, "seed": 1}
    drafting = {"method": "ngram", "num_speculative_tokens": 6}

    async def scenario(http: httpx.AsyncClient, client: InProcessClient) -> None:
        await http.post("/v1/completions", json=body)
        plain = (await http.post("/v1/completions", json=body)).json()
        assert "completion_tokens_details" not in plain["usage"]
        drafted = {**body, "speculative": drafting}
        answer = (await http.post("/v1/completions", json=drafted)).json()
        assert answer["choices"] == plain["choices"]
        details = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 4}
        assert answer["usage"] == {**plain["usage"], "completion_tokens_details": details}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = await http.post("/v1/completions", json={**drafted, **options})
        assert events(streamed.text)[-2]["usage"] == answer["usage"]
        why = (await http.get(f"/v1/requests/{answer['id']}")).json()
        [times] = why["prompts"][0]["choices"]
        assert (times["accepted_tokens"], times["drafted_tokens"]) == (5, 9)
        for off in (False, {"method": "off"}):
            answer = (await http.post("/v1/completions", json={**body, "speculative": off})).json()
            assert answer["usage"] == plain["usage"]
        for wrong in ("ngram", {"method": "eagle"}, {"method": "self"}, {"num": 3}, True):
            refused = await http.post("/v1/completions", json={**body, "speculative": wrong})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "speculative"

    serve(engine, scenario)


def test_hang_ups_free_every_block() -> None:
    engine = make_engine()
    rng = random.Random(3)

    async def ask(http: httpx.AsyncClient, seconds: float | None) -> str:
        size = rng.choice([3, 17, 40])
        body = {
            "prompt": [rng.randrange(256) for _ in range(size)],
            "max_tokens": 100,
            "stream": rng.random() < 0.5,
            "ignore_eos": True,
        }
        try:
            response = await http.post("/v1/completions", json=body, timeout=seconds)
        except httpx.TimeoutException:
            return "gone"
        return response.text

    async def scenario(http: httpx.AsyncClient, client: InProcessClient) -> None:
        probe = {"prompt": "the same", "max_tokens": 20, "seed": 9, "logprobs": 1}
        before = (await http.post("/v1/completions", json=probe)).json()["choices"]
        outcomes: list[str] = []
        for _ in range(5):
            outcomes += await asyncio.gather(
                *(ask(http, rng.random() * 0.05 + 0.001) for _ in range(30))
            )
        assert "gone" in outcomes
        async with asyncio.timeout(10):
            while client.num_unfinished_requests or engine.has_unfinished_requests():
                await asyncio.sleep(0.01)
        after = (await http.post("/v1/completions", json=probe)).json()["choices"]
        assert after == before

    serve(engine, scenario)
    engine._scheduler.check_invariants()
    assert engine._scheduler.stats().num_free_blocks == 64
