"""Cancelling by id: the tenant's own requests only, by our id or his, running, queued or long gone."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import prometheus_client
import pytest
from fake_server_engine import FakeEngine, events, fake_app, real_server
from test_http_tenants import Town

from poise.config import ServerConfig
from poise.engine.async_client import InProcessClient
from poise.server import create_app
from poise.server.request_book import RequestBook, RequestNotFoundError
from poise.server.tenants import Tenants

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from engine_harness import ByteTokenizer, make_engine  # type: ignore[import-not-found]

BODY = {"prompt": "hello", "max_tokens": 100}


def serve(
    tmp_path: Path,
    engine: FakeEngine,
    scenario: Callable[[httpx.AsyncClient, Town], Awaitable[None]],
) -> None:
    town = Town(tmp_path / "tenants.toml")
    town.write(acme="", bolt="")

    async def run() -> None:
        app = fake_app(engine, tenants=Tenants(town.path))
        async with real_server(app) as url, httpx.AsyncClient(base_url=url, timeout=10) as http:
            await scenario(http, town)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_running_answer_ends_with_what_it_has(tmp_path: Path, stream: bool) -> None:
    engine = FakeEngine(pace=lambda: asyncio.sleep(0.01))

    async def scenario(http: httpx.AsyncClient, town: Town) -> None:
        headers = town.headers("acme", **{"x-request-id": "mine"})
        body = {**BODY, "stream": stream, "n": 2}
        answer = asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))
        while engine.num_steps < 3:
            await asyncio.sleep(0.01)
        path = "/v1/requests/mine/cancel"
        for stranger in (town.headers("bolt"), town.headers("bolt", **{"x-request-id": "mine"})):
            response = await http.post(path, headers=stranger)
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "request_not_found"
        assert (await http.post(path)).status_code == 401
        response = await http.post(path, headers=town.headers("acme"))
        [ours] = response.json()["cancelled"]
        assert ours == engine.requests[0].request_id
        response = await answer
        assert response.status_code == 200
        if stream:
            *chunks, done = events(response.text)
            assert done == "[DONE]"
            reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
            assert [reason for reason in reasons if reason] == ["abort", "abort"]
        else:
            choices = response.json()["choices"]
            assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
            assert all(choice["text"] for choice in choices)
        for name in ("mine", ours, ours.removeprefix("cmpl-")):
            response = await http.post(f"/v1/requests/{name}/cancel", headers=headers)
            assert response.json() == {
                "id": name,
                "cancelled": [],
                "object": "request.cancellation",
            }

    serve(tmp_path, engine, scenario)


def test_a_clients_id_may_name_several_and_anothers_is_never_meant(tmp_path: Path) -> None:
    engine = FakeEngine(pace=lambda: asyncio.sleep(0.01))

    async def scenario(http: httpx.AsyncClient, town: Town) -> None:
        same = {"x-request-id": "a/b"}
        answers = {
            name: [
                asyncio.create_task(
                    http.post("/v1/completions", json=BODY, headers=town.headers(name, **same))
                )
                for _ in range(3)
            ]
            for name in ("acme", "bolt")
        }
        while engine.num_running < 6:
            await asyncio.sleep(0.01)
        response = await http.post("/v1/requests/a/b/cancel", headers=town.headers("acme"))
        assert len(set(response.json()["cancelled"])) == 3
        for name, reason in (("acme", "abort"), ("bolt", "length")):
            for answer in answers[name]:
                assert (await answer).json()["choices"][0]["finish_reason"] == reason

    serve(tmp_path, engine, scenario)


def test_several_prompts_end_together(tmp_path: Path) -> None:
    engine = FakeEngine(pace=lambda: asyncio.sleep(0.01))

    async def scenario(http: httpx.AsyncClient, town: Town) -> None:
        headers = town.headers("acme", **{"x-request-id": "x"})
        body = {**BODY, "prompt": ["a", "b", "c"]}
        answer = asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))
        while engine.num_running < 3:
            await asyncio.sleep(0.01)
        await http.post("/v1/requests/x/cancel", headers=headers)
        choices = (await answer).json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["abort"] * 3

    serve(tmp_path, engine, scenario)


def test_the_engine_ends_requests_that_run_and_that_wait() -> None:
    """The real loop: one slot, so that all but one are in the queue."""
    engine = make_engine(max_num_seqs=1)

    async def run() -> None:
        client = InProcessClient.from_engine(engine)
        await client.wait_ready()
        registry = prometheus_client.CollectorRegistry()
        app = create_app(client, ByteTokenizer(), ServerConfig(), registry, version="1")
        async with real_server(app) as url, httpx.AsyncClient(base_url=url, timeout=20) as http:

            async def ask(name: str) -> Any:
                body = {"prompt": "hello", "max_tokens": 150, "ignore_eos": True}
                headers = {"x-request-id": name}
                return await http.post("/v1/completions", json=body, headers=headers)

            for round_number in range(10):
                names = [f"{round_number}-{i}" for i in range(6)]
                answers = [asyncio.create_task(ask(name)) for name in names]
                pending = set(names)
                while pending:
                    for name in tuple(pending):
                        response = await http.post(f"/v1/requests/{name}/cancel")
                        if response.status_code == 200:
                            pending.discard(name)
                for answer in answers:
                    [choice] = (await answer).json()["choices"]
                    assert choice["finish_reason"] in ("abort", "length")
            body = {"prompt": "hello", "max_tokens": 3}
            assert (await http.post("/v1/completions", json=body)).status_code == 200

    asyncio.run(run())
    engine._scheduler.check_invariants()
    assert engine._scheduler.stats().num_free_blocks == 64


def test_the_book_keeps_a_fixed_number_of_finished_requests() -> None:
    book = RequestBook(num_finished_kept=3)
    with book.running("a", "cmpl-0", "again", ["cmpl-0"]) as first:
        for number in range(1, 6):
            with book.running("a", f"cmpl-{number}", "again", [f"cmpl-{number}"]):
                pass
        found = [request.request_id for request in book.find("a", "again")]
        assert found == ["cmpl-0", "cmpl-3", "cmpl-4", "cmpl-5"]
        assert book.find("a", "cmpl-0") == [first]
        assert first.running
    for tenant, name in (("b", "again"), ("a", "cmpl-1"), ("a", "1"), ("a", "")):
        with pytest.raises(RequestNotFoundError):
            book.find(tenant, name)
    assert len(book._by_name) == 7  # "again", and two names of each of the three that are kept
