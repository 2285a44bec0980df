"""What the engine refuses or ends, in HTTP's words; and what a request's timeline tells, to whom."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx
import prometheus_client
import pytest
from fake_server_engine import FakeEngine, call, fake_app, http_client, real_server
from test_explanation import PREEMPTED
from test_http_tenants import Town

from poise.cli.main import run
from poise.config import ServerConfig
from poise.engine.async_client import InProcessClient
from poise.errors import DeadlineError, QueueFullError
from poise.server import create_app
from poise.server.tenants import Tenants

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from engine_harness import ByteTokenizer, make_engine  # type: ignore[import-not-found]

BODY = {"prompt": "hello", "max_tokens": 3}
FULL = QueueFullError("12 requests wait", reason="queued_requests", retry_after_seconds=2.1)
LATE = DeadlineError("too late", reason="deadline_first_token", retry_after_seconds=0.2)
NEVER = DeadlineError("never", reason="deadline_end", retry_after_seconds=0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "kind", "code", "retry_after"),
    [
        (FULL, 429, "rate_limit_error", "queued_requests", "3"),
        (LATE, 429, "rate_limit_error", "deadline_first_token", "1"),
        (NEVER, 422, "invalid_request_error", "deadline_end", None),
    ],
)
def test_what_the_engine_refuses(
    failure: Exception, status: int, kind: str, code: str, retry_after: str | None, stream: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level("INFO", "poise.requests")
    response = call(FakeEngine(failure=failure), "/v1/completions", {**BODY, "stream": stream})
    assert response.status_code == status
    body = response.json()["error"]
    assert (body["type"], body["code"], body["message"]) == (kind, code, str(failure))
    assert response.headers.get("retry-after") == retry_after
    assert caplog.records[-1].getMessage().endswith(f"finish={code}")


def test_what_was_refused_has_used_nothing(tmp_path: Path) -> None:
    town = Town(tmp_path / "tenants.toml")
    limits = "requests_per_minute = 1\ntokens_per_minute = 8\nmax_concurrent_requests = 1"
    town.write(acme=limits)
    engine = FakeEngine(failure=FULL)

    async def scenario() -> None:
        async with http_client(fake_app(engine, tenants=Tenants(town.path))) as http:

            async def ask() -> httpx.Response:
                return await http.post("/v1/completions", json=BODY, headers=town.headers("acme"))

            for _ in range(5):
                assert (await ask()).json()["error"]["code"] == "queued_requests"
            engine.failure = None
            assert (await ask()).status_code == 200
            assert (await ask()).json()["error"]["code"] == "rate_limit_exceeded"
            usage = (await http.get("/v1/usage", headers=town.headers("acme"))).json()
            assert (usage["requests"], usage["refused"], usage["input_tokens"]) == (1, 6, 5)

    asyncio.run(scenario())


def test_a_timeline_is_its_own_tenants(tmp_path: Path) -> None:
    town = Town(tmp_path / "tenants.toml")
    town.write(acme="", bolt="")
    engine = FakeEngine()

    async def scenario() -> None:
        async with http_client(fake_app(engine, tenants=Tenants(town.path))) as http:
            headers = town.headers("acme", **{"x-request-id": "mine"})
            body = {**BODY, "prompt": ["a", "b"]}
            ours = (await http.post("/v1/completions", json=body, headers=headers)).json()["id"]
            engine.timelines = {f"{ours}-1": PREEMPTED}
            for name in ("mine", ours):
                answer = (await http.get(f"/v1/requests/{name}", headers=headers)).json()
                assert (answer["id"], answer["status"]) == (ours, "finished")
                first, second = answer["prompts"]
                assert first == {"choices": [], "events": []}
                assert second["events"] == PREEMPTED
                assert second["choices"][0]["num_preemptions"] == 1
                for stranger in (
                    town.headers("bolt"),
                    town.headers("bolt", **{"x-request-id": "mine"}),
                ):
                    response = await http.get(f"/v1/requests/{name}", headers=stranger)
                    assert response.status_code == 404
            assert (await http.get("/v1/requests/none", headers=headers)).status_code == 404
            assert (await http.get("/v1/requests/", headers=headers)).status_code == 404

    asyncio.run(scenario())


def test_why_tells_where_the_time_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    town = Town(tmp_path / "tenants.toml")
    town.write(acme="", bolt="")
    engine = FakeEngine()

    async def scenario() -> None:
        app = fake_app(engine, tenants=Tenants(town.path))
        async with real_server(app) as url, httpx.AsyncClient(base_url=url) as http:
            headers = town.headers("acme")
            ours = (await http.post("/v1/completions", json=BODY, headers=headers)).json()["id"]
            engine.timelines = {ours: PREEMPTED}

            async def why(*arguments: str) -> tuple[int, str, str]:
                status = await asyncio.to_thread(run, ["why", "--url", url, *arguments])
                captured = capsys.readouterr()
                return status, captured.out, " ".join(captured.err.split())

            status, out, _ = await why(ours, "--api-key", town.keys["acme"])
            assert status == 0
            line = next(line for line in out.splitlines() if line.startswith("choice 0"))
            assert line.startswith("choice 0: 20.000 s, of these 3.000 s waited in the queue")
            text = " ".join(out.split())
            assert "a place among those running 2.000" in text
            assert "preempted 1 times; ended by stop" in text
            assert "because kv_blocks, by another request" in text
            monkeypatch.setenv("POISE_API_KEY", town.keys["bolt"])
            status, out, err = await why(ours)
            assert (status, out) == (1, "")
            assert "There is no request" in err
            monkeypatch.setenv("POISE_API_KEY", "wrong")
            assert "API key is missing or wrong" in (await why(ours))[2]
        assert "gives no answer" in (await why(ours))[2]

    asyncio.run(scenario())


def test_the_timeline_of_the_real_engine() -> None:
    engine = make_engine()

    async def scenario() -> Any:
        client = InProcessClient.from_engine(engine)
        await client.wait_ready()
        registry = prometheus_client.CollectorRegistry()
        app = create_app(client, ByteTokenizer(), ServerConfig(), registry, version="1")
        async with real_server(app) as url, httpx.AsyncClient(base_url=url, timeout=20) as http:
            body = {"prompt": "hello" * 10, "max_tokens": 5, "n": 2, "ignore_eos": True}
            ours = (await http.post("/v1/completions", json=body)).json()["id"]
            return (await http.get(f"/v1/requests/{ours}")).json()

    [prompt] = asyncio.run(scenario())["prompts"]
    kinds = [event["kind"] for event in prompt["events"] if event["choice"] == 0]
    assert [kinds[0], kinds[-2], kinds[-1]] == ["arrived", "first_token", "finished"]
    assert [times["finish_reason"] for times in prompt["choices"]] == ["length", "length"]
