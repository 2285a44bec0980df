"""Tenants over HTTP: keys, limits, owners of requests, a reload while serving."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_server_engine import ByteTokenizer, FakeEngine, call, fake_app, http_client, real_server

from poise.core.request import RequestOwner
from poise.server.api_keys import new_key
from poise.server.public_prefix import PublicPrefix, encode_public_prefix, read_public_text
from poise.server.tenants import Tenants


@dataclass
class Town:
    """A tenants file with a key for each tenant."""

    path: Path
    keys: dict[str, str] = field(default_factory=dict)

    def write(self, **settings: str) -> None:
        tables = []
        for name, lines in settings.items():
            key, entry = new_key()
            self.keys[name] = key
            tables.append(f"[tenants.{name}]\nkeys = ['{entry}']\n{lines}\n")
        self.path.write_text("\n".join(tables))

    def headers(self, name: str, **more: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[name]}", **more}

    def call(
        self,
        engine: FakeEngine,
        name: str,
        path: str = "/v1/completions",
        body: Any = None,
        **options: Any,
    ) -> httpx.Response:
        headers = self.headers(name, **options.pop("headers", {}))
        body = body or {"prompt": "hello", "max_tokens": 3}
        return call(engine, path, body, headers=headers, tenants=Tenants(self.path), **options)


@pytest.fixture
def town(tmp_path: Path) -> Town:
    town = Town(tmp_path / "tenants.toml")
    town.write(acme="", bolt="")
    return town


def error(response: httpx.Response, status: int, kind: str, code: str) -> str:
    assert response.status_code == status, response.text
    body = response.json()["error"]
    assert (body["type"], body["code"]) == (kind, code)
    message: str = body["message"]
    return message


def test_every_route_but_the_public_ones_wants_a_key(town: Town) -> None:
    async def scenario() -> None:
        app = fake_app(FakeEngine(), tenants=Tenants(town.path), profiling=True)
        async with http_client(app) as http:
            for route in app.routes:
                path = route.path.replace("{model:path}", "fake-model").replace("{request_id}", "x")  # type: ignore[attr-defined]
                for key in (
                    "",
                    "Bearer x",
                    f"Basic {town.keys['acme']}",
                    "Bearer " + town.keys["acme"][:-1],
                ):
                    response = await http.get(path, headers={"authorization": key})
                    public = path in ("/health", "/ready", "/metrics")
                    assert (response.status_code != 401) == public, (path, key)
            headers = town.headers("acme")
            assert (await http.get("/v1/models", headers=headers)).status_code == 200

    asyncio.run(scenario())


def test_a_wrong_key_has_openais_shape(town: Town) -> None:
    response = call(FakeEngine(), "/v1/models", method="GET", tenants=Tenants(town.path))
    assert "Bearer" in error(response, 401, "authentication_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"


def owner_of(town: Town, name: str, body: Mapping[str, Any], **options: Any) -> RequestOwner:
    engine = FakeEngine()
    response = town.call(engine, name, body={"prompt": "hello", "max_tokens": 1, **body}, **options)
    assert response.status_code == 200, response.text
    return engine.requests[0].owner


def test_the_salt_is_the_tenants_and_a_client_can_only_narrow_it(town: Town) -> None:
    salts = [
        owner_of(town, "acme", {}).cache_salt,
        owner_of(town, "bolt", {}).cache_salt,
        owner_of(town, "acme", {"cache_salt": "x"}).cache_salt,
        owner_of(town, "bolt", {"cache_salt": "x"}).cache_salt,
        owner_of(town, "bolt", {"cache_salt": "acme"}).cache_salt,
    ]
    assert len(set(salts)) == len(salts)
    assert all(len(salt) == 32 for salt in salts)
    assert owner_of(town, "acme", {"cache_salt": "x"}).cache_salt == salts[2]
    assert owner_of(town, "acme", {}).tenant == "acme"


def test_class_priority_and_deadline_come_from_body_header_or_file(town: Town) -> None:
    town.write(acme="service_class = 'batch'\nmin_priority = -3", bolt="min_priority = 2")
    assert owner_of(town, "acme", {}).service_class == "batch"
    assert owner_of(town, "acme", {"service_class": "interactive"}).service_class == "interactive"
    assert owner_of(town, "acme", {}).priority == 0
    assert owner_of(town, "bolt", {}).priority == 2
    assert owner_of(town, "acme", {"priority": -3}).priority == -3
    assert owner_of(town, "acme", {}, headers={"x-vllm-priority": "7"}).priority == 7
    assert owner_of(town, "acme", {"priority": 7}, headers={"x-vllm-priority": "7"}).priority == 7
    assert owner_of(town, "acme", {}).deadline is None
    near = owner_of(town, "acme", {"deadline_ms": 1000}).deadline
    far = owner_of(town, "acme", {}, headers={"x-request-deadline-ms": "3600000.5"}).deadline
    assert near is not None
    assert far is not None
    assert 3000 < far - near < 3700


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"priority": -1}, {}, "priority"),
        ({}, {"x-vllm-priority": "-1"}, "priority"),
        ({}, {"x-vllm-priority": "high"}, "x-vllm-priority"),
        ({}, {"x-vllm-priority": "1.5"}, "x-vllm-priority"),
        ({"priority": 1}, {"x-vllm-priority": "2"}, "priority"),
        ({}, {"x-request-deadline-ms": "soon"}, "x-request-deadline-ms"),
        ({}, {"x-request-deadline-ms": "nan"}, "x-request-deadline-ms"),
        ({}, {"x-request-deadline-ms": "0"}, "x-request-deadline-ms"),
        ({"deadline_ms": 5}, {"x-request-deadline-ms": "6"}, "deadline_ms"),
    ],
)
def test_wrong_urgency_is_refused(town: Town, body: Any, headers: Any, param: str) -> None:
    engine = FakeEngine()
    response = town.call(engine, "acme", body={"prompt": "a", **body}, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not engine.requests


@pytest.mark.parametrize("policy", ["fcfs", "fair", "static"])
def test_a_priority_that_would_change_nothing_is_refused(policy: str) -> None:
    for priority, status in ((0, 200), (1, 400)):
        body = {"prompt": "a", "priority": priority}
        response = call(FakeEngine(policy=policy), "/v1/completions", body)
        assert response.status_code == status
    assert f"policy, {policy}; leave it out" in response.json()["error"]["message"]


def test_without_tenants_priority_is_free_and_salts_separate_only_who_asks() -> None:
    engine = FakeEngine()
    for body in ({}, {"cache_salt": "x"}, {"cache_salt": "y"}, {"priority": -9}):
        assert call(engine, "/v1/completions", {"prompt": "a", **body}).status_code == 200
    owners = [request.owner for request in engine.requests]
    assert owners[0] == RequestOwner()
    assert len({owner.cache_salt for owner in owners}) == 3
    assert owners[3].priority == -9


def test_limits_of_one_request(town: Town) -> None:
    town.write(acme="max_input_tokens = 10\nmax_output_tokens = 5", bolt="")
    engine = FakeEngine()
    for body, param in (
        ({"prompt": "x" * 11}, "prompt"),
        ({"prompt": ["x", "x" * 11]}, "prompt"),
        ({"prompt": "x", "max_tokens": 6}, "max_tokens"),
    ):
        response = town.call(engine, "acme", body=body)
        error(response, 400, "invalid_request_error", "tenant_limit_exceeded")
        assert response.json()["error"]["param"] == param
        assert town.call(engine, "bolt", body=body).status_code == 200
    assert town.call(engine, "acme", body={"prompt": "x" * 10}).status_code == 200
    assert engine.requests[-1].params.max_tokens == 5  # a default gives way
    chat = {"messages": [{"role": "user", "content": "x" * 11}]}
    response = town.call(engine, "acme", "/v1/chat/completions", chat)
    assert response.json()["error"]["param"] == "messages"


def test_limits_over_time_are_429_with_retry_after(town: Town) -> None:
    town.write(acme="requests_per_minute = 2", bolt="tokens_per_minute = 8")
    tenants = Tenants(town.path)
    body = {"prompt": "hello", "max_tokens": 3}

    async def scenario() -> None:
        async with http_client(fake_app(FakeEngine(), tenants=tenants)) as http:
            for name, path, allowed in (
                ("acme", "/v1/completions", 2), ("bolt", "/v1/completions", 1),
            ):  # fmt: skip
                for _ in range(allowed):
                    response = await http.post(path, json=body, headers=town.headers(name))
                    assert response.status_code == 200
                response = await http.post(path, json=body, headers=town.headers(name))
                message = error(response, 429, "rate_limit_error", "rate_limit_exceeded")
                assert name in message
                assert 25 <= int(response.headers["retry-after"]) <= 60
            response = await http.post(
                "/tokenize", json={"prompt": "a"}, headers=town.headers("acme")
            )
            error(response, 429, "rate_limit_error", "rate_limit_exceeded")

    asyncio.run(scenario())


def test_a_place_is_given_back_however_an_answer_ends(town: Town) -> None:
    town.write(acme="max_concurrent_requests = 1", bolt="")
    tenants = Tenants(town.path)
    gate = asyncio.Event()
    engine = FakeEngine(pace=gate.wait)
    headers = town.headers("acme")
    body = {"prompt": "hello", "max_tokens": 2}

    async def scenario() -> None:
        app = fake_app(engine, tenants=tenants)
        async with real_server(app) as url, httpx.AsyncClient(base_url=url, timeout=10) as http:
            first = asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))
            while not engine.num_running:
                await asyncio.sleep(0.01)
            busy = await http.post("/v1/completions", json=body, headers=headers)
            error(busy, 429, "rate_limit_error", "rate_limit_exceeded")
            assert busy.headers["retry-after"] == "1"
            other = asyncio.create_task(
                http.post("/v1/completions", json=body, headers=town.headers("bolt"))
            )
            first.cancel()  # hangs up
            while engine.num_aborted == 0:
                await asyncio.sleep(0.01)
            gate.set()
            assert (await other).status_code == 200
            for bad in ({"prompt": ""}, {"prompt": "a", "seeed": 1}, b"{"):
                content = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
                kind = {"content-type": "application/json"}
                refused = await http.post(
                    "/v1/completions", content=content, headers=headers | kind
                )
                assert refused.status_code == 400
            engine.failure = ValueError("on purpose")
            broken = await http.post("/v1/completions", json=body, headers=headers)
            assert broken.status_code == 500
            engine.failure = None
            good = await http.post("/v1/completions", json=body, headers=headers)
            assert good.status_code == 200

    asyncio.run(scenario())


def test_a_hang_up_signal_reads_the_file_again(
    town: Town, caplog: pytest.LogCaptureFixture
) -> None:
    tenants = Tenants(town.path)
    engine = FakeEngine()

    async def status(http: httpx.AsyncClient, key: str) -> int:
        response = await http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        return response.status_code

    async def scenario() -> None:
        old = town.keys["acme"]
        app = fake_app(engine, tenants=tenants)
        async with real_server(app, reloads=True) as url, httpx.AsyncClient(base_url=url) as http:
            assert await status(http, old) == 200
            town.path.write_text("[tenants.acme]\nwieght = 3")
            os.kill(os.getpid(), signal.SIGHUP)
            while "wieght" not in caplog.text:
                await asyncio.sleep(0.01)
            assert await status(http, old) == 200
            town.write(acme="weight = 3")
            os.kill(os.getpid(), signal.SIGHUP)
            while not engine.tenants.tenants:
                await asyncio.sleep(0.01)
            assert engine.tenants["acme"].weight == 3
            assert await status(http, old) == 401
            assert await status(http, town.keys["acme"]) == 200

    asyncio.run(scenario())


# --- the public prefix ----------------------------------------------------------------------------


def public_tokens(prefix: PublicPrefix, path: str, body: Any) -> list[int]:
    engine = FakeEngine(max_model_len=1000)
    assert call(engine, path, body, public_prefix=prefix).status_code == 200
    return [request.owner.num_public_tokens for request in engine.requests]


def test_public_tokens_are_those_of_the_text_alone() -> None:
    text = "You are kind."
    prefix = encode_public_prefix(text, ByteTokenizer())

    def chat(*messages: tuple[str, str]) -> list[int]:
        body = {"messages": [{"role": role, "content": content} for role, content in messages]}
        return public_tokens(prefix, "/v1/chat/completions", body)

    start = len(f"system: {text}\nuser: ")
    assert chat(("system", text), ("user", "hi")) == [start]
    assert chat(("system", text), ("user", "A")) == [start]
    assert chat(("system", text + "!"), ("user", "hi")) == [len(f"system: {text}")]
    assert chat(("system", "You are rude."), ("user", "hi")) == [len("system: You are ")]
    assert chat(("user", text + " So?")) == [len(f"user: {text}")]
    assert chat(("assistant", "no")) == [0]
    prompts = [text + "A secret", text, "You", "no", text + "B"]
    expected = [len(text), len(text), 3, 0, len(text)]
    assert public_tokens(prefix, "/v1/completions", {"prompt": prompts}) == expected


def test_the_file_of_a_public_prefix(tmp_path: Path) -> None:
    path = tmp_path / "system.txt"
    path.write_bytes("Sei höflich.\r\n".encode())
    assert read_public_text(path) == "Sei höflich."
    from poise.errors import ConfigError

    for content, words in ((b"", "is empty"), (b"\n", "is empty"), (b"\xff", "not UTF-8")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            read_public_text(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_public_text(tmp_path / "none")
